"""Rows become examples: limits, cuts, labels and special tokens, with an error or a count for whatever does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from task_cases import CASES, Case, open_case, recipe
from tiny_tokenizers import WORDS, texts, write

from headscope.data import DataOptions, load_examples
from headscope.errors import DataError, ModelError, UsageError
from headscope.examples import Example, Examples
from headscope.models import LoadedModel, LoadOptions, load

MASK, UNKNOWN = 4, 3


def examples_of(case: Case, folder: Path, rows: list[dict[str, Any]] | None = None, **options: Any) -> Examples:
    """The examples of a case, or of other rows for its model."""
    opened = open_case(replace(case, rows=rows or case.rows), folder, **options)
    assert opened.study.examples is not None
    return opened.study.examples


def words_of(item: Example) -> str:
    """The text that an example of the word tokenizer was made of."""
    return " ".join(WORDS[token - 5] for token in item.inputs["input_ids"] if token >= 5)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Loads the model of a case once; its data do not matter."""
    known: dict[str, LoadedModel] = {}

    def find(name: str) -> LoadedModel:
        if name not in known:
            known[name] = open_case(CASES[name], tmp_path_factory.mktemp(name)).study.loaded
        return known[name]

    return find


def read(loaded: LoadedModel, folder: Path, rows: list[dict[str, Any]], **options: Any) -> Examples:
    return load_examples(write(folder / "rows.jsonl", rows), loaded, DataOptions(**options))


def note(examples: Examples, words: str) -> str:
    (found,) = [text for text in examples.notes if words in text]
    return found


def test_limit_takes_the_first_of_the_seeded_order(models: Any, tmp_path: Path) -> None:
    get = partial(read, models("single"), tmp_path, [{"text": text, "label": 0} for text in texts(range(1, 21))])
    whole, some = get(limit=None), get(limit=6)
    assert [words_of(item) for item in some.items] == [words_of(item) for item in whole.items][:6]
    assert [item.number for item in some.items] == list(range(6))
    assert sorted(map(words_of, whole.items)) == sorted(texts(range(1, 21)))
    again, other = get(limit=None), get(limit=None, seed=1)
    assert again == whole
    assert [words_of(item) for item in other.items] != [words_of(item) for item in whole.items]
    assert sorted(map(words_of, other.items)) == sorted(map(words_of, whole.items))
    assert not whole.notes
    assert not get().notes  # nobody asked for the default limit
    beyond = get(limit=21)
    assert beyond.items == whole.items
    assert note(beyond, "--limit 21") == "--limit 21 is more than there are: all 20 examples are used"
    with pytest.raises(UsageError, match="--limit 0"):
        get(limit=0)


def test_truncation_is_counted(models: Any, tmp_path: Path) -> None:
    rows = [{"text": text, "label": 0} for text in texts((3, 60, 44, 45, 46))]  # two special tokens, limit 47
    found = read(models("single"), tmp_path, rows)
    assert sorted(item.length for item in found.items) == [5, 46, 47, 47, 47]
    assert note(found, "cut") == "2 of 5 examples were longer than 47 tokens and cut"
    assert all(item.inputs["input_ids"][-1] == 2 for item in found.items)  # the end token survives the cut
    shorter = read(models("single"), tmp_path, rows, max_length=9)
    assert sorted(item.length for item in shorter.items) == [5, 9, 9, 9, 9]
    with pytest.raises(DataError, match=r"row 2: 62 tokens, more than the limit of 47") as error:
        read(models("single"), tmp_path, rows[:2], on_long="error")
    assert error.value.exit_code == 1
    with pytest.raises(UsageError, match="--max-length 48 is more than this model's limit of 47"):
        read(models("single"), tmp_path, rows, max_length=48)
    with pytest.raises(UsageError, match="chunk"):
        read(models("single"), tmp_path, rows, on_long="chunk")
    with pytest.raises(UsageError, match="--max-length 1 leaves no room"):
        read(models("single"), tmp_path, rows, max_length=1)
    with pytest.raises(UsageError, match="--max-length 0"):
        read(models("causal-gpt2"), tmp_path, rows, max_length=0)


