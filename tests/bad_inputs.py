"""The kinds of bad input, by number: where each is tried, and what the cases that are tried here have in common.

A case is a function of a `Room`, marked with the number of its kind. Kinds that other tests try already are named in
`COVERED`, those that wait for a part of the product which is not built in `WAITING`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Ran, bert, command, llama
from tiny_tokenizers import SIZE, texts, tokenizer, write

KINDS = [
    "B001", "B002", "B003", "B005", "B006", "B008", "B009", "B010", "B011", "B012", "B013", "B014", "B015",
    "B017", "B023", "B024", "B025", "B026", "B028", "B029", "B030", "B032", "B033", "B034", "B036", "B037",
    "B039", "B041", "B044", "B046", "B047", "B048", "B049", "B050", "B051", "B052", "B053", "B054", "B056",
    "B058", "B059", "B060", "B061", "B064", "B067", "B068", "B069", "B070", "B072", "B073", "B074", "B075",
    "B077", "B078", "B079", "B080", "B082", "B084", "B086", "B087", "B088", "B089", "B091", "B092", "B094",
    "B097", "B098", "B101", "B102", "B103", "B104", "B105", "B106", "B107", "B109", "B110", "B112", "B113",
    "B115", "B116", "B118", "B119", "B121", "B122", "B124", "B125", "B128", "B129", "B130",
]  # fmt: skip
"""Every kind there is."""

COVERED = {
    "B001": "test_cli.py::test_wrong_use_is_refused_before_a_model_is_opened",
    "B002": "test_cli.py::test_wrong_use_is_refused_before_a_model_is_opened",
    "B003": "test_cli.py::test_wrong_use_is_refused_before_a_model_is_opened",
    "B005": "test_cli.py::test_wrong_use_is_refused_before_a_model_is_opened",
    "B010": "test_models.py::test_devices_and_number_formats",
    "B011": "test_cli.py::test_wrong_use_is_refused_before_a_model_is_opened",
    "B013": "test_cli_process.py::test_a_reader_that_leaves_early_is_no_fault",
    "B014": "test_cli_process.py::test_a_full_disk_is_said",
    "B015": "test_cli_process.py::test_no_terminal_sequences_where_they_are_unwanted",
    "B017": "test_cli_process.py::test_a_locale_without_letters",
    "B023": "test_location.py::test_names_that_are_no_model",
    "B026": "test_models.py::test_config_that_cannot_be_read",
    "B029": "test_location.py::test_odd_folder_names",
    "B030": "test_models.py::test_config_that_cannot_be_read",
    "B032": "test_headers.py::test_a_configuration_too_large_is_not_parsed",
    "B033": "test_models.py::test_impossible_head_counts",
    "B034": "test_models.py::test_key_value_heads_must_divide",
    "B036": "test_models.py::test_absurd_sizes_are_refused_quickly_and_in_little_memory",
    "B037": "test_models.py::test_config_that_cannot_be_read",
    "B044": "test_models.py::test_weights_outside_the_folder_are_not_opened",
    "B046": "test_headers.py::test_index_and_shards_that_disagree",
    "B047": "test_models.py::test_missing_weights",
    "B049": "test_models.py::test_missing_task_head",
    "B050": "test_models.py::test_non_finite_weights",
    "B052": "test_models.py::test_pickles_are_refused_unless_allowed",
    "B053": "test_models.py::test_a_malicious_pickle_is_never_run",
    "B054": "test_models.py::test_safetensors_go_before_a_pickle",
    "B058": "test_sources.py::test_missing_files_and_what_is_near",
    "B059": "test_sources.py::test_nothing_inside_is_no_examples",
    "B060": "test_sources.py::test_broken_json_line_shows_80_characters_escaped",
    "B061": "test_sources.py::test_faults_are_told_with_their_place",
    "B064": "test_sources.py::test_faults_are_told_with_their_place",
    "B067": "test_sources.py::test_text_lines_end_at_lf_and_crlf_only",
    "B068": "test_sources.py::test_faults_are_told_with_their_place",
    "B070": "test_unpack.py::test_bombs_are_refused_in_little_memory",
    "B072": "test_hub_data.py::test_failures_of_the_hub",
    "B073": "test_hub_data.py::test_an_unknown_split_lists_the_splits",
    "B077": "test_tasks.py::test_no_pad_token_is_noted_and_a_stand_in_found",
    "B078": "test_tasks.py::test_padding_side_of_the_tokenizer_changes_nothing",
    "B079": "test_data.py::test_truncation_is_counted",
    "B082": "test_data.py::test_special_token_strings_are_plain_text_unless_asked",
    "B089": "test_choice.py::test_ties_go_by_head_order",
    "B091": "test_objective.py::test_dropout_is_off",
    "B094": "test_folder_writing.py::test_a_target_that_exists",
    "B097": "test_folder_writing.py::test_a_parent_that_cannot_be_used",
    "B098": "test_folder_writing.py::test_a_small_disk",
    "B101": "test_folder_writing.py::test_several_runs_at_once",
    "B103": "test_field_bugs_pruning.py::test_native_only_lists_the_counts_that_are_possible",
    "B104": "test_layouts.py::test_portable_survives_two_round_trips_and_fails_loudly_without_its_code",
    "B106": "test_folder_writing.py::test_modes_follow_the_umask",
    "B107": "test_shares.py::test_b107_work_of_another_run_is_refused_by_name",
    "B109": "test_shares.py::test_b109_a_full_or_vanished_folder_is_one_error",
    "B110": "test_processes.py::test_b110_the_command_says_which_rank_was_killed_and_goes_on",
    "B112": "test_shares.py::test_b112_any_number_of_ranks_gives_the_bits_of_one",
    "B113": "test_shares.py::test_b113_ranks_that_see_different_things_stop",
    "B115": "test_shares.py::test_b115_a_rank_asleep_is_named_after_the_timeout",
    "B116": "test_memory.py::test_b116_memory_that_runs_out_changes_nothing_but_a_note",
    "B118": "test_estimates.py::test_b118_the_peak_for_5120_heads_is_what_the_dry_run_states",
    "B119": "test_offload.py::test_the_backward_pass_keeps_no_weight_of_a_layer",
    "B121": "test_reports.py::test_no_csv_cell_is_a_formula",
    "B122": "test_reports.py::test_csv_bytes",
    "B125": "test_reports.py::test_html_gives_the_rows_back_and_runs_nothing",
    "B128": "test_reports_maps.py::test_terminal_map_is_split_and_says_so",
    "B129": "test_reports_files.py::test_existing_file_only_with_force",
    "B130": "test_reports_maps.py::test_picture_is_the_same_bytes_every_time",
}
"""The test that tries a kind from elsewhere."""

WAITING: dict[str, str] = {}
"""Kinds that are tried nowhere, and why."""


@dataclass(frozen=True)
class Room:
    """A place for one case: the command, a folder of its own, and copies of tiny models."""

    run: Callable[..., Ran]
    path: Path
    models: Callable[[str], Path]
    monkeypatch: pytest.MonkeyPatch

    def model(self, name: str = "classifier") -> Path:
        """A copy of a tiny model that may be damaged."""
        return Path(shutil.copytree(self.models(name), self.path / name))

    def data(self, *rows: dict[str, Any], name: str = "data.jsonl") -> str:
        """A file of JSON lines."""
        return write(self.path / name, rows)

    def labelled(self, count: int = 6) -> str:
        """A sound data file for the classifier."""
        lengths = [3 + number % 4 for number in range(count)]
        return self.data(*({"text": text, "label": number % 2} for number, text in enumerate(texts(lengths))))


Case = Callable[[Room], None]


def collector() -> tuple[dict[str, Case], Callable[[str], Callable[[Case], Case]]]:
    """The cases of one file by their kinds, and the mark that puts them there."""
    found: dict[str, Case] = {}

    def case(kind: str) -> Callable[[Case], Case]:
        def keep(function: Case) -> Case:
            assert kind not in found, kind
            found[kind] = function
            return function

        return keep

    return found, case


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny models by name, each made when it is first asked for."""
    room = tmp_path_factory.mktemp("tiny")
    makers = {
        "classifier": lambda folder: bert(folder, vocab_size=SIZE),
        "number": lambda folder: bert(folder, vocab_size=SIZE, num_labels=1),
        "writer": lambda folder: llama(folder, vocab_size=SIZE, max_position_embeddings=16),
        "tied": lambda folder: llama(folder, vocab_size=SIZE, tie_word_embeddings=True),
    }

    @cache
    def made(name: str) -> Path:
        folder = makers[name](room / name)
        tokenizer("bert" if name in ("classifier", "number") else "llama").save_pretrained(folder)
        torch.manual_seed(0)
        return folder

    return made


@pytest.fixture(name="room")
def made_room(
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
    tiny_models: Callable[[str], Path],
) -> Room:
    """A room for one case."""
    return Room(command(monkeypatch, capsysbinary), tmp_path, tiny_models, monkeypatch)


def read_json(path: Path) -> Any:
    """A JSON file by a reader that knows no NaN."""
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)


def names(cases: Iterable[str]) -> list[str]:
    """The numbers in order, as ids of tests."""
    return sorted(cases)
