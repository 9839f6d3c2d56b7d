"""Every failure is a sentence with a hint and its own exit code; never a traceback."""

from __future__ import annotations

import ast
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from diloco_cli import __main__ as entry
from diloco_cli.cli import app as boundary
from diloco_cli.cli.options import above_zero, finite
from diloco_cli.errors import LinkError, QuorumLost, SpecError, StoreError, WireError
from diloco_cli.system.outputs import cannot_be_written
from tests import ROOT


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diloco_cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """Makes `diloco validate` fail with whatever it is given."""

    def fail_with(error: BaseException) -> None:
        def load_run(*_: object) -> None:
            raise error

        monkeypatch.setattr("diloco_cli.assemble.load_run", load_run)

    return fail_with


def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        boundary.main(list(arguments))
    return ended.value.code


@pytest.mark.parametrize(
    "error, code",
    [(SpecError, 2), (WireError, 3), (LinkError, 4), (StoreError, 5), (QuorumLost, 6)],
)
def test_our_errors_become_two_lines_and_their_code(failing, capsys, error, code):
    failing(error("It broke at 7.", hint="Mend it."))
    assert exit_code("validate", "run.yaml") == code
    printed = capsys.readouterr()
    assert printed.err == "error: It broke at 7.\nhint: Mend it.\n"
    assert printed.out == ""


def test_an_interrupt_ends_with_130(failing):
    failing(KeyboardInterrupt())
    assert exit_code("validate", "run.yaml") == 130


INTERRUPTED = """
import atexit, signal, sys, types
from diloco_cli.cli import app
def interrupted(): raise KeyboardInterrupt
app.app.command("interrupted")(interrupted)
atexit.register(print, "Python takes itself apart")
if sys.argv.pop(1) == "compiling":
    sys.modules["jaxlib"] = types.ModuleType("jaxlib")
app.main()
"""


