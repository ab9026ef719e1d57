"""Hostile inputs of every kind: an error of our own or a result, in little time and memory (the long run: `fuzz.py`)."""

import struct

import pytest
from fuzz import judge, tried
from fuzz_kinds import KINDS, Bench, Kind, header
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
    model = bench.models["bert"] / "model.safetensors"
    by_name["headers"].read(bench, model.read_bytes())
    by_name["index"].read(bench, bench.index.read_bytes())
    by_name["load"].read(bench, ("bert", config, []))
    by_name["rows"].read(bench, ("data.jsonl", b'{"text": "w1", "label": 0}\n', False))
    by_name["cells"].read(bench, ("data.csv", b"text,label\nw1,0\n", False))
    for plan in bench.plans:
        by_name["plan"].read(bench, written(plan))
    text = written(header(model))
    assert model.read_bytes().startswith(struct.pack("<Q", len(text))[:1])


@pytest.mark.parametrize(
    "wrong", [lambda value: 1 / 0, lambda value: __import__("time").sleep(6)], ids=["exception", "slow"]
)
def test_a_fault_is_found(bench, wrong):
    """The judge says no to an exception and to slowness."""
    kind = Kind("wrong", 0, lambda bench: st.integers(), lambda bench, value: wrong(value))
    count, error = tried(Kind("right", 0, lambda bench: st.just(1), lambda bench, value: None), bench, 5)
    assert (count, error) == (1, None)
    with pytest.raises(BaseException, match="division by zero|more than 5 s"):
        judge(kind, bench, 1)
