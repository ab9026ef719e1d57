"""Units, finished work and many processes: whatever is shared, killed or resumed, numbers are the same to the bit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import forked
from safetensors.torch import load_file, save_file
from task_cases import CASES, Opened, open_case
from torch import Tensor

from headscope import shares, work
from headscope.data import DataOptions, load_examples
from headscope.errors import HeadscopeError, OutputError, WorkError
from headscope.fingerprints import difference
from headscope.gated_rows import GatedRows
from headscope.likeness import Question, compare_heads
from headscope.measures import Outputs
from headscope.models import LoadOptions, load
from headscope.moments import CrossMoments, TokenSample
from headscope.pairing import Party
from headscope.pairs import HeadSpace
from headscope.ranks import Ranks
from headscope.scores import Scores
from headscope.shares import RANGES, UNIT, Share, cut
from headscope.study import Study, StudyOptions, batches
from headscope.work import WorkFolder

MEASURES = ("importance", "sensitivity", "attention")
PAIRED = ("attention", "hellinger", "output", "cosine", "qk", "ov")
COPIES = 3
"""Each row of the case stands so often in the data: 21 examples, six units of four at one example a batch."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    case = CASES["single"]
    return open_case(replace(case, rows=case.rows * COPIES), tmp_path_factory.mktemp("single"))


def study_of(opened: Opened, share: Share | None = None, **options: Any) -> Study:
    """A study of its own; the model and its heads are known already."""
    study = Study(
        opened.study.loaded, opened.study.examples, replace(opened.study.options, **{"batch_size": 1} | options)
    )
    study.__dict__["discovery"] = opened.study.discovery
    study.share = study.share if share is None else share
    return study


def numbers(scores: Scores) -> dict[str, Tensor]:
    """Every number of a result, by column."""
    found = {name: torch.cat(list(by_site.values())) for name, by_site in scores.values.items()}
    loss = torch.tensor([scores.loss, scores.examples, *scores.stability.values()], dtype=torch.float64)
    return found | {"loss": loss}


def likeness(study: Study) -> dict[str, Tensor]:
    """Every measure of all pairs, and the nearest pairs by a search in two passes."""
    party = Party((study,))
    found = {name: one.values for name, one in compare_heads(party, Question(PAIRED)).values.items()}
    near = compare_heads(party, Question(("attention", "output"), top=3))
    return found | {"near": near.values["attention"].values, "left": near.pairs.left, "right": near.pairs.right}


def same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.equal(found[name].nan_to_num(nan=-7), values.nan_to_num(nan=-7)), name
    return True


@pytest.fixture(scope="module")
def undisturbed(opened: Opened) -> dict[str, Tensor]:
    return numbers(study_of(opened).scores(MEASURES))