@pytest.mark.parametrize("doing, ending", [("compiling", ""), ("waiting", "takes itself apart")])
def test_who_compiles_while_interrupted_ends_at_once(doing, ending):
    """XLA's threads abort the process where Python ends in its usual way."""
    command = [sys.executable, "-c", INTERRUPTED, doing, "interrupted"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 130 and done.stderr == ""
    assert done.stdout.strip().endswith(ending) and bool(done.stdout) == bool(ending)


def test_a_fault_of_our_own_is_a_line_and_the_traceback_a_file(failing, capsys):
    failing(ZeroDivisionError("by nought"))
    assert exit_code("validate", "run.yaml") == 1
    said = capsys.readouterr().err
    assert said.startswith("error: Unexpected ZeroDivisionError: by nought\nhint: ")
    assert "Traceback" not in said
    kept = Path(next(word for word in said.split() if word.endswith(".traceback")))
    assert "by nought" in kept.read_text()
    kept.unlink()


def test_too_little_memory_is_a_sentence(failing, capsys):
    failing(MemoryError("Unable to allocate 4.00 TiB for an array"))
    assert exit_code("validate", "run.yaml") == 1
    said = capsys.readouterr().err
    assert "not enough memory" in said and "4.00 TiB" in said and "fault of diloco" not in said


def test_debug_shows_the_traceback(failing):
    failing(ZeroDivisionError("by nought"))
    with pytest.raises(ZeroDivisionError):
        boundary.main(["--debug", "validate", "run.yaml"])


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["validat"], "No such command 'validat'."),
        (["validate"], "Missing argument"),
        (["validate", "--fast", "run.yaml"], "No such option: --fast"),
        (["validate", "run.yaml", "--format", "xml"], "xml"),
    ],
)
def test_wrong_usage_ends_with_2_and_points_to_help(arguments, said, capsys):
    assert exit_code(*arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert said in printed
    assert "--help" in printed


SPEC = str(ROOT / "pipelines" / "quickstart.yaml")
FILES = [
    ("pull", "--out"),
    ("report", "--out"),
    ("compare", "a", "b", "--out"),
    ("simulate", SPEC, "--record"),
    ("simulate", SPEC, "--plot"),
    ("simulate", "streaming-table4", "--plot"),
    ("bench", "quality", "--plot"),
    ("data", "train-tokenizer", "in.txt", "--vocabulary", "300", "--out"),
    ("certs", "issue", "--region", "r", "--bundle"),
]
"""Options that name a file to be written."""
FOLDERS = [
    ("export", "--out"),
    ("profile", "run", "--region", "r", "--out"),
    ("backup", "run", "--to"),
    ("data", "prepare", "in.txt", "--tokenizer", "t.json", "--out"),
    ("bench", "quality", "--file"),
]
"""Options that name a folder to be made, or a file whose folder is."""


@pytest.mark.parametrize("words", FILES, ids=" ".join)
def test_a_file_that_cannot_be_written_is_named_before_anything_is_done(words, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for place, why in (
        (tmp_path / "missing" / "x", f"there is no folder {tmp_path / 'missing'} to write x into"),
        (tmp_path / "file" / "x", f"there is no folder {tmp_path / 'file'} to write x into"),
        (tmp_path, f"{tmp_path} is a folder, not a file"),
        (Path("/proc/x"), "/proc/x cannot be written"),
        (tmp_path / ("x" * 300), "cannot be written: File name too long"),
    ):
        assert exit_code(*words, str(place)) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {words[-1]}: ") and why in said and "hint: " in said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("words", FOLDERS, ids=" ".join)
def test_a_folder_that_cannot_be_made_is_named_before_anything_is_done(words, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "deep" / "x"
    assert exit_code(*words, str(place)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {words[-1]}: {tmp_path}") and "is a file" in said
    assert "hint: " in said and (tmp_path / "file").read_text() == ""


def test_a_folder_in_the_place_of_a_file_that_is_added_to_is_named(tmp_path, capsys):
    assert exit_code("bench", "quality", "--file", str(tmp_path)) == 2
    assert f"--file: {tmp_path} is a folder, not a file" in capsys.readouterr().err


def test_only_a_disk_without_room_is_not_the_commands_fault(tmp_path):
    full = cannot_be_written(tmp_path, "--out", OSError(errno.ENOSPC, "No space left on device"))
    gone = cannot_be_written(tmp_path, "--out", FileNotFoundError(errno.ENOENT, "No such file"))
    assert (full.exit_code, gone.exit_code) == (5, 2)
    assert "--out" in (full.hint or "") and "--out" in (gone.hint or "")


def commands(group: Any, *names: str) -> Iterator[tuple[str, Any]]:
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, *names, name)
    if not hasattr(group, "commands"):
        yield " ".join(names), group


def test_no_option_takes_a_number_without_an_end(capsys):
    numbers = [
        (f"{name} {param.opts[0]}", param.callback)
        for name, command in commands(typer.main.get_command(boundary.app))
        for param in command.params
        if "float" in str(getattr(param, "type_descriptor", "") or getattr(param, "type", ""))
    ]
    assert len(numbers) > 10, "or this test looks at the wrong thing"
    unguarded = [
        name
        for name, check in numbers
        if getattr(check, "__wrapped__", check) not in (finite, above_zero)
    ]
    assert unguarded == []
    for number in ("inf", "nan"):
        assert exit_code("stop", "--wait", number) == 2
        assert f"'--wait': {number} is not a finite number" in capsys.readouterr().err


def test_no_command_at_all_shows_the_commands(capsys):
    assert exit_code() == 2
    assert "validate" in capsys.readouterr().err


def test_help_and_version_are_data():
    helped, version = run("--help"), run("--version")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "init" in helped.stdout
    assert version.stdout.startswith("diloco ")


@pytest.mark.parametrize("say", ["print('x')", "app.typer.echo('x')"])
def test_a_reader_that_leaves_early_is_no_error(say: str):
    code = (
        "from diloco_cli.cli import app\n"
        f"app.app.command('chatter')(lambda: {say})\n"
        "app.main(['chatter'])"
    )
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_an_old_python_is_told_so(capsys):
    with pytest.raises(SystemExit) as ended:
        entry.refuse_old_python((3, 9, 18))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: diloco needs Python 3.11 or newer, this is 3.9 (")
    assert "\nhint: " in said


def test_the_entry_asks_before_it_imports_anything_new():
    probe = (
        "import sys, runpy; sys.version_info = (3, 9, 18, 'final', 0)\n"
        "sys.modules['typer'] = None  # An old Python has none of what we depend on.\n"
        "runpy.run_module('diloco_cli', run_name='__main__')"
    )
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: diloco needs Python 3.11 or newer, this is 3.9")


@pytest.mark.parametrize("name", ["__init__.py", "__main__.py"])
def test_what_runs_before_that_question_is_readable_to_an_old_python(name: str):
    file = Path(entry.__file__).with_name(name)
    tree = ast.parse(file.read_text(), feature_version=(3, 4))
    modules = [
        alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names
    ]
    assert set(modules) <= {"sys"}
    assert not any(isinstance(node, ast.ImportFrom) for node in tree.body)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_full_disk_behind_the_output_is_no_fault_of_ours():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "diloco_cli", "explain", "codec"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr == (
        "error: The output cannot be written: No space left on device.\n"
        "hint: Free some space on that disk, or write elsewhere.\n"
    )


@pytest.mark.parametrize("group", [(), ("bench",), ("certs",)])
def test_a_group_without_a_command_shows_what_there_is(group):
    ended = run(*group)
    assert ended.returncode == 2 and ended.stderr.startswith("Usage: diloco")
    assert "error:" not in ended.stderr
