"""Hostile inputs of every kind: an error of our own or a result, in little time and memory (long run: `fuzz.py`)."""

import time

import fuzz
import pytest
from fuzz import tried
from fuzz_bench import Bench
from fuzz_kinds import KINDS, Kind
from fuzz_strategies import written
from hypothesis import strategies as st

INPUTS = 330


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_hostile_inputs(bench, kind):
    wanted = -(-INPUTS * kind.share // 100)
    count, error = tried(kind, bench, wanted, start=1)
    if error is not None:
        raise error
    assert count >= wanted


def test_the_shares_are_of_one_hundred():
    assert sum(kind.share for kind in KINDS) == 100


def test_what_is_valid_is_read(bench):
    """The files that inputs are made from are read without an error: else all of them would only show that."""
    by_name = {kind.name: kind for kind in KINDS}
    config = written(bench.configs[0])
    by_name["headers"].read(bench, bench.weights.read_bytes())
    by_name["index"].read(bench, bench.index.read_bytes())
    by_name["load"].read(bench, ("bert", config, []))
    by_name["rows"].read(bench, ("data.jsonl", b'{"text": "w1", "label": 0}\n', False))
    by_name["cells"].read(bench, ("data.csv", b"text,label\nw1,0\n", False))
    for plan in bench.plans:
        by_name["plan"].read(bench, written(plan))


def _sleep(bench, value):
    time.sleep(1)


def _divide(bench, value):
    return value / 0


@pytest.mark.parametrize(("read", "words"), [(_divide, "division by zero"), (_sleep, "more than 0.2 s")])
def test_a_fault_is_found(bench, read, words, monkeypatch):
    """The judge says no to an exception and to slowness, and counts what was read."""
    monkeypatch.setattr(fuzz, "MOST_SECONDS", 0.2)
    with pytest.raises(BaseException, match=words):
        fuzz.judge(Kind("wrong", 0, lambda bench: st.just(1), read), bench, 1)
    count, error = tried(Kind("wrong", 0, lambda bench: st.just(1), read), bench, 5)
    assert count >= 1 and words in str(error)
    assert tried(Kind("right", 0, lambda bench: st.just(1), lambda bench, value: None), bench, 5) == (1, None)
