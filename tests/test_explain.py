"""`headscope explain` knows every column that a report can have, and `headscope env` what a bug report needs."""

import importlib
import pkgutil

import pytest
from checkpoints import command

import headscope
from headscope.columns import Column


@pytest.fixture
def run(monkeypatch, capsysbinary):
    return command(monkeypatch, capsysbinary)


def columns_in(value):
    """Columns that stand in a module's value: itself, parts of a tuple or a list, or those of a score or measure."""
    if isinstance(value, Column):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from columns_in(part)
    else:
        for name in ("columns", "column"):
            if not isinstance(value, type) and hasattr(value, "__dataclass_fields__") and hasattr(value, name):
                yield from columns_in(getattr(value, name))


def every_column():
    """Every column of every module of the package, with the module's name."""
    for module in pkgutil.walk_packages(headscope.__path__, "headscope."):
        if module.name != "headscope.__main__":
            for value in vars(importlib.import_module(module.name)).values():
                yield from ((module.name, column) for column in columns_in(value))


def test_every_column_of_every_report_is_explained(run):
    lines = run("explain").out.splitlines()
    found = list(every_column())
    assert len({column.name for _, column in found}) > 90
    missing = [
        f"{where}: {column.name}"
        for where, column in found
        if f"{column.name} [{column.unit}]: {column.meaning}" not in lines
    ]
    assert missing == []
    assert all(column.meaning for _, column in found)
    assert run("explain", "key_token").out == "key_token [text]: the token that is looked at\n"


def test_env_says_what_a_bug_report_needs(run):
    ran = run("env")
    said = dict(line.split(": ", 1) for line in ran.out.splitlines())
    assert ran.code == 0
    for name in ("python", "platform", "headscope", "torch", "transformers", "tokenizers", "huggingface_hub", "jinja2"):
        assert said[name][0].isalnum() and said[name] != "not installed", name
    assert {"matplotlib", "gguf", "peft", "flash_attn", "cuda", "mps", "threads", "offline"} <= set(said)
    assert said["offline"] == "yes"
