"""Every kind of bad input is tried somewhere, or waits for a part of the product that is named."""

import ast
from pathlib import Path

import test_bad_inputs_command
import test_bad_inputs_data
import test_bad_inputs_model
from bad_inputs import COVERED, KINDS, WAITING

HERE = Path(__file__).parent
FILES = (test_bad_inputs_command, test_bad_inputs_model, test_bad_inputs_data)


def test_every_kind_has_one_place():
    tried = [kind for file in FILES for kind in file.CASES]
    assert sorted([*tried, *COVERED, *WAITING]) == KINDS, "twice, not at all, or no kind"
    assert len(set(KINDS)) == len(KINDS) == 89


def test_the_tests_that_are_named_exist():
    for place in sorted(set(COVERED.values())):
        file, name = place.split("::")
        found = [node.name for node in ast.parse((HERE / file).read_text()).body if isinstance(node, ast.FunctionDef)]
        assert name in found, place
