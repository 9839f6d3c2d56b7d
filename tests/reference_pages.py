"""The reference pages, written from the code: `python -m tests.reference_pages docs/reference`.

    commands.md     from the command line itself
    spec.md         from the sections of the run spec
    kinds.md        from the registries
    exit-codes.md   from the errors
    http-api.md     from the table the server makes its routes of
    events.md       from the kinds of the run log

A page that differs from what this module writes fails the tests, so the pages are true.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import typer
from pydantic import BaseModel

from diloco_cli.assemble import SEAMS
from diloco_cli.cli.app import app
from diloco_cli.errors import DilocoError
from diloco_cli.observe import events
from diloco_cli.server.http.calls import CALLS
from diloco_cli.spec.amendable import rule_of
from diloco_cli.spec.describe import OptionDescription, keys_of, kinds_of, summary
from diloco_cli.spec.schema import RunSpec

NOTICE = "<!-- Written by `make docs` from the code. Edit the code, not this page. -->\n"

COMMANDS = """\
Data goes to stdout, talk to stderr. `--format json` prints one document and nothing else.
What the exit codes mean: [exit-codes.md](exit-codes.md).
"""
SPEC = """\
One YAML file describes a whole run. Unknown keys, duplicate keys, tags, aliases and inline
secrets are refused. Numbers may have underscores (`4_000_000`) and exponents (`3e-3`). Any
key can be changed on the command line: `--set sync.quorum=2`, `--set regions.0.speed=0.5`.

Where a mapping has a `kind`, the options are those of that kind: [kinds.md](kinds.md). The last
column says when a change takes effect that `diloco amend` makes in a run that has begun; options
of a kind follow the key that names the kind.\
"""
KINDS = """\
What a spec can choose by `kind`, and the options of each. `diloco explain` prints the same.\
"""
HTTP_API = """\
HTTP/2 (prior knowledge on `http://`) and HTTP/1.1 for browsers. `diloco-run` names the run and
`diloco-wire` the wire version; a PUT also carries `diloco-epoch`. The server's own description is
at `/openapi.json`. Every error body is `{"error": {"code", "message", "hint"}}`.

Where the server has certificates (`server.certs`) it speaks TLS 1.3 only and asks for a client
certificate, and calls carry `authorization: Bearer TOKEN` (a browser may send the token as the
password of Basic). Without, on the loopback address, anybody may make any call.\
"""
EVENTS = """\
`events.jsonl` in the run folder has one JSON object per line: `kind`, `time` (seconds since 1970),
`seconds` (since the process began), `process`, and the fields of the kind. Each process appends
its own lines; nothing is ever rebuilt from them. A file that has reached 64 MiB becomes
`events.jsonl.1`, in place of the one before; both may be deleted at any time.

