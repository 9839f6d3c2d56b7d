"""The shape of the code: layers point down, commands start light, folders can be taken in."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import diloco_cli
from tests import ROOT

PACKAGE = Path(diloco_cli.__file__).parent
TESTS = ROOT / "tests"
SOURCES = sorted(PACKAGE.rglob("*.py"))

MOST_MODULES = 14
MOST_LINES = 600
HEAVY = {"jax", "jaxlib", "flax", "optax", "numba"}
FORBIDDEN_NAMES = {"utils", "common", "helpers", "misc", "base", "types", "manager"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}


def loaded_after(code: str) -> set[str]:
    """Says which top-level modules a fresh Python has after running this."""
    probe = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    answer = subprocess.check_output([sys.executable, "-c", probe], text=True, cwd=ROOT)
    return set(answer.splitlines()[-1].split())


def command(*arguments: str) -> str:
    return (
        "from diloco_cli.cli.app import main\n"
        f"try: main({list(arguments)!r})\n"
        "except SystemExit as ended: assert not ended.code, ended.code"
    )


def test_layers_point_downwards_and_the_core_is_pure():
    checker = Path(sys.executable).with_name("lint-imports")
    ended = subprocess.run(
        [checker, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stdout


def test_asking_for_help_loads_nothing_heavy():
    light = loaded_after(command("--help"))
    assert light & (HEAVY | {"numpy", "httpx", "starlette", "granian"}) == set()


@pytest.mark.parametrize(
    "arguments",
    [("validate", "pipelines/quickstart.yaml"), ("explain", "model", "--format", "json")],
)
def test_checking_a_spec_loads_no_accelerator_stack(arguments: tuple[str, ...]):
    assert loaded_after(command(*arguments)) & (HEAVY | {"httpx"}) == set()


def test_the_probe_would_notice():
    assert "json" in loaded_after("import json")


def folders_of(root: Path) -> list[Path]:
    return sorted({path.parent for path in root.rglob("*.py")})


def modules_of(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.glob("*.py"))
    return [name for name in names if name not in ("__init__.py", "conftest.py")]


def crowded(root: Path) -> dict[str, int]:
    """Folders with too many modules to take in at a glance."""
    sizes = {str(folder): len(modules_of(folder)) for folder in folders_of(root)}
    return {folder: size for folder, size in sizes.items() if size > MOST_MODULES}


def unlisted(root: Path) -> list[str]:
    """Modules and folders that the docstring of their folder does not list on a line.

    Files of tests need no line: their names say what they test.
    """
    missing = []
    for folder in folders_of(root):
        start_page = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        listed = {line.split()[0] for line in start_page.splitlines() if len(line.split()) > 1}
        inner = [f"{path.parent.name}/" for path in folder.glob("*/__init__.py")]
        modules = [name for name in modules_of(folder) if not name.startswith("test_")]
        names = [*modules, *inner]
        missing += [f"{folder}: {name}" for name in names if name not in listed]
    return missing


def defined_twice(root: Path) -> dict[str, list[str]]:
    """Public classes whose name means two things."""
    places: dict[str, list[str]] = {}
    for path in root.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    return {name: found for name, found in places.items() if len(found) > 1}


@pytest.mark.parametrize("root", [PACKAGE, TESTS], ids=["package", "tests"])
def test_folders_and_files_can_be_taken_in(root: Path):
    assert crowded(root) == {}
    lengths = {path: len(path.read_text().splitlines()) for path in root.rglob("*.py")}
    assert [str(path) for path, lines in lengths.items() if lines > MOST_LINES] == []


@pytest.mark.parametrize("root", [PACKAGE, TESTS], ids=["package", "tests"])
def test_every_folder_lists_its_modules(root: Path):
    assert unlisted(root) == []


def test_a_public_class_name_means_one_thing():
    assert defined_twice(PACKAGE) == {}


def test_these_checks_would_notice(tmp_path: Path):
    for number in range(MOST_MODULES + 1):
        (tmp_path / f"m{number}.py").write_text("class Same: ...\n")
    (tmp_path / "__init__.py").write_text('"""A folder.\n\n    m0.py  listed\n    m1.py\n"""\n')
    assert crowded(tmp_path) == {str(tmp_path): MOST_MODULES + 1}
    assert f"{tmp_path}: m0.py" not in unlisted(tmp_path)
    assert f"{tmp_path}: m1.py" in unlisted(tmp_path)
    assert len(defined_twice(tmp_path)["Same"]) == MOST_MODULES + 1


def test_no_file_is_a_drawer_for_odds_and_ends():
    paths = [*SOURCES, *(path for path in PACKAGE.rglob("*") if path.is_dir())]
    assert [str(path) for path in paths if path.stem in FORBIDDEN_NAMES] == []


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yields the modules imported and the functions called, by their written names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            yield ast.unparse(node.func)
            allowed = [word for word in node.keywords if word.arg == "allow_pickle"]
            yield from ("pickle" for word in allowed if ast.unparse(word.value) != "False")


def dangerous(source: str) -> set[str]:
    return set(names_in(ast.parse(source))) & (FORBIDDEN_MODULES | FORBIDDEN_CALLS)


def test_nothing_turns_foreign_bytes_into_code():
    offenders = {path: dangerous(path.read_text()) for path in SOURCES}
    assert {str(path): names for path, names in offenders.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml\nyaml.load(text, Loader)",
        "from yaml import load",
        "eval(text)",
        "np.load(file, allow_pickle=True)",
    ],
)
def test_that_check_would_notice(source: str):
    assert dangerous(source) != set()
