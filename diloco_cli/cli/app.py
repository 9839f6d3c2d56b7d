"""The `diloco` command: global options, and the one place where errors become text.

    0 done · 1 failed · 2 spec or usage · 3 untrusted bytes · 4 unreachable ·
    5 damaged state · 6 quorum lost · 129 SIGHUP · 130 SIGINT · 143 SIGTERM

Nothing heavy is imported here: `diloco --help` answers at once, and each command
loads what it needs when it runs.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import typer

from diloco_cli.cli import amend, certs, data, doctor, model, profile, report, run, spec
from diloco_cli.cli.study import bench, chaos, plan, simulate
from diloco_cli.errors import DilocoError
from diloco_cli.system import logs
from diloco_cli.system.outputs import NO_ROOM

# No shell completion: it is driven by an environment variable, and we read only our four.
app = typer.Typer(
    name="diloco",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"diloco {version('diloco-cli')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def diloco(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an unexpected error.")
    ] = False,
) -> None:
    """Pretrain one language model across datacenters over ordinary links."""
    with suppress(OSError):  # The folder may be gone, which is for whoever needs it to say.
        context.call_on_close(partial(os.chdir, os.getcwd()))
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


INTERRUPTED = 130

spec.register(app)
run.register(app)
amend.register(app)
certs.register(app)
data.register(app)
bench.register(app)
simulate.register(app)
chaos.register(app)
plan.register(app)
doctor.register(app)
model.register(app)
profile.register(app)
report.register(app)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; the one place where our errors become text and an exit code."""
    code = _exit_code(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        # Before it ends, Python searches everything it ever loaded for garbage: 60 of the
        # 400 ms that `diloco validate` took. The system takes the memory back without that.
        gc.freeze()
        if code == INTERRUPTED and "jaxlib" in sys.modules:
            # Its threads compile on while Python takes itself apart under them, and abort.
            sys.stdout.flush()
            os._exit(code)
    raise SystemExit(code)


def _exit_code(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="diloco", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except DilocoError as error:
        _report(error.message, error.hint)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left; Python would complain once more while closing.
        _drop_output()
        return 1
    except MemoryError as error:
        reason = f": {error}" if str(error) else ""
        _report(f"There is not enough memory for this{reason}.".replace("..", "."), _SMALLER)
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            _report(f"{error.filename or 'The output'} cannot be written: {error.strerror}.", _ROOM)
            _drop_output()
            return 1
        if hasattr(error, "format_message"):  # Raised by the option parser.
            return _usage(error)
        if "--debug" in arguments:
            raise
        _report(f"Unexpected {type(error).__name__}: {error}", _keep_traceback())
        return 1
    finally:
        logs.tear_down()


def _drop_output() -> None:
    """Lets Python throw away what it still means to write, without a word."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_ROOM = "Free some space on that disk, or write elsewhere."
_SMALLER = "Choose a smaller model or batch, or a machine with more memory."


def _usage(error: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # A group without a command is a question.
        typer.echo(error.format_message(), err=True)
        return 2
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "diloco"
    _report(error.format_message(), f"{path} --help")
    return 2


def _keep_traceback() -> str:
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile(
        "w", prefix="diloco-", suffix=".traceback", delete=False, encoding="utf-8"
    ) as file:
        traceback.print_exc(file=file)
    return f"This is a fault of diloco itself; {file.name} has the details, --debug shows them."


def _report(message: str, hint: str | None) -> None:
    if logs.log_fatal(message, hint):
        return
    typer.echo(f"error: {message}", err=True)
    if hint:
        typer.echo(f"hint: {hint}", err=True)