def test_long_texts_are_chunked_for_causal_lm(models: Any, tmp_path: Path) -> None:
    (text,) = texts((100,))
    rows = [{"text": text}]
    chunks = read(models("causal-gpt2"), tmp_path, rows)
    assert [item.length for item in chunks.items] == [47, 47, 6]
    assert " ".join(map(words_of, chunks.items)) == text
    assert [item.number for item in chunks.items] == [0, 1, 2]
    assert all(item.targets == (*item.inputs["input_ids"][1:], -100) for item in chunks.items)
    assert not any("cut" in text for text in chunks.notes)
    (cut,) = read(models("causal-gpt2"), tmp_path, rows, on_long="truncate").items
    assert (cut.length, cut.truncated) == (47, True)
    with pytest.raises(DataError, match="100 tokens, more than the limit of 47"):
        read(models("causal-gpt2"), tmp_path, rows, on_long="error")
    some = read(models("causal-gpt2"), tmp_path, rows, limit=2, max_length=11)
    assert some.items == tuple(read(models("causal-gpt2"), tmp_path, rows, max_length=11).items[:2])


def test_texts_without_a_next_token_are_skipped_and_counted(models: Any, tmp_path: Path) -> None:
    found = read(models("causal-gpt2"), tmp_path, [{"text": ""}, {"text": "w1"}, {"text": "w1 w2"}])
    assert (len(found), found.skipped) == (1, 2)
    assert note(found, "skipped") == "2 examples without anything to predict were skipped"
    with pytest.raises(DataError, match="no labelled token"):
        read(models("causal-gpt2"), tmp_path, [{"text": ""}, {"text": "w1"}])


def test_roberta_counts_positions_behind_the_pad_token(tmp_path: Path) -> None:
    case = replace(CASES["masked"], recipe=recipe("roberta", "RobertaForMaskedLM", pad_token_id=6))
    opened = open_case(replace(case, rows=[{"text": text} for text in texts((60, 4))]), tmp_path)
    assert opened.study.loaded.max_length() == 40  # 47 positions, the first 7 are not used
    assert opened.study.examples is not None
    assert [item.length for item in opened.study.examples.items if item.truncated] == [40]
    assert opened.study.scores(["importance"]).examples == 2


