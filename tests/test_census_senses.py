"""The census: its committed rows hold for a sample of pairs of stacks and of models of sounds, images and series."""

from __future__ import annotations

import warnings

import pytest
from census import judge, rows
from census.sample import LONG, SENSES
from conftest import slow_if

COMMITTED = rows.read()


@pytest.mark.parametrize("model_type", slow_if(SENSES, LONG))
def test_a_model_is_as_the_census_says(model_type: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what models warn of is their own affair
        row = judge.judged(model_type)
    committed = COMMITTED[model_type]
    assert row.verdicts == committed.verdicts, row.reason
    assert (row.started, row.sites_expected, row.sites_found) == (
        committed.started,
        committed.sites_expected,
        committed.sites_found,
    )
