"""Kinds of hostile input for the fuzzing: for each, how it is made from valid files, and what of headscope reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fuzz_bench import Bench, command
from fuzz_strategies import STRINGS, cells, damaged, header, json_files, lines, safetensors_files
from hypothesis import strategies as st

from headscope.conllu import read_treebank
from headscope.data import DataOptions, load_examples
from headscope.headers import check_config, check_sizes, read_config, read_headers
from headscope.outline import outline
from headscope.plan import read_plan
from headscope.score_files import read_scores

ROWS = [
    {"text": "w1 w2", "label": 0}, {"text": "w3", "label": "LABEL_1"}, {"text": "w4 w5 w6", "label": None},
    {"text": "[CLS] w7", "label": -100}, {"text": None, "label": 1}, {"tokens": ["w1", "w2"], "label": [0, 1]},
]  # fmt: skip
TABLES = [
    "text,label\nw1 w2,0\nw3,1\nw4 w5,0",
    "label,text,pair\n1,w1,w2\n0,w3,w4",
    'text\n"w1, w2"\nw3',
    "a,b\n1,2\n3,4",
]
TREE = "# text = w1 w2\n1\tw1\t_\tX\t_\t_\t2\tnsubj\t_\t_\n2\tw2\t_\tX\t_\t_\t0\troot\t_\t_\n"
WORDS = [
    *("--format", "--batch-size", "--limit", "--dtype", "--device", "--measures", "--columns", "--sort", "--top"),
    "--by",
    *("--max-length", "--on-long", "--task", "--seed", "--draws", "--budget", "--encoding", "--text-column", "--head"),
    *("--ratio", "--heads", "--criterion", "--scope", "--unit", "--rounds", "--min-heads", "--layout", "--metric"),
    *("--pairs", "--matrix", "--clusters", "--threshold", "--merge-kv", "--keep-metric", "--max-loss-increase"),
    *("--attn-implementation", "--revision", "--max-shard-size", "--target-parameters", "--speed-batches", "--tokens"),
]  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """One kind of file: how inputs are made and what reads them; `share` of 100 inputs are of it."""

    name: str
    share: int
    inputs: Callable[[Bench], st.SearchStrategy[Any]]
    read: Callable[[Bench, Any], None]


def _headers(bench: Bench, content: bytes) -> None:
    config = bench.configs[0]
    with bench.instead(bench.weights, content):
        tensors = read_headers(bench.models["bert"])
        check_sizes(config, tensors)
        outline(config, tensors)


def _index(bench: Bench, content: bytes) -> None:
    with bench.instead(bench.index, content):
        read_headers(bench.folder / "shards")


def _config(bench: Bench, content: bytes) -> None:
    with bench.instead(bench.models["bert"] / "config.json", content):
        config = read_config(bench.models["bert"])
        check_config(config)
        tensors = read_headers(bench.models["llama"])
        check_sizes(config, tensors)
        outline(config, tensors)


def _load(bench: Bench, given: tuple[str, bytes, list[str]]) -> None:
    name, content, words = given
    with bench.instead(bench.models[name] / "config.json", content):
        command("inspect", bench.models[name], *words)


def _configs(bench: Bench) -> st.SearchStrategy[Any]:
    views = st.sampled_from([[], ["--check"], ["--by", "model"], ["--structure"]])
    by_name = dict(zip(bench.models, bench.configs, strict=True))
    return st.sampled_from(list(by_name)).flatmap(
        lambda name: st.tuples(st.just(name), json_files([by_name[name]]), views)
    )


def _tokenizer(bench: Bench, given: tuple[str, bytes]) -> None:
    name, content = given
    with bench.instead(bench.models["bert"] / name, content):
        examples = bench.put("few.jsonl", b'{"text": "w1 w2", "label": 0}\n')
        command("inspect", bench.models["bert"], "--data", examples, "--dry-run")


def _tokenizers(bench: Bench) -> st.SearchStrategy[Any]:
    files = {name: (bench.models["bert"] / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    return st.sampled_from(list(files)).flatmap(
        lambda name: st.tuples(st.just(name), json_files([json.loads(files[name])]))
    )


def _data(bench: Bench, given: tuple[str, bytes, bool]) -> None:
    name, content, skip = given
    load_examples(str(bench.put(name, content)), bench.study.loaded, DataOptions(skip_bad=skip))


def _rows(bench: Bench) -> st.SearchStrategy[Any]:
    name = st.sampled_from(["data.jsonl", "data.json"])
    return st.tuples(
        name, lines(ROWS) | json_files([ROWS[:2], {"data": ROWS[:2]}, {"text": ["w1"], "label": [0]}]), st.booleans()
    )


def _tables(bench: Bench) -> st.SearchStrategy[Any]:
    return st.tuples(st.sampled_from(["data.csv", "data.tsv", "data.txt"]), cells(TABLES), st.booleans())


def _packed(bench: Bench) -> st.SearchStrategy[Any]:
    import gzip

    import pyarrow
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"text": ["w1", "w2"], "label": [0, 1]}), sink)
    files = {
        "data.parquet": sink.getvalue().to_pybytes(),
        "data.csv.gz": gzip.compress(TABLES[0].encode(), mtime=0),
        "data.jsonl.zst": pyarrow.compress(b'{"text": "w1", "label": 0}\n', "zstd", asbytes=True),
    }
    return st.sampled_from(list(files)).flatmap(
        lambda name: st.tuples(st.just(name), damaged(files[name], most=3), st.booleans())
    )


def _plan(bench: Bench, content: bytes) -> None:
    read_plan(bench.put("plan", content), bench.sites)


def _plans(bench: Bench) -> st.SearchStrategy[Any]:
    row = "site,heads_before,heads_after,kv_before,kv_after,removed\nencoder.self.0,5,4,5,4,1\nencoder.self.1,5,5,5,5,"
    return json_files(bench.plans) | cells([row], ",\t")


def _scores(bench: Bench, given: tuple[str, bytes]) -> None:
    heads = [head for site in bench.study.sites for head in site.heads]
    read_scores(bench.put(*given), "importance", heads)


def _score_files(bench: Bench) -> st.SearchStrategy[Any]:
    heads = [str(head) for site in bench.study.sites for head in site.heads]
    rows = [{"head": head, "importance": 0.5} for head in heads]
    table = "\n".join(["head,importance", *(f"{head},0.25" for head in heads)])
    return st.tuples(st.just("scores.json"), json_files([rows, {"rows": rows}])) | st.tuples(
        st.just("scores.csv"), cells([table], ",")
    )


def _treebank(bench: Bench, content: bytes) -> None:
    read_treebank(str(bench.put("tree", content)))


def _words(bench: Bench) -> st.SearchStrategy[Any]:
    texts = st.sampled_from([text.replace("\0", "") for text in STRINGS]) | st.text(max_size=8).map(
        lambda t: t.replace("\0", "")
    )
    option = st.tuples(st.sampled_from(WORDS), texts)
    first = st.sampled_from(["inspect", "similarity", "prune", "evaluate", "explain"])
    model = st.sampled_from([str(bench.folder / "none"), str(bench.models["bert"] / "config.json")]) | texts
    return st.tuples(first, model, st.lists(option, max_size=3)).map(
        lambda given: [given[0], given[1], *(word for pair in given[2] for word in pair)]
    )


KINDS = (
    Kind("headers", 18, lambda bench: safetensors_files(header(bench.weights.read_bytes())), _headers),
    Kind("index", 12, lambda bench: json_files([json.loads(bench.index.read_text())]), _index),
    Kind("config", 12, lambda bench: json_files(bench.configs), _config),
    Kind("load", 6, _configs, _load),
    Kind("tokenizer", 3, _tokenizers, _tokenizer),
    Kind("rows", 14, _rows, _data),
    Kind("cells", 14, _tables, _data),
    Kind("packed", 4, _packed, _data),
    Kind("plan", 9, _plans, _plan),
    Kind("scores", 4, _score_files, _scores),
    Kind(
        "treebank",
        2,
        lambda bench: damaged(TREE.encode()),
        _treebank,
    ),
    Kind("arguments", 2, _words, lambda bench, words: command(*words)),
)
