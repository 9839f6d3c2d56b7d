"""The shape of the code: layers point down, commands start light, files stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import diloco_cli

PACKAGE = Path(diloco_cli.__file__).parent
ROOT = PACKAGE.parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

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


def test_no_module_outgrows_one_sitting():
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCES}
    assert [str(path) for path, lines in lengths.items() if lines > 400] == []


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


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_turns_foreign_bytes_into_code(path: Path):
    assert dangerous(path.read_text()) == set()


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