def test_units_hold_every_batch_once_and_in_order(opened: Opened) -> None:
    for size in (1, 2, 61):
        whole = batches(study_of(opened, batch_size=size))
        for large in (False, True):
            units = cut(whole, large=large)
            assert [batch for unit in units for batch in unit] == whole
            assert all(len(unit) == len(units[0]) for unit in units[:-1])
    many = whole * 100
    assert [len(unit) for unit in cut(many, large=False)] == [UNIT] * 25
    assert len(cut(many, large=True)) == RANGES


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-9), ("float32", 1e-5)])
def test_the_batch_size_changes_only_rounding(opened: Opened, dtype: str, tolerance: float) -> None:
    place, data = opened.study.loaded.location.name, opened.study.examples
    assert data is not None
    one = load(place, LoadOptions(dtype=dtype))
    found = []
    for size in (1, 4, 61):
        study = Study(one, load_examples(data.name, one, opened.study.options.data), StudyOptions(batch_size=size))
        found.append(numbers(study.scores(MEASURES)))
    for other in found[1:]:
        for name, values in found[0].items():
            if name == "loss":  # loss and count; ranks of equal heads are up to rounding
                values, other[name] = values[:2], other[name][:2]
            scale = float(values.nan_to_num().abs().max())
            torch.testing.assert_close(other[name], values, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def test_what_is_kept_and_resumed_has_the_bits_of_one_run(
    opened: Opened, undisturbed: dict[str, Tensor], tmp_path: Path
) -> None:
    def run() -> dict[str, Tensor]:
        return numbers(study_of(opened, Share(work=WorkFolder(tmp_path))).scores(MEASURES))

    assert same_bits(run(), undisturbed)
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == [f"pass-1-unit-{number:06d}.safetensors" for number in range(6)]
    for gone in ([0], [5], [1, 2, 4], range(6)):
        for number in gone:
            files[number].unlink()
        (tmp_path / ".pass-1-unit-000002.safetensors.77").write_bytes(b"half")  # what a kill leaves
        before = {path: path.stat().st_mtime_ns for path in files if path.exists()}
        assert same_bits(run(), undisturbed)
        assert {path: path.stat().st_mtime_ns for path in before} == before, "finished units are not made again"
        assert sorted(tmp_path.iterdir()) == files


def test_finished_units_are_read_and_not_run(opened: Opened, undisturbed: dict[str, Tensor], tmp_path: Path) -> None:
    study_of(opened, Share(work=WorkFolder(tmp_path))).scores(MEASURES)
    first = tmp_path / "pass-1-unit-000000.safetensors"
    state = load_file(first)
    assert all(value.dtype == torch.float64 for name, value in state.items() if name != "notes")
    state["loss"][0] += 21.0
    save_file(state, first, metadata={"fingerprint": json.dumps(_fingerprint(first))})
    found = numbers(study_of(opened, Share(work=WorkFolder(tmp_path))).scores(MEASURES))
    assert float(found["loss"][0]) == pytest.approx(float(undisturbed["loss"][0]) + 1.0)


def _fingerprint(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["fingerprint"])


def test_b107_work_of_another_run_is_refused_by_name(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Share(work=WorkFolder(tmp_path / "work"))
    study_of(opened, kept).scores(["importance"])
    before = {path.name: path.read_bytes() for path in (tmp_path / "work").iterdir()}

    def refused(study: Study, field: str, measures: tuple[str, ...] = ("importance",)) -> bool:
        study.share = Share(work=WorkFolder(tmp_path / "work"))
        with pytest.raises(WorkError, match=f"units of another run: {field} is .* and was ") as caught:
            study.scores(measures)
        assert "--resume never" in str(caught.value.hint)
        return {path.name: path.read_bytes() for path in (tmp_path / "work").iterdir()} == before

    loaded, examples, options = opened.study.loaded, opened.study.examples, opened.study.options
    assert examples is not None
    assert refused(study_of(opened), "measures", ("importance", "sensitivity"))
    assert refused(study_of(opened, seed=3), "seed")
    assert refused(study_of(opened, batch_size=2), "batch_size")
    assert refused(study_of(opened, data=replace(options.data, limit=20)), "limit")
    assert refused(study_of(opened, draws=2), "draws")
    other = Study(loaded, replace(examples, digest="0" * 64), replace(options, batch_size=1))
    assert refused(other, "data")
    with monkeypatch.context() as patched:
        patched.setattr("headscope.provenance.version", lambda name: "9.9")
        assert refused(study_of(opened), "version of headscope")
    narrow = load(loaded.location.name, LoadOptions(dtype="float32"))
    assert refused(Study(narrow, examples, replace(options, batch_size=1)), "dtype")
    moved = tmp_path / "model"
    shutil.copytree(loaded.location.folder, moved)
    weights = load_file(moved / "model.safetensors")
    next(iter(weights.values())).flatten()[0] += 1
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    changed = load(str(moved), options.load)
    assert refused(Study(changed, examples, replace(options, batch_size=1)), "model")


def test_a_copy_of_the_model_goes_on_where_another_stopped(opened: Opened, tmp_path: Path) -> None:
    study_of(opened, Share(work=WorkFolder(tmp_path / "work"))).scores(["importance"])
    moved = tmp_path / "elsewhere"
    shutil.copytree(opened.study.loaded.location.folder, moved)
    examples, options = opened.study.examples, replace(opened.study.options, batch_size=1)
    study = Study(load(str(moved), options.load), examples, options)
    study.share = Share(work=WorkFolder(tmp_path / "work"))
    assert study.scores(["importance"]).examples == 7 * COPIES


def test_resume_never_starts_anew_and_leaves_other_files(
    opened: Opened, undisturbed: dict[str, Tensor], tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    study_of(opened, Share(work=WorkFolder(tmp_path)), seed=3).scores(MEASURES)
    found = study_of(opened, Share(work=WorkFolder(tmp_path, anew=True))).scores(MEASURES)
    assert same_bits(numbers(found), undisturbed)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_damaged_unit_is_named(opened: Opened, tmp_path: Path) -> None:
    study_of(opened, Share(work=WorkFolder(tmp_path))).scores(["importance"])
    path = tmp_path / "pass-1-unit-000003.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(WorkError, match=r"unit-000003.safetensors is no unit of finished work"):
        study_of(opened, Share(work=WorkFolder(tmp_path))).scores(["importance"])


@pytest.mark.parametrize("fault", ["full", "gone"])
def test_b109_a_full_or_vanished_folder_is_one_error(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    folder, real, calls = tmp_path / "work", save_file, []

    def save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        calls.append(path)
        if len(calls) == 3 and fault == "full":
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        if len(calls) == 3:
            shutil.rmtree(folder)
        real(tensors, path, metadata=metadata)

    monkeypatch.setattr(work, "save_file", save)
    reason = {"full": "No space left on device", "gone": "No such file or directory"}[fault]
    with pytest.raises(OutputError, match=f"cannot write .*unit-000002.safetensors: {reason}"):
        study_of(opened, Share(work=WorkFolder(folder))).scores(["importance"])
    if fault == "full":
        assert [path.name for path in sorted(folder.iterdir())] == [f"pass-1-unit-00000{n}.safetensors" for n in (0, 1)]


def test_a_second_run_that_begins_in_the_same_folder_breaks_no_unit_of_the_first(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = save_file, []

    def save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        calls.append(path)
        real(tensors, path, metadata=metadata)
        if len(calls) == 3:
            WorkFolder(tmp_path).prepare()

    monkeypatch.setattr(work, "save_file", save)
    study_of(opened, Share(work=WorkFolder(tmp_path))).scores(["importance"])
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"pass-1-unit-00000{n}.safetensors" for n in range(6)]
    assert len(calls) == 7


def _tokens(count: int, seed: int, first: int, mean: float) -> Outputs:
    draw = torch.Generator().manual_seed(seed)
    z = tuple(torch.randn(count, 2, 3, generator=draw, dtype=torch.float64) + mean for _ in range(2))
    return Outputs((0, 1), z, torch.arange(first, first + count), torch.zeros(count, dtype=torch.long))


@pytest.mark.parametrize("kind", [CrossMoments, TokenSample])
def test_sums_of_parts_add_up_to_those_of_all(
    opened: Opened, kind: Callable[[HeadSpace], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part has a mean, and so a shift, of its own."""
    monkeypatch.setattr("headscope.moments.SAMPLE", 32)
    monkeypatch.setattr("headscope.moments.LEAST_SAMPLE", 32)
    sites = tuple(replace(site, n_heads=2, n_kv_heads=2, d_value=3) for site in opened.study.sites[:2])
    draw = torch.Generator().manual_seed(9)
    matrix = torch.randn(2, 3, 5, generator=draw, dtype=torch.float64)

    class Weights:
        output = matrix

    space = HeadSpace(sites, lambda site: Weights())  # type: ignore[arg-type,return-value]
    parts = [_tokens(40, seed, 40 * seed, mean) for seed, mean in enumerate((0.0, 5.0, -3.0))]
    whole, total = kind(space), kind(space)
    for part in parts:
        whole.add(part)
        one = kind(space)
        one.add(part)
        assert sum(value.nbytes for value in one.state().values()) <= 2 * one.size + 600
        total.absorb(one.state())
    torch.testing.assert_close(total.finish().values, whole.finish().values, rtol=0, atol=1e-9, equal_nan=True)
    assert bool(whole.finish().values.isfinite().any())


def test_pairs_are_the_same_in_units_small_and_large(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = likeness(study_of(opened))
    monkeypatch.setattr(shares, "LARGE", 0)
    monkeypatch.setattr(shares, "RANGES", 1)
    whole = likeness(study_of(opened, Share(work=WorkFolder(tmp_path))))
    assert len(list(tmp_path.iterdir())) == 3, "one unit for each of the three passes"
    for name, values in whole.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=1e-9, equal_nan=True)


def test_what_several_units_note_comes_once() -> None:
    total = GatedRows()
    for number in range(3):
        unit = total.fresh()
        unit.notes += ["memory ran out", f"unit {number}"]
        total.absorb(unit.state())
    assert total.notes == ["memory ran out", "unit 0", "unit 1", "unit 2"]


def test_pairs_are_kept_and_resumed(opened: Opened, tmp_path: Path) -> None:
    wanted = likeness(study_of(opened))
    assert same_bits(likeness(study_of(opened, Share(work=WorkFolder(tmp_path)))), wanted)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 18 and names[-1].startswith("pass-3"), "one pass for all, two for the nearest"
    for name in names[::2]:
        (tmp_path / name).unlink()
    assert same_bits(likeness(study_of(opened, Share(work=WorkFolder(tmp_path)))), wanted)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_b112_any_number_of_ranks_gives_the_bits_of_one(
    opened: Opened, undisturbed: dict[str, Tensor], tmp_path: Path, size: int
) -> None:
    """Six units for two, three and seven ranks: one of the seven is idle in every round."""
    ended = forked(size, lambda ranks: numbers(study_of(opened, Share(ranks)).scores(MEASURES)), tmp_path)
    for one in ended:
        assert one.error == "" and same_bits(one.given, undisturbed)


def test_ranks_on_machines_of_their_own_need_no_common_folder(
    opened: Opened, undisturbed: dict[str, Tensor], tmp_path: Path
) -> None:
    """Each makes the folder where it is, and each clears its own to start anew."""

    def job(ranks: Ranks) -> dict[str, Tensor]:
        kept = WorkFolder(tmp_path / f"machine-{ranks.rank}", anew=True)
        return numbers(study_of(opened, Share(ranks, kept)).scores(MEASURES))

    for _ in range(2):
        begin = time.time_ns()
        for one in forked(2, job, tmp_path):
            assert one.error == "" and same_bits(one.given, undisturbed)
        for rank in (0, 1):
            files = sorted((tmp_path / f"machine-{rank}").iterdir())
            assert [path.name for path in files] == [f"pass-1-unit-{n:06d}.safetensors" for n in range(rank, 6, 2)]
            assert min(path.stat().st_mtime_ns for path in files) > begin - 10**9


def test_ranks_may_wait_as_long_as_anyone_says(tmp_path: Path) -> None:
    for one in forked(2, lambda ranks: ranks.meet(), tmp_path, timeout=1e15):
        assert one.error == ""


def test_ranks_compare_pairs_as_one_process_does(opened: Opened, tmp_path: Path) -> None:
    wanted = likeness(study_of(opened))
    for one in forked(2, lambda ranks: likeness(study_of(opened, Share(ranks))), tmp_path):
        assert one.error == "" and same_bits(one.given, wanted)


def test_b110_a_killed_rank_is_named_and_the_next_run_goes_on(
    opened: Opened, undisturbed: dict[str, Tensor], tmp_path: Path
) -> None:
    folder = tmp_path / "work"

    def job(ranks: Ranks) -> dict[str, Tensor]:
        def die(done: int, total: int) -> None:
            if ranks.rank == 1 and done > 2 * 2 * UNIT:
                os.kill(os.getpid(), signal.SIGKILL)

        study = study_of(opened, Share(ranks, WorkFolder(folder)))
        return numbers(study.scores(MEASURES, progress=die))

    begin = time.monotonic()
    first, second = forked(2, job, tmp_path, hint="go on")
    assert second.signal == signal.SIGKILL
    assert first.error.startswith("RankError: rank 1 has died: it gave no sign of life") and "(go on)" in first.error
    assert time.monotonic() - begin < 30
    done = [path.name for path in folder.iterdir()]
    assert 0 < len(done) < 6 and not [name for name in done if name.startswith(".")]
    assert same_bits(numbers(study_of(opened, Share(work=WorkFolder(folder))).scores(MEASURES)), undisturbed)


def test_b113_ranks_that_see_different_things_stop(opened: Opened, tmp_path: Path) -> None:
    def job(ranks: Ranks) -> None:
        study_of(opened, Share(ranks), seed=ranks.rank).scores(MEASURES)

    for one in forked(2, job, tmp_path):
        assert one.error.startswith("RankError: rank 1 sees something else than rank 0: seed is '1', on rank 0 '0'")


def test_b115_a_rank_asleep_is_named_after_the_timeout(opened: Opened, tmp_path: Path) -> None:
    def job(ranks: Ranks) -> None:
        def sleep(done: int, total: int) -> None:
            if ranks.rank == 1:
                time.sleep(60)

        study_of(opened, Share(ranks)).scores(MEASURES, progress=sleep)

    first, _ = forked(2, job, tmp_path, timeout=4.0)
    assert first.error.startswith("RankError: rank 1 stands still: it took no step for 4 s (--timeout)")


def test_b110_a_run_that_its_launcher_ends_names_the_rank_that_died_before(opened: Opened, tmp_path: Path) -> None:
    """A launcher ends the others as soon as one is killed, long before that one's silence is noticed."""

    dead = tmp_path / "dead"

    def job(ranks: Ranks) -> None:
        def stop(done: int, total: int) -> None:
            if ranks.rank == 1:
                dead.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            while not dead.exists():
                time.sleep(0.01)
            raise KeyboardInterrupt

        study_of(opened, Share(ranks)).scores(MEASURES, progress=stop)

    first, second = forked(2, job, tmp_path, hint="go on")
    assert second.signal == signal.SIGKILL
    assert first.error.startswith("RankError: rank 1 has died") and "(go on)" in first.error


def test_an_error_of_one_rank_is_told_by_the_others(opened: Opened, tmp_path: Path) -> None:
    def job(ranks: Ranks) -> None:
        def fail(done: int, total: int) -> None:
            if ranks.rank == 1:
                raise HeadscopeError("the disk is made of cheese", hint="another disk")

        study_of(opened, Share(ranks)).scores(MEASURES, progress=fail)

    first, second = forked(2, job, tmp_path)
    assert first.error == "RankError: rank 1 failed: the disk is made of cheese (another disk)"
    assert second.error == "HeadscopeError: the disk is made of cheese (another disk)"


def test_a_rank_that_is_ended_because_another_failed_tells_why(opened: Opened, tmp_path: Path) -> None:
    """In a long batch it does not look by itself, and its launcher only knows an exit code."""
    failed = tmp_path / "failed"

    def job(ranks: Ranks) -> None:
        def told(done: int, total: int) -> None:
            if ranks.rank == 1:
                failed.touch()
                raise HeadscopeError("the disk is made of cheese", hint="another disk")
            while not failed.exists():
                time.sleep(0.01)
            time.sleep(1.0)
            raise KeyboardInterrupt

        ranks._supervisor = os.getppid()
        study_of(opened, Share(ranks)).scores(MEASURES, progress=told)

    first, _ = forked(2, job, tmp_path)
    assert first.error == "RankError: rank 1 failed: the disk is made of cheese (another disk)"


def test_a_long_value_is_shown_where_it_differs() -> None:
    pairs = "attention of pairs, hellinger of pairs, output of pairs, cosine of pairs"
    said = difference({"measures": pairs}, {"measures": f"{pairs}, qk of pairs"})
    assert said == f"measures is '…{pairs[-30:]}, qk of pairs' and was '…{pairs[-30:]}'"
    assert difference({"seed": "1"}, {"seed": "10"}) == "seed is '10' and was '1'"


def test_code_that_comes_with_a_model_stands_in_the_fingerprint(opened: Opened, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(opened.study.loaded.location.folder, folder)
    loaded, examples = load(str(folder), opened.study.options.load), opened.study.examples
    study = Study(loaded, examples, opened.study.options)

    def found(code: str) -> dict[str, str]:
        (folder / "modeling_own.py").write_text(code)
        return study.fingerprint(batches(study))

    assert found("a = 1") == found("a = 2"), "a file beside a model of transformers' own changes nothing"
    loaded.model.__class__ = type("Own", (type(loaded.model),), {"__module__": "transformers_modules.own.modeling_own"})
    gap = difference(found("a = 1"), found("a = 2"))
    assert gap is not None and gap.startswith("code of the model is")


def test_options_of_the_data_stand_in_the_fingerprint(opened: Opened) -> None:
    study = study_of(opened)
    found = study.fingerprint(batches(study))
    assert set(DataOptions.__dataclass_fields__) <= set(found)
    assert found["model"] and found["data"] and found["batches"] and found["dtype"] == "float64"
