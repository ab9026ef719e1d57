import pytest

from headscope.errors import UsageError
from headscope.fields import KNOWN, OPTIONS, VERBATIM, find_column, pixel_columns
from headscope.sources import Rows


def rows(*columns):
    return Rows([dict.fromkeys(columns)], list(columns), "a.csv", "", [1], 0, [])


@pytest.mark.parametrize("role", KNOWN)
def test_each_known_name_is_found_whatever_its_case(role):
    for name in KNOWN[role]:
        assert name == name.lower()
        assert find_column(rows("id", name.title(), "zzz"), role, None, required=True) == name.title()


def test_the_named_column_wins():
    assert find_column(rows("text", "other"), "text", "other", required=True) == "other"


def test_a_wrong_name_lists_what_exists():
    with pytest.raises(UsageError, match=r"^--text-column 'txet': no such column in a\.csv$") as caught:
        find_column(rows("text", "label\x1b"), "text", "txet", required=False)
    assert caught.value.hint == r"did you mean 'text'? known: text, label\x1b"


@pytest.mark.parametrize("required", [True, False])
def test_two_known_names_are_one_too_many(required):
    with pytest.raises(UsageError, match="'text' and 'Review' could each be the text column") as caught:
        find_column(rows("Review", "text"), "text", None, required=required)
    assert caught.value.hint == "name it with --text-column"
    with pytest.raises(UsageError, match="'Text' and 'text'"):
        find_column(rows("Text", "text"), "text", None, required=required)


def test_nothing_known():
    assert find_column(rows("a", "b"), "label", None, required=False) is None
    with pytest.raises(UsageError, match=r"^no label column found in a\.csv$") as caught:
        find_column(rows("a", "b"), "label", None, required=True)
    assert caught.value.hint == "name it with --label-column; known: a, b"


def test_a_lone_column_is_the_text_and_nothing_else():
    assert find_column(rows("a"), "text", None, required=True) == "a"
    assert find_column(rows("a"), "label", None, required=False) is None


def test_options_exist_for_every_role():
    assert set(OPTIONS) == set(KNOWN)
    assert OPTIONS["tokens"] == OPTIONS["question"] == OPTIONS["text"] == "--text-column"
    assert {"text", "sentence", "review", "source", "question", "context", "tokens"} <= VERBATIM
    assert not {"label", "score", "target"} & VERBATIM


def test_sentence_pairs_are_two_roles():
    for first, second in (("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2")):
        pair = rows(first, second, "label", "idx")
        found = [find_column(pair, role, None, required=True) for role in ("text", "pair", "label")]
        assert found == [first, second, "label"]


@pytest.mark.parametrize("prefix", ["p", "pixel", "pixel_", "P"])
def test_pixels_come_in_the_order_of_their_numbers(prefix):
    names = [f"{prefix}{place}" for place in range(12)]
    assert pixel_columns(rows(*reversed(names), "label")) == names


@pytest.mark.parametrize("names", [("p0", "p2"), ("p1", "p2"), ("p00", "p1"), ("label",)])
def test_pixels_with_gaps_are_none(names):
    assert pixel_columns(rows(*names)) is None
