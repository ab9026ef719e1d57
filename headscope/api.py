"""The Python interface: what the commands do, as functions that return DataFrames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from headscope import checks, discovery, inspection
from headscope.errors import UsageError
from headscope.heads import Site
from headscope.models import LoadOptions
from headscope.study import Study, StudyOptions

if TYPE_CHECKING:
    import pandas


def inspect(
    model: str,
    data: str | None = None,
    *,
    measures: Sequence[str] | None = None,
    by: str = "head",
    tokens: int = 512,
    options: StudyOptions | None = None,
) -> pandas.DataFrame:
    """One row per head (or `by` layer, or one for the model), as `headscope inspect` prints it.

    Raises:
        HeadscopeError: the model or the data cannot be used; the message says what to do.
    """
    if by not in ("head", "layer", "model"):
        raise UsageError(f"by={by!r}: expected head, layer or model")
    study = Study.open(model, data, options)
    if by == "model":
        return inspection.model_table(study, tokens).frame()
    scores = study.scores(measures)
    table = inspection.layer_table(study, scores, tokens) if by == "layer" else inspection.head_table(study, scores)
    return table.frame()


def check(
    model: str, data: str | None = None, *, options: LoadOptions | None = None, reading: StudyOptions | None = None
) -> pandas.DataFrame:
    """Structure checks of a checkpoint, one row each with status pass, fail or skip; with data also of row sums.

    Raises:
        HeadscopeError: there is nothing that could be checked.
    """
    return checks.check(model, options, data=data, reading=reading).frame()


def find_sites(model: PreTrainedModel) -> tuple[Site, ...]:
    """The attention sites of a loaded model, with the parameters of each head.

    Raises:
        UnsupportedModel: none was found.
    """
    return discovery.find_sites(model).sites