def test_answers_and_labels_that_are_cut_off_are_skipped(models: Any, tmp_path: Path) -> None:
    (context,) = texts((30,))
    words = context.split()
    rows = [{"question": "w1 w2", "context": " ".join(words[:8]), "answer": " ".join(words[3:5])}]
    late = {"answer_start": [len(" ".join(words[:25])) + 1], "text": [words[25]]}
    found = read(models("question-answering"), tmp_path, rows)
    assert found.items[0].targets == (7, 8)  # [CLS] w1 w2 [SEP] and three words before it
    both = [
        {**rows[0], "answer": {"answer_start": 0, "text": words[0]}},
        {**rows[0], "context": context, "answer": late},
    ]
    found = read(models("question-answering"), tmp_path, both, max_length=20)
    assert (len(found), found.skipped, found.items[0].targets) == (1, 1, (4, 4))
    (asked,) = read(models("question-answering"), tmp_path, [{**rows[0], "question": context}], max_length=20).items
    assert (asked.length, asked.truncated) == (20, True)  # the question alone was too long
    assert [WORDS[asked.inputs["input_ids"][place] - 5] for place in asked.targets] == [words[3], words[4]]
    with pytest.raises(DataError, match="row 1: answer 'nowhere' does not occur"):
        read(models("question-answering"), tmp_path, [{**rows[0], "answer": "nowhere"}])
    tags = [{"tokens": words, "ner_tags": [-100] * 25 + [1] * 5}, {"tokens": ["w1"], "ner_tags": [2]}]
    found = read(models("token-classification"), tmp_path, tags, max_length=20)
    assert (len(found), found.skipped, found.items[0].targets) == (1, 1, (-100, 2, -100))


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("token-classification", {"tokens": ["w1", "w2"], "ner_tags": [-100, -100]}),
        ("single", {"text": "w1 w2", "label": -100}),
    ],
)
def test_ignored_labels(name: str, row: dict[str, Any], models: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no labelled token") as error:
        read(models(name), tmp_path, [row, row])
    assert error.value.exit_code == 1
    found = read(models(name), tmp_path, [row, row, CASES[name].rows[0]])
    assert (len(found), found.skipped) == (1, 2)
    assert note(found, "skipped") == "2 examples without anything to predict were skipped"


def test_special_token_strings_are_plain_text_unless_asked(models: Any, tmp_path: Path) -> None:
    rows = [{"text": "w1 [MASK] w2 [SEP]", "label": 0}]
    (plain,) = read(models("single"), tmp_path, rows).items
    assert plain.inputs["input_ids"] == [1, 6, *[UNKNOWN] * 3, 7, *[UNKNOWN] * 3, 2]
    (parsed,) = read(models("single"), tmp_path, rows, parse_special=True).items
    assert parsed.inputs["input_ids"] == [1, 6, MASK, 7, 2, 2]
    t5 = load(
        str(Path(__file__).parents[1] / "sample_inputs" / "t5-g2p"), LoadOptions()
    )  # its vocabulary holds </s> like any other word
    (plain,) = read(t5, tmp_path, [{"text": "a </s> b", "target": "AA </s> B"}]).items
    assert plain.inputs["input_ids"].count(1) == plain.targets.count(1) == 1
    (parsed,) = read(t5, tmp_path, [{"text": "a </s> b", "target": "AA </s> B"}], parse_special=True).items
    assert parsed.inputs["input_ids"].count(1) == parsed.targets.count(1) == 2


def test_masked_lm_hides_the_same_ordinary_tokens_every_time(models: Any, tmp_path: Path) -> None:
    rows = [{"text": text} for text in texts((1, 2, 10, 40))] + [{"text": "w1 [SEP] w2 [PAD]"}]
    get = partial(read, models("masked"), tmp_path, rows, parse_special=True)
    first, again, other = get(), get(), get(seed=1)
    assert first == again
    hidden = {words_of(item): item.targets for item in other.items}
    assert any(hidden.get(words_of(item)) != item.targets for item in first.items)
    for item in first.items:
        targets = [target for target in item.targets if target != -100]
        assert len(targets) == item.inputs["input_ids"].count(MASK)
        assert min(targets) >= 5
    counts = sorted(sum(target != -100 for target in item.targets) for item in first.items)
    assert counts == [1, 1, 1, 2, 6]  # 15 % of 1, 2, 2, 10 and 40, at least one


BAD = [
    ("single", {"text": "w1", "label": 0.5}, "label 0.5 is no class number; use --task regression"),
    ("single", {"text": "w1", "label": 3}, "label 3 is outside the model's 3 classes"),
    ("single", {"text": "w1", "label": -1}, "label -1 is outside"),
    (
        "pair",
        {"text": "w1", "pair": "w2", "label": "perhaps"},
        "label 'perhaps' is none of the model's: no, maybe, yes",
    ),
    ("pair", {"text": "w1", "pair": "w2", "label": "\u00b2"}, "is none of the model's"),
    ("single", {"text": "w1", "label": None}, "no value in column 'label'"),
    ("single", {"text": None, "label": 1}, "no value in column 'text'"),
    ("several", {"text": "w1", "label": [None]}, "label None is no class number"),
    ("regression", {"text": "w1", "label": None}, "no value in column 'label'"),
    ("token-classification", {"tokens": ["w1"], "ner_tags": [1, 2]}, "1 words but 2 labels in column 'ner_tags'"),
    ("token-classification", {"tokens": [], "ner_tags": []}, "column 'tokens' must hold a list of words"),
    ("seq2seq-t5", {"text": "w1", "target": None}, "no value in column 'target'"),
    ("gpt2-class", {"text": "", "label": 1}, "the text has no token"),
]


@pytest.mark.parametrize(("name", "row", "words"), BAD)
def test_rows_that_do_not_fit(name: str, row: dict[str, Any], words: str, models: Any, tmp_path: Path) -> None:
    good = CASES[name].rows[:2]
    with pytest.raises(DataError) as error:
        read(models(name), tmp_path, [good[0], row, good[1]])
    assert "rows.jsonl, row 2: " in str(error.value)
    assert words in str(error.value)
    assert error.value.exit_code == 1
    found = read(models(name), tmp_path, [good[0], row, good[1]], skip_bad=True)
    assert (len(found), found.skipped) == (2, 1)
    assert note(found, "do not fit") == "1 rows that do not fit the task were skipped"


def test_number_of_outputs_must_suit_the_task(tmp_path: Path) -> None:
    rows = [{"text": "w1", "label": 0}]
    for folder, case, task in (("a", "regression", "text-classification"), ("b", "single", "regression")):
        (tmp_path / folder).mkdir()
        place = str(open_case(CASES[case], tmp_path / folder).study.loaded.location.folder)
        with pytest.raises(ModelError, match="use --task regression|3 outputs|one number"):
            read(load(place, LoadOptions(task=task)), tmp_path, rows)


def test_pad_tokens_that_cannot_be_used(tmp_path: Path) -> None:
    llama = recipe("llama", "LlamaForSequenceClassification", num_labels=3, pad_token_id=None)
    case = replace(CASES["llama-class"], recipe=llama, tokens={"pad": True})
    (tmp_path / "end").mkdir()
    ending = replace(case, form="t5", tokens={"pad": False, "pad_token": "[SEP]"})  # every text ends with its pad token
    found = examples_of(ending, tmp_path / "end")
    assert found.pads["input_ids"] not in {token for item in found.items for token in item.inputs["input_ids"]}
    every = [{"text": " ".join(WORDS[:30]), "label": 0}, {"text": " ".join([*WORDS[30:], *("[",) * 9]), "label": 1}]
    (tmp_path / "full").mkdir()
    full = replace(CASES["causal-gpt2"], form="bart", tokens={"pad": False})
    special = [{"text": row["text"] + " [PAD] [CLS] [SEP] [MASK]"} for row in every]
    opened = open_case(replace(full, rows=special), tmp_path / "full", parse_special=True)
    both, single = opened.scores("importance").values, opened.scores("importance", batch_size=1).values
    for site, values in single["importance"].items():
        torch.testing.assert_close(both["importance"][site], values, rtol=1e-9, atol=1e-12)


def test_images_come_from_columns_folders_and_bytes(models: Any, tmp_path: Path) -> None:
    from PIL import Image

    pixels = numpy.random.default_rng(0).integers(0, 255, (4, 12, 12, 3), dtype=numpy.uint8)
    rows = [{f"p{i}": int(v) for i, v in enumerate(one.transpose(2, 0, 1).ravel())} for one in pixels]
    for label, one in enumerate(pixels):
        place = tmp_path / "images" / f"LABEL_{label}"
        place.mkdir(parents=True)
        Image.fromarray(one).save(place / "one.png")
    loaded = models("image-classification")
    columns = read(loaded, tmp_path, [{**row, "label": label} for label, row in enumerate(rows)])
    folder = load_examples(str(tmp_path / "images"), loaded, DataOptions())
    assert [item.targets for item in columns.items] == [item.targets for item in folder.items]
    for one, other in zip(columns.items, folder.items, strict=True):
        assert torch.equal(one.inputs["pixel_values"], other.inputs["pixel_values"])
    assert len({float(item.inputs["pixel_values"].sum()) for item in columns.items}) == 4
    with pytest.raises(DataError, match="row 1: columns p0 to p431 must hold numbers"):
        read(loaded, tmp_path, [{**rows[0], "p3": "x", "label": 0}])
    (tmp_path / "images" / "LABEL_0" / "one.png").write_bytes(json.dumps("no image").encode())
    with pytest.raises(DataError, match="cannot read the image"):
        load_examples(str(tmp_path / "images"), loaded, DataOptions())