`GET /v1/events` streams what both hold. An id is a place in one of them and stays good when the
file is moved; an id whose place is no longer kept is answered with everything that is.\
"""
SIGNALS = {
    0: "Done; also `serve` and `work` that were told to stop and left in good order.",
    129: "`diloco run`, or anything that was asked twice: ended by SIGHUP.",
    130: "`diloco run`, or anything that was asked twice: ended by SIGINT (Ctrl-C).",
    143: "`diloco run`, or anything that was asked twice: ended by SIGTERM.",
}


def pages() -> dict[str, str]:
    """Renders every page, by file name."""
    bodies = {
        "commands.md": _commands(),
        "spec.md": _spec(),
        "kinds.md": _kinds(),
        "exit-codes.md": _exit_codes(),
        "http-api.md": _http_api(),
        "events.md": _events(),
    }
    return {name: NOTICE + "\n".join(lines) + "\n" for name, lines in bodies.items()}


def exit_codes() -> dict[int, str]:
    """Gives the meaning of every code a command can end with."""
    codes = dict(SIGNALS)
    for error in _family(DilocoError):
        if "exit_code" in vars(error):
            codes.setdefault(error.exit_code, summary(error))
    codes[1] = "The run failed, or diloco itself has a fault."
    return dict(sorted(codes.items()))


def _family(error: type[DilocoError]) -> Iterator[type[DilocoError]]:
    for child in error.__subclasses__():
        if child.__module__ == DilocoError.__module__:
            yield child
            yield from _family(child)


def _http_api() -> Iterator[str]:
    yield "# HTTP API, version 1\n"
    yield HTTP_API
    for call in CALLS:
        yield f"\n## {call.method} `{call.pattern}`\n"
        yield f"{call.does}\n"
        must = "run and wire version" if call.region else "wire version" if call.wire else ""
        if must:
            yield f"Must name the {must}.\n"
        may = f"roles {', '.join(sorted(call.may))}" if call.may else "anybody with a certificate"
        whose = " of the region itself" if "{region}" in call.path else ""
        yield f"With credentials: {may}{whose}.\n"
        for name, meaning in (call.query or {}).items():
            yield f"* `?{name}=`: {meaning}"
        if call.sends:
            yield f"* takes `{call.sends}`"
        yield f"* gives `{call.gives}`\n"
        yield "| code | answer |\n| --- | --- |"
        for code, answer in sorted(call.every_answer.items()):
            yield f"| {code} | {answer} |"


def _events() -> Iterator[str]:
    yield "# Events\n"
    yield EVENTS
    yield "\n| kind | means | fields |\n| --- | --- | --- |"
    for name, kind in events.KINDS.items():
        yield f"| `{name}` | {kind.meaning} | {', '.join(f'`{field}`' for field in kind.fields)} |"


def _exit_codes() -> Iterator[str]:
    yield "# Exit codes\n"
    yield "A code is never given a second meaning.\n"
    yield "| code | meaning |\n| ---: | --- |"
    yield from (f"| {code} | {meaning} |" for code, meaning in exit_codes().items())


def _commands() -> Iterator[str]:
    root: Any = typer.main.get_command(app)
    yield "# Commands\n"
    yield COMMANDS
    yield from _command(root, "diloco")
    for path, command in _below(root, "diloco"):
        yield from _command(command, path)


def _below(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if not command.hidden:
            yield f"{path} {name}", command
            if hasattr(command, "commands"):
                yield from _below(command, f"{path} {name}")


def _command(command: Any, path: str) -> Iterator[str]:
    shown = [param for param in command.params if not getattr(param, "hidden", False)]
    arguments = [param for param in shown if param.param_type_name == "argument"]
    names = [(param.metavar or param.name.upper()) for param in arguments]
    yield f"\n## `{' '.join([path, *names])}`\n"
    yield " ".join((command.help or "").split("\f")[0].split()) + "\n"
    if shown:
        yield "| | meaning | default |\n| --- | --- | --- |"
    for param, name in zip(arguments, names, strict=True):
        yield f"| `{_cell(name.strip('[]'))}` | {_cell(param.help or '')} | {_default(param)} |"
    for param in (param for param in shown if param.param_type_name != "argument"):
        value = "" if param.is_flag else f" {param.metavar or param.name.upper()}"
        flags = ", ".join(f"`{_cell(flag + value)}`" for flag in param.opts)
        yield f"| {flags} | {_cell(param.help or '')} | {_default(param) or _from(param)} |"


def _default(param: Any) -> str:
    if param.required:
        return "required"
    plain = param.default
    if plain in (None, "", False) or callable(plain):
        return ""
    return f"`{getattr(plain, 'value', plain)}`"


def _from(param: Any) -> str:
    names = [param.envvar] if isinstance(param.envvar, str) else param.envvar or []
    return ", ".join(f"`${name}`" for name in names)


def _spec() -> Iterator[str]:
    yield "# The run spec\n"
    yield SPEC
    yield from _section(RunSpec, "")


def _section(section: type[BaseModel], path: str) -> Iterator[str]:
    yield f"\n## `{path}`\n" if path else "\n## Top level\n"
    yield summary(section) + "\n"
    yield "| key | value | default | meaning | in a run that has begun |"
    yield "| --- | --- | --- | --- | --- |"
    for key in keys_of(section):
        name = f"{path}.{key.name}" if path else key.name
        yield f"| `{name}` |{_cells(key)} {_cell(_changeable(name))} |"
    for name, field in section.model_fields.items():
        if inner := _inner(field.annotation):
            is_list = get_origin(field.annotation) is tuple
            yield from _section(inner, f"{path}.{name}".strip(".") + ("[]" if is_list else ""))


def _changeable(name: str) -> str:
    """When a change of a key takes effect; nothing for a section, whose keys say it."""
    rule = rule_of(name.replace("[]", ".*"))
    return rule.in_words if rule else "see below"


def _inner(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for arg in get_args(annotation) if (model := _inner(arg))), None)


def _kinds() -> Iterator[str]:
    yield "# Kinds\n"
    yield KINDS
    for seam, registry in SEAMS.items():
        yield f"\n## {seam}\n"
        for kind in kinds_of(registry):
            yield f"### `kind: {kind.name}`\n\n{kind.doc}\n"
            if kind.options:
                yield "| option | value | default | meaning |\n| --- | --- | --- | --- |"
                yield from (f"| `{option.name}` |{_cells(option)}" for option in kind.options)
                yield ""


def _cells(option: OptionDescription) -> str:
    default = option.shown_default
    shown = default if default in ("required", "left out", "see below") else f"`{default}`"
    return f" {_cell(option.type)} | {_cell(shown)} | {_cell(option.doc)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
