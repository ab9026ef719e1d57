"""Syntactic roles equal loops over transformers' own maps, planted heads are found, broken treebanks are refused."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import command, refused
from conftest import SAMPLES
from tiny_tokenizers import WORDS, save, tokenizer
from zoo import SPECIMENS

import headscope.patterns
import headscope.tiles
import headscope.words
from headscope.conllu import read_treebank, sentences
from headscope.data import DataOptions
from headscope.errors import DataError, HeadscopeError, ModelError, UsageError
from headscope.models import LoadOptions
from headscope.relations import DIRECTIONS, relation_table
from headscope.study import Study, StudyOptions
from headscope.tables import Table

Tree = list[tuple[str, int, str]]
"""Form, head and relation of each word."""
HAND: list[Tree] = [
    [("w1", 2, "det"), ("w12", 3, "nsubj"), ("w3", 0, "root"), ("w4", 5, "det"), ("w15", 3, "obj")],
    [("w1", 2, "det"), ("w21", 3, "nsubj"), ("w33", 0, "root"), ("w40", 3, "obj")],
    [
        ("w1", 3, "det"),
        ("w2", 3, "amod"),
        ("w13", 4, "nsubj"),
        ("w45", 0, "root"),
        ("w5", 6, "det"),
        ("w6", 4, "obj:x"),
    ],
    [("w17", 2, "nsubj"), ("w8", 0, "root"), ("w9", 2, "obj")],
    [("w10", 4, "nsubj:pass"), ("w11", 4, "aux"), ("w12", 4, "aux"), ("w13", 0, "root")],
    [("w14", 2, "det"), ("w25", 0, "root"), ("w36", 2, "obj")],
]
HAND_BASELINES = {"det": (5 / 6, 1), "nsubj": (4 / 5, 1), "obj": (3 / 5, -1)}
"""dependent->head: det lies at +1 but once at +2, nsubj at +1 but once at +3, obj at -1 three times and -2 twice."""


def conllu(trees: list[Tree]) -> str:
    """The trees as a file, with a comment, a multiword range and an empty node in each sentence."""
    parts: list[str] = []
    for tree in trees:
        lines = ["# text = x", "1-2\tw1w2" + "\t_" * 8]
        lines += [f"{i}\t{form}\t_\t_\t_\t_\t{head}\t{rel}\t_\t_" for i, (form, head, rel) in enumerate(tree, 1)]
        parts.append("\n".join([*lines, f"{len(tree)}.1\tw3" + "\t_" * 8]) + "\n\n")
    return "".join(parts)


def drawn(count: int, seed: int = 0) -> list[Tree]:
    """Random trees (cycles among them) of 2 to 6 words."""
    draw = random.Random(seed)
    trees: list[Tree] = []
    for _ in range(count):
        size = draw.randint(2, 6)
        heads = [draw.choice([head for head in range(size + 1) if head != word]) for word in range(1, size + 1)]
        names = [draw.choice(["a", "b:x", "b", "c", "rare"][: 5 if len(trees) < 2 else 4]) for _ in heads]
        words = [draw.choice(WORDS) for _ in heads]
        trees.append([(w, h, r if h else "root") for w, h, r in zip(words, heads, names, strict=True)])
    return trees


def studied(folder: Path, name: str, form: str, **options: Any) -> Study:
    """A study of a zoo model beside a tokenizer that splits words."""
    model = SPECIMENS[name].build()
    save(folder / name, model, tokenizer(form, pieces=True))
    load = LoadOptions(dtype="float64", **({} if name != "t5" else {"task": "seq2seq-lm"}))
    return Study.open(str(folder / name), None, StudyOptions(load, DataOptions(**options)))


def table(study: Study, folder: Path, trees: list[Tree]) -> Table:
    path = folder / "trees.conllu"
    path.write_text(conllu(trees), encoding="utf-8")
    return relation_table(study, read_treebank(str(path)))


def naive(study: Study, trees: list[Tree]) -> list[dict[str, Any]]:
    """The report by loops over output_attentions, one sentence at a time."""
    model, causal = study.loaded.model, study.sites[0].id.kind == "causal"
    encoder = study.loaded.tokenizer()
    model.set_attn_implementation("eager")
    body = model.get_encoder() if model.config.is_encoder_decoder else model
    heads = [head for site in study.sites if site.id.stack != "decoder" or causal for head in site.heads]
    events: list[tuple[str, str, int, list[bool]]] = []
    for tree in trees:
        encoded = encoder([form for form, _, _ in tree], is_split_into_words=True)
        word = encoded.word_ids()
        with torch.no_grad():
            ids = torch.tensor([encoded["input_ids"]])
            maps = body(input_ids=ids, output_attentions=True).attentions
        grids = [grid for layer in maps for grid in layer[0].tolist()]
        assert len(grids) == len(heads)
        for dependent, (_, head, relation) in enumerate(tree):
            if head == 0:
                continue
            for direction, query, target in (
                (DIRECTIONS[0], dependent, head - 1),
                (DIRECTIONS[1], head - 1, dependent),
            ):
                if causal and target > query:
                    events.append((relation.split(":")[0], direction, 99, []))
                    continue
                right: list[bool] = []
                for grid in grids:
                    mass = [0.0] * len(tree)
                    for t, row in enumerate(grid):
                        for s, value in enumerate(row):
                            if word[t] == query and word[s] is not None:
                                mass[word[s]] += value / word.count(query)
                    mass[query] = -1
                    right.append(mass.index(max(mass)) == target)
                events.append((relation.split(":")[0], direction, target - query, right))
    rows: list[dict[str, Any]] = []
    for (relation, direction), group in groupby(sorted(events, key=lambda one: one[:2]), key=lambda one: one[:2]):
        found = [(offset, right) for _, _, offset, right in group if offset != 99]
        row: dict[str, Any] = {"relation": relation, "direction": direction, "instances": len(found)}
        row |= dict.fromkeys(("head", "accuracy", "baseline", "offset", "gain"))
        if len(found) >= 5:
            counts = [sum(right[number] for _, right in found) for number in range(len(heads))]
            offsets = {k: sum(offset == k for offset, _ in found) for k in range(-10, 11) if k}
            row["head"] = str(heads[counts.index(max(counts))])
            row["accuracy"], row["baseline"] = max(counts) / len(found), max(offsets.values()) / len(found)
            row["gain"] = row["accuracy"] - row["baseline"]
            row["offset"] = min(
                (k for k, v in offsets.items() if v == max(offsets.values())), key=lambda k: (abs(k), k)
            )
        rows.append(row)
    return rows


@pytest.mark.parametrize("way", ["whole", "blocks", "tiles"])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("bert", "bert"),
        pytest.param("albert", "bert", marks=pytest.mark.slow),
        ("deberta-v2", "bert"),
        ("llama", "llama"),
        pytest.param("gpt2", "gpt2", marks=pytest.mark.slow),
        ("t5", "t5"),
    ],
)
def test_report_equals_loops_over_own_maps(
    name: str, form: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "blocks":
        monkeypatch.setattr(headscope.patterns, "BLOCK_VALUES", 60)
    if way == "tiles":
        monkeypatch.setattr(headscope.tiles, "LONG", 0)
        monkeypatch.setattr(headscope.tiles, "VALUES", 60)
    study, trees = studied(tmp_path, name, form), drawn(40)
    found = table(study, tmp_path, trees)
    wanted = naive(study, trees)
    assert [dict(row) for row in found.rows] == wanted
    assert len({row["head"] for row in wanted}) > 2, "several heads are best at something"
    assert any(row["accuracy"] is None for row in wanted), "a rare relation is not judged"
    assert found.provenance is not None and found.provenance.examples == 40
    assert any("causal" in note for note in found.notes) == (study.sites[0].id.kind == "causal")


def plant(monkeypatch: pytest.MonkeyPatch, fill: Callable[[torch.Tensor, list[int | None], Tree], None]) -> None:
    """Let BERT attend as `fill` says, which is given `[head query key]` of zeros of the first layer."""
    from transformers.models.bert import modeling_bert

    eager, run = modeling_bert.eager_attention_forward, headscope.words.Aligner.run
    now: list[Any] = []

    def planted(module: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        context, rows = eager(module, query, key, value, *rest, **options)
        if module.layer_idx == 0:
            rows = torch.zeros_like(rows)
            tree = [(word.form, word.head, word.relation) for word in now[-1].sentence.words]
            fill(rows[0], now[-1].word, tree)
        return context, rows

    def noted(aligner: Any, aligned: Any) -> None:
        now.append(aligned)
        run(aligner, aligned)

    monkeypatch.setattr(modeling_bert, "eager_attention_forward", planted)
    monkeypatch.setattr(headscope.words.Aligner, "run", noted)


def to_heads(rows: torch.Tensor, word: list[int | None], tree: Tree) -> None:
    """Head 1 gives each token's head word 0.3 for each of its tokens, a neighbour's first token 0.29, and the rest to
    the token itself and [CLS]: only sums over tokens without special ones and the word itself give 1.0.
    """
    for query, own in enumerate(word):
        if own is None:
            continue
        target = tree[own][1] - 1
        for key, other in enumerate(word):
            if other == target:
                rows[1, query, key] = 0.3
        decoy = next((w for w in range(len(tree)) if w not in (own, target)), None)
        if decoy is not None and word.count(target) == 2:
            rows[1, query, word.index(decoy)] = 0.31
        rows[1, query, query] = rows[1, query, 0] = 0.35


def test_planted_head_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, to_heads)
    found = {
        (row["relation"], row["direction"]): row
        for row in table(studied(tmp_path, "bert", "bert"), tmp_path, HAND).rows
    }
    assert [key for key in found] == sorted(found)
    for relation, (baseline, offset) in HAND_BASELINES.items():
        row = found[relation, "dependent->head"]
        assert row["head"] == "encoder.self.0.1" and row["accuracy"] == 1, row
        assert row["baseline"] == pytest.approx(baseline) and row["offset"] == offset
        assert row["gain"] == pytest.approx(1 - baseline)
        row = found[relation, "head->dependent"]
        assert row["baseline"] == pytest.approx(baseline) and row["offset"] == -offset
    counts = [found[name, "dependent->head"]["instances"] for name in ("det", "nsubj", "obj", "aux")]
    assert counts == [6, 5, 5, 2]
    assert found["aux", "dependent->head"]["accuracy"] is None and found["aux", "dependent->head"]["head"] is None
    assert not [key for key in found if key[0] == "root"]


def test_causal_heads_are_judged_on_what_they_see(tmp_path: Path) -> None:
    found = table(studied(tmp_path, "llama", "llama"), tmp_path, HAND)
    counts = {(row["relation"], row["direction"]): row["instances"] for row in found.rows}
    assert [counts[name, DIRECTIONS[0]] for name in ("det", "nsubj", "obj")] == [0, 0, 5]
    assert [counts[name, DIRECTIONS[1]] for name in ("det", "nsubj", "obj")] == [6, 5, 0]


def test_equal_offsets_give_the_nearest(tmp_path: Path) -> None:
    far: Tree = [("w1", 0, "root"), ("w2", 3, "a"), ("w3", 0, "root"), ("w4", 1, "a")]  # +1 and -3
    near: Tree = [("w1", 2, "b"), ("w2", 0, "root"), ("w3", 2, "b")]  # +1 and -1
    found = table(studied(tmp_path, "bert", "bert"), tmp_path, [far, near] * 3)
    assert [row["offset"] for row in found.rows] == [1, -1, -1, -1]
    assert [row["baseline"] for row in found.rows] == [0.5] * 4


def test_limit_long_sentences_and_seed(tmp_path: Path) -> None:
    trees = [*drawn(12), [("w12", 2, "a"), *[("w34", 1, "a")] * 30]]
    found = table(studied(tmp_path, "bert", "bert"), tmp_path, trees)
    assert any("1 sentences longer than" in note for note in found.notes)
    assert found.provenance is not None and (found.provenance.examples, found.provenance.skipped) == (12, 1)
    some = table(studied(tmp_path, "bert", "bert", limit=5), tmp_path, drawn(12))
    assert "5 of 12 sentences are used; --limit all uses all" in some.notes
    assert sum(row["instances"] for row in some.rows) < sum(row["instances"] for row in found.rows)
    with pytest.raises(DataError, match="every sentence of .* is longer than the model's limit"):
        table(studied(tmp_path, "bert", "bert"), tmp_path, trees[-1:])


def test_words_without_tokens_are_counted(tmp_path: Path) -> None:
    tree: Tree = [("w1", 2, "a"), ("\u3000", 3, "a"), ("w2", 1, "a")]
    found = table(studied(tmp_path, "bert", "bert"), tmp_path, [tree] * 5)
    assert "20 instances with a word that has no token were left out" in found.notes
    assert [row["instances"] for row in found.rows] == [5, 5]
    assert [row["accuracy"] for row in found.rows] == [1, 1], "one other word is left to attend to"
    assert [row["offset"] for row in found.rows] == [-2, 2]


def test_unknown_words_are_counted(tmp_path: Path) -> None:
    tree: Tree = [("w1", 2, "a"), ("?", 3, "a"), ("w?", 1, "a"), ("!!", 1, "a")]
    found = table(studied(tmp_path, "bert", "bert"), tmp_path, [tree] * 5)
    assert "10 of 20 words are unknown to the tokenizer" in found.notes, found.notes


def test_words_of_byte_level_tokenizers_are_parted() -> None:
    """A byte-level tokenizer reads given words as if they were one; a model is shown them with spaces between."""
    study = Study.open(str(SAMPLES / "llama-gqa-web"))
    aligner = headscope.words.Aligner(study.loaded, parse_special=False)
    (sentence,) = sentences(
        "".join(f"{i}\t{w}\t_\t_\t_\t_\t0\t_\t_\t_\n" for i, w in enumerate(["The", "cat", "sat"], 1)), "x"
    )
    aligned = aligner.align(sentence)
    assert aligned.inputs["input_ids"][0].tolist() == study.loaded.tokenizer()("The cat sat")["input_ids"]
    assert set(aligned.word) == {None, 0, 1, 2} and aligned.word[0] is None


ROW = "{}\tw1\t_\t_\t_\t_\t{}\tdet\t_\t_\n"
BROKEN = [
    ("", "line 1: no sentence"),
    ("# only\n\n\n", "line 1: no sentence"),
    ("# c\n1\tw1\t_\n", "line 2: 3 columns, expected 10"),
    ("1 w1 _ _ _ _ 0 root _ _\n", "line 1: 1 columns, expected 10"),
    (ROW.format(1, 0) + ROW.format(2, "_"), "line 2: head '_' is not a number"),
    (ROW.format(1, "-1"), "line 1: head '-1' is not a number"),
    (ROW.format(1, "²"), "line 1: head '²' is not a number"),
    (ROW.format(1, "9" * 5000), "line 1: head '9999"),
    (ROW.format(1, 0) + ROW.format(2, 3) + "\n" + ROW.format(1, 0), "line 2: head 3 is outside its sentence"),
    (ROW.format(1, 0) + ROW.format(3, 1), "line 2: word number '3', expected 2"),
    (ROW.format("x", 0), "line 1: word number 'x', expected 1"),
    (ROW.format(1, 1), "line 1: word 1 is its own head"),
    (ROW.format(1, 0) + ROW.format(2, 1) + "\x1b[2J\n", r"line 3: 1 columns"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_broken_treebanks_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.conllu"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_treebank(str(path))
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_reading(tmp_path: Path) -> None:
    text = conllu(HAND)
    plain = tmp_path / "x.conllu"
    plain.write_text(text, encoding="utf-8")
    packed, wide = tmp_path / "x.conllu.gz", tmp_path / "y.conllu"
    packed.write_bytes(gzip.compress(text.replace("\n", "\r\n").rstrip().encode()))
    wide.write_bytes(text.encode("utf-16"))
    found = read_treebank(str(plain)).sentences
    assert [[(w.form, w.head, w.relation) for w in one.words] for one in found] == [
        [(form, head, relation.split(":")[0]) for form, head, relation in tree] for tree in HAND
    ]
    assert [one.line for one in found][:2] == [3, 12]

    def shapes(path: Path, encoding: str = "utf-8") -> list[list[str]]:
        return [[word.form for word in one.words] for one in read_treebank(str(path), encoding=encoding).sentences]

    assert shapes(packed) == shapes(plain) == shapes(wide, "utf-16")
    for path, words in ((tmp_path / "none", "no such file"), (tmp_path, "cannot read"), (wide, "utf-16")):
        with pytest.raises(DataError, match=words):
            read_treebank(str(path))
    with pytest.raises(DataError, match="is a device"):
        read_treebank("/dev/zero")
    (cyclic,) = sentences(ROW.format(1, 2) + ROW.format(2, 1), "x")
    assert [word.head for word in cyclic.words] == [2, 1], "cycles are fine"
    inside = "1\ta\u2028b\u0085\t_\t_\t_\t_\t0\troot\t_\t_\n"
    assert next(sentences(inside, "x")).words[0].form == "a\u2028b\u0085", "only newlines end a line"


def test_models_that_cannot_be_judged(tmp_path: Path) -> None:
    treebank = tmp_path / "x.conllu"
    treebank.write_text(conllu(HAND), encoding="utf-8")
    found = read_treebank(str(treebank))
    with pytest.raises(UsageError, match="does not read text alone"):
        relation_table(Study.open(str(SAMPLES / "vit-digits")), found)
    for name, why in (("bert", "knows no words"), ("t5", "knows no words"), ("llama", "tokenizer cannot be loaded")):
        bare = Study.open(save(tmp_path / f"bare-{name}", SPECIMENS[name].build()))
        with pytest.raises(ModelError, match=why):
            relation_table(bare, found)
    slow = studied(tmp_path, "bert", "bert")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(slow.loaded.tokenizer()), "is_fast", False)
        with pytest.raises(ModelError, match=r"fast tokenizer \(tokenizer.json\)"):
            relation_table(slow, found)
    rootless = tmp_path / "roots.conllu"
    rootless.write_text(ROW.format(1, 0), encoding="utf-8")
    with pytest.raises(HeadscopeError, match="no word depends on another"):
        relation_table(slow, read_treebank(str(rootless)))


@pytest.fixture
def run(monkeypatch, capsysbinary):
    return command(monkeypatch, capsysbinary)


ENGLISH: Tree = [
    ("the", 2, "det"), ("unbelievable", 3, "amod"), ("film", 4, "nsubj"), ("made", 0, "root"),
    ("me", 4, "obj"), ("=cheerful", 4, "=x"),
]  # fmt: skip


def test_command(run, tmp_path: Path) -> None:
    path = tmp_path / "x.conllu"
    path.write_text(conllu([ENGLISH] * 6), encoding="utf-8")
    model = SAMPLES / "sentiment-minilm"
    ran = run("inspect", model, "--annotations", path, "--dtype", "float32")
    assert ran.code == 0, ran
    rows = list(csv.DictReader(io.StringIO(ran.out)))
    assert list(rows[0]) == ["relation", "direction", "instances", "head", "accuracy", "baseline", "offset", "gain"]
    assert len(rows) == 10 and {row["instances"] for row in rows} == {"6"}
    assert {row["baseline"] for row in rows} == {"1.0"}
    assert all(row["head"].startswith("encoder.self.") for row in rows)
    assert rows[0]["relation"] != "=x", "text from data cannot become a formula"
    ran = run(
        "inspect", model, "--annotations", path, "--limit", 3, "--sort", "instances", "--columns", "relation,instances"
    )
    assert ran.code == 0 and ran.rows[1][1] == "3" and "3 of 6 sentences are used" in ran.err
    ran = run("inspect", model, "--annotations", path, "--format", "json", "--verbose")
    assert ran.code == 0 and len(json.loads(ran.out)["rows"]) == 10 and f"data: {path}" in ran.err
    assert run("inspect", model, "--annotations", path, "--dry-run").code == 0


@pytest.mark.parametrize(
    "more",
    [
        ("--data", "d.txt"), ("--check",), ("--structure",), ("--by", "layer"), ("--measures", "weights"),
        ("--plot", "x.png"), ("--text", "a film"),
    ],
)  # fmt: skip
def test_other_reports_beside_it_are_refused(run, more: tuple[str, ...]) -> None:
    ran = run("inspect", "m", "--annotations", "x.conllu", *more)
    assert refused(ran, 2, more[0])


def test_command_refuses(run, tmp_path: Path) -> None:
    path, model = tmp_path / "x.conllu", SAMPLES / "sentiment-minilm"
    path.write_text(ROW.format(1, 7), encoding="utf-8")
    assert refused(run("inspect", model, "--annotations", path), 1, "x.conllu line 1: head 7 is outside")
    assert refused(run("inspect", model, "--annotations", tmp_path / "y"), 1, "no such file")
    assert refused(run("inspect", model, "--annotations", path, "--sort", "gian"), 2, "did you mean 'gain'?")
    path.write_text(conllu([ENGLISH]), encoding="utf-8")
    assert refused(run("inspect", SAMPLES / "vit-digits", "--annotations", path), 2, "does not read text alone")


def test_explain(run) -> None:
    ran = run("explain", "baseline")
    assert ran.code == 0 and "best fixed offset" in ran.out and "Voita" in ran.out
