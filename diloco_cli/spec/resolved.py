"""What exactly does this run do? Every key spelled out, written once beside the run.

`FOLDER/spec.resolved.yaml` is the run's own memory of its spec. A run that is resumed
must mean the same thing, so a spec that says something else is refused with the keys
that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from diloco_cli.errors import SpecError, StoreError
from diloco_cli.spec.schema import RunSpec
from diloco_cli.spec.yaml_source import YamlMapping, read, scalar
from diloco_cli.system.files import keep_bytes

FILE = "spec.resolved.yaml"


def resolved(spec: RunSpec) -> YamlMapping:
    """Spells out every key that has a meaning for this run, as plain data."""
    data = spec.model_dump(mode="json", exclude_none=True)
    # Options of the choices not taken would be refused as ineffective when read again.
    grace = data["sync"]["grace"]
    for option, kind in (("margin", "adaptive"), ("seconds", "fixed")):
        if grace["kind"] != kind:
            del grace[option]
    if data["sync"]["adopt"] != "blend":
        del data["sync"]["blend"]
    return data


def resolved_yaml(spec: RunSpec) -> str:
    """Writes a spec as YAML that loads to the same spec, in the order of the reference."""
    return yaml.dump(
        resolved(spec),
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=None,
        allow_unicode=True,
        width=100,
    )


def write_resolved(
    spec: RunSpec, folder: str | Path, *, may_differ: Callable[[str], bool] = lambda key: False
) -> Path:
    """Writes the run's spec once; refuses a spec that differs from the one written before.

    But for keys that `may_differ`.
    """
    final = Path(folder) / FILE
    if final.exists():
        _same(spec, final, may_differ)
        return final
    return replace_resolved(spec, folder)


def replace_resolved(spec: RunSpec, folder: str | Path) -> Path:
    """Writes the spec of a new run, in place of that of one that has trained nothing."""
    final = Path(folder) / FILE
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        keep_bytes(final, resolved_yaml(spec).encode(), mode=0o644)
    except OSError as error:
        raise StoreError(
            f"{final} cannot be written: {error.strerror}.",
            hint="Free some space or fix the permissions, or choose another folder with --dir.",
        ) from None
    return final


def _same(spec: RunSpec, file: Path, may_differ: Callable[[str], bool]) -> None:
    there, here = dict(_flat(resolved(read_resolved(file.parent)))), dict(_flat(resolved(spec)))
    keys = [key for key in [*here, *there] if here.get(key, "…") != there.get(key, "…")]
    keys = [key for key in keys if not may_differ(key)]
    if keys:
        lines = [
            f"  {key}: {_shown(there, key)} there, {_shown(here, key)} here"
            for key in dict.fromkeys(keys)
        ]
        raise SpecError(
            f"{file.parent} holds a run of another spec:\n" + "\n".join(lines),
            hint="--dir FOLDER starts beside it; to go on with the old run, give it its old spec.",
        )


def read_resolved(folder: Path) -> RunSpec:
    """The spec that the run in a folder began with."""
    file = folder / FILE
    try:
        document = read(file.read_text("utf-8"), str(file))
        return RunSpec.model_validate(document.data)
    except (OSError, UnicodeDecodeError, ValidationError):
        raise StoreError(
            f"{file} is damaged: it is not the resolved spec of a run.",
            hint="Restore it from a copy, or choose another folder with --dir.",
        ) from None


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else None
    )
    if not entries:
        yield path, value
        return
    for key, inner in entries:
        yield from _flat(inner, f"{path}.{key}" if path else str(key))


def _shown(values: Mapping[str, object], key: str) -> str:
    return repr(values[key]) if key in values else "absent"


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # PyYAML leaves `1e5` bare because YAML 1.1 calls it text; our reader calls it a number.
    style = None if isinstance(scalar(value), str) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)
