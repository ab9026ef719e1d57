"""`headscope inspect MODEL --annotations FILE`: syntactic roles, the best head of each dependency relation."""

from __future__ import annotations

from typing import Any

from headscope.cli.settings import Settings
from headscope.cli.talk import Talk
from headscope.errors import UsageError

_OTHERS = ("data", "check", "structure", "text", "measures", "plot")


def consider(raw: dict[str, Any]) -> None:
    """Refuse options of other reports beside `--annotations`.

    Raises:
        UsageError: one is given.
    """
    if raw["annotations"] is None:
        return
    given = [name for name in _OTHERS if raw.get(name) not in (None, False)]
    given += ["by"] if raw["by"] != "head" else []
    if given:
        raise UsageError(
            f"--{given[0]} does not go with --annotations, which is a report of its own", hint="ask for one of them"
        )


def report(given: Settings, talk: Talk) -> None:
    """Write the report of relations."""
    from headscope.conllu import read_treebank
    from headscope.relations import RELATION_COLUMNS, relation_table
    from headscope.study import Study

    given.require_columns([column.name for column in RELATION_COLUMNS])
    treebank = read_treebank(given.raw["annotations"], encoding=given.raw["encoding"])
    given.check_model()
    study = Study.open(given.model, None, given.study_options())
    with talk.progress() as progress:
        table = relation_table(study, treebank, progress=progress)
    given.report(table, talk)
