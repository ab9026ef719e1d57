"""House rules, read off the source without importing the package: floors, imports, sizes, opening sentences."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "headscope"
FLOORS = [
    "interrupt errors",
    "offload",
    "portable reload least_squares downdates foreign left made_up made_up/*",
    "columns shapes states heads provenance losses examples rows inputs positions taps alignment",
    "parallel checkpointed footprint",
    "ownership tensor_files",
    "metrics places registry devices upload tables cost naming jsonfiles unpack geometry moving stacks capture "
    "vocabulary tiles memory sampling subsets curve_columns outcomes launching",
    "tasks families greedy projecting",
    "tasks/* task_choice families/* fields formats headers matrices objective anatomy patterns conllu criteria "
    "plan_values numbers",
    "location discovery spare_tensors outline clusters cells folders leftovers manifest companions card hub_data "
    "scores pairs output_weights streaming",
    "weights widening settings_read boundary silence folder_writing scores/* sources reasons texts plan_files measures",
    "hsic",
    "models sums reading gated gated_rows replay plan score_files layouts moments row_store circuits streams cuts",
    "stand_in ablated data reports words counts units recipe measures/* pair_sums resuming rehearsal",
    "tallies fingerprints",
    "work ranks score_pass",
    "shares",
    "study reports/* choice surgery",
    "inspection row_sums maps relations evaluation timing comparison_columns bootstrap alike native verify pairing",
    "output_moments merging forms noisy",
    "reconstruct emphasis",
    "original",
    "side_by_side",
    "checks survey estimate comparison head_pictures repair request stored criteria/* merge_maps",
    "mending",
    "trials prepared first_scores comparison_picture",
    "pruned",
    "outlay foresight selection publish likeness",
    "pruning prune_report similarity_report pair_estimate",
    "curves",
    "curve_report curve_outlay",
    "api",
    "cli/options cli/talk cli/env",
    "cli/explain cli/settings",
    "cli/curves cli/maps cli/relations cli/processes",
    "cli/inspect cli/evaluate cli/prune cli/similarity",
    "cli",
]
"""A file imports only from lower floors; `folder/*` are the files of an open folder, `folder` is its door."""
ENTRY = {"__init__", "__main__"}  # the package's own door and `python -m`: lazy, above everything
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def key(path: Path) -> str:
    """`heads`, `tasks` for tasks/__init__.py, `tasks/causal_lm`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "/".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


KEYS = {key(path) for path in FILES}


def floor(name: str) -> int:
    for number, names in enumerate(FLOORS):
        listed = names.split()
        if name in listed or (name not in " ".join(FLOORS).split() and f"{name.partition('/')[0]}/*" in listed):
            return number
    raise AssertionError(f"headscope/{name} is on no floor: add it to FLOORS")


def imports(path: Path, *, runtime_only: bool = True) -> Iterator[str]:
    """Dotted names that a file imports, anywhere in it; those for type checkers only are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if runtime_only and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped |= {child for statement in node.body for child in ast.walk(statement)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                inside = full.removeprefix("headscope.").replace(".", "/")
                yield full if inside in KEYS else node.module


def used(path: Path) -> set[str]:
    """Files of the package that a file imports, by key."""
    found = {
        name.removeprefix("headscope.").replace(".", "/") for name in imports(path) if name.startswith("headscope.")
    }
    return {name for name in found if name in KEYS} - {key(path)}


@pytest.mark.parametrize("path", FILES, ids=key)
def test_a_file_imports_only_from_lower_floors(path: Path) -> None:
    name = key(path)
    if name in ENTRY:
        return
    folder = name.partition("/")[0]
    for other in used(path):
        inside = other.startswith(f"{folder}/")
        if inside and other.partition("/")[2].startswith("_"):
            continue  # parts shared inside one folder
        assert floor(other) < floor(name), f"headscope/{name} may not import headscope/{other}"


@pytest.mark.parametrize("path", FILES, ids=key)
def test_forbidden_imports(path: Path) -> None:
    name, roots = key(path), {module.partition(".")[0] for module in imports(path)}
    assert "click" not in roots
    if not name.startswith("cli"):
        assert "typer" not in roots
    if not name.startswith(("cli", "reports")):
        assert "rich" not in roots
    if name != "tables" and not name.startswith("reports"):
        assert "pandas" not in roots
    if name.startswith("families"):
        assert "torch" not in roots
    if name.startswith("scores"):
        assert not roots & {"transformers"}, "scores see evidence, never a model"


@pytest.mark.parametrize("path", FILES, ids=key)
def test_sizes_and_opening_sentences(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 300, f"{path.name} has more than 300 lines"
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module opens with one sentence that says what it is"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body = node.body[-1].end_lineno - node.body[0].lineno + 1  # type: ignore[operator]
            assert body <= 60, f"{node.name} has {body} lines"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, "catches everything"
            assert getattr(node.type, "id", "") not in ("Exception", "BaseException"), "catches everything"
    assert path.stem not in ("utils", "common", "helpers", "base")


@pytest.mark.parametrize("path", FILES, ids=key)
def test_public_things_say_what_they_are(path: Path) -> None:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            command = path.parent.name == "cli"
            assert command or ast.get_docstring(node), f"{node.name} has no docstring"


def test_no_marks_of_unfinished_work_or_of_other_places() -> None:
    pattern = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b|\.\./shared|/work/")
    for path in FILES:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert not pattern.search(line), f"{path.name}:{number}: {line.strip()}"
    for path in (ROOT / "README.md", ROOT / "tests" / "SKIPS.md", ROOT / "tests" / "census" / "census.csv"):
        assert not re.search(r"/(site|dist)-packages/|/home/|/root/", path.read_text(encoding="utf-8")), path.name


def test_every_skip_has_a_row() -> None:
    rows = (ROOT / "tests" / "SKIPS.md").read_text(encoding="utf-8")
    for path in TESTS:
        if path.name == Path(__file__).name:
            continue
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and re.search(
                r"pytest\.(mark\.)?(skip|importorskip)", ast.unparse(node)
            ):
                assert f"`{node.name}`" in rows, (
                    f"{path.name}: {node.name} may be skipped, but tests/SKIPS.md has no row"
                )


def test_the_top_level_holds_nothing_else() -> None:
    wanted = {"pyproject.toml", "README.md", "LICENSE", "headscope", "tests", "sample_inputs"}
    built = {"build", "dist", "headscope.egg-info"}
    assert {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} - built == wanted


def test_every_score_has_a_reference() -> None:
    text = (ROOT / "tests" / "reference.py").read_text(encoding="utf-8")
    for name in sorted(path.stem for path in (PACKAGE / "scores").glob("[a-z]*.py")):
        assert name in text, f"tests/reference.py has no reference for the score {name}"
