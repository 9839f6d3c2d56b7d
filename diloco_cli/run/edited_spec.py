"""A spec for a run that has begun: has the run had these settings, or what would give it them?

A run keeps the spec that it began with, and its journal the amendments since. Whoever starts it
again may come with any terms that it has had. What is a matter of hosts (where the server
listens, what a region's machine has) may differ from start to start; everything else changes by
an amendment, and the refusal says which.

    spec.resolved.yaml  terms 0; written once
    spec.current.yaml   the newest terms, with this start's hosts; written at every start
"""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diloco_cli.assemble import faults, spelled_out
from diloco_cli.core import terms
from diloco_cli.core.journal_records import Entry, Snapshot, TermsAmended, decode
from diloco_cli.core.ledger import Ledger
from diloco_cli.errors import SpecError
from diloco_cli.run.folder import cannot_write, keep_spec_base
from diloco_cli.run.untrained import begin_anew, finish, has_trained_nothing
from diloco_cli.server.store.journal import read_journal
from diloco_cli.spec.amendable import rule_of
from diloco_cli.spec.load import check_spec
from diloco_cli.spec.resolved import FILE, read_resolved, resolved, resolved_yaml, write_resolved
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system.files import keep_bytes

CURRENT = "spec.current.yaml"
MOST_NAMED = 3


@dataclass(frozen=True)
class SettledSpec:
    """The spec of a run that is started."""

    first: RunSpec
    """What the run began with, with the hosts of this start."""
    current: RunSpec
    """The newest terms, with the hosts of this start."""
    file: Path
    """`current`, for the processes of the run."""
    remark: str = ""
    """What a person should know of it."""


def settle_spec(spec: RunSpec, folder: Path, *, fresh: bool = True) -> SettledSpec:
    """Writes the spec of a new run; checks it against those that a run has had.

    A run that has trained nothing begins anew with whatever spec it is given. `fresh` says
    whether the command could start over instead.
    """
    finish(folder)
    if not (folder / FILE).exists():
        write_resolved(spec, folder)
    first = resolved(read_resolved(folder))
    amendments = amendments_of(folder)
    given = dict(terms.flat(resolved(spec)))
    had = [first, *(_terms(first, amendments[:number]) for number in _numbers(amendments))]
    if any(_alike(given, dict(terms.flat(each))) for each in had):
        return _settled(folder, first, had[-1], given)
    if not has_trained_nothing(folder):
        raise _edited(folder, had[-1], resolved(spec), fresh=fresh)
    begin_anew(spec, folder)
    remark = f"{folder} had trained nothing and begins anew: {_keys(had[-1], resolved(spec))}"
    return replace(_settled(folder, resolved(spec), resolved(spec), given), remark=remark)


def _keys(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    keys = [change.key for change in terms.changes(there, here) if not _of_a_host(change.key)]
    more = f" and {len(keys) - MOST_NAMED} more keys" if len(keys) > MOST_NAMED else ""
    return f"its spec has another {', '.join(keys[:MOST_NAMED])}{more}"


def amendments_of(folder: Path) -> list[TermsAmended]:
    """The amendments on record in a server's folder; none where no server has run."""
    journal = folder / "server" / "journal"
    return folded_amendments(read_journal(journal).records) if journal.exists() else []


def folded_amendments(entries: Sequence[Entry]) -> list[TermsAmended]:
    amendments: list[TermsAmended] = []
    for entry in entries:
        if entry["kind"] not in (TermsAmended.kind, Snapshot.kind):
            continue  # Of a long journal most is about something else.
        record = decode(entry)
        if isinstance(record, TermsAmended):
            amendments.append(record)
        elif isinstance(record, Snapshot):
            ledger = Ledger.empty(0)
            ledger.restore(record.ledger)
            amendments = ledger.amendments
    return amendments


def _numbers(amendments: Sequence[TermsAmended]) -> range:
    return range(1, len(amendments) + 1)


def _terms(first: Mapping[str, Any], amendments: Sequence[TermsAmended]) -> terms.Settings:
    """Terms as a spec file would say them, every option spelled out."""
    spec = check_spec(terms.overlay(first, amendments), "the amended spec", also=faults)
    return resolved(spelled_out(spec))


def _of_a_host(key: str) -> bool:
    rule = rule_of(key)
    return rule is not None and bool({"own", "host"} & set(rule.when))


def _alike(here: Mapping[str, Any], there: Mapping[str, Any]) -> bool:
    keys = {*here, *there}
    return all(here.get(key) == there.get(key) or _of_a_host(key) for key in keys)


def _settled(
    folder: Path, first: terms.Settings, newest: terms.Settings, given: Mapping[str, Any]
) -> SettledSpec:
    began = dict(terms.flat(first))
    beginning, current = copy.deepcopy(first), copy.deepcopy(newest)
    for key in {*given, *began}:
        if _of_a_host(key) and given.get(key) != began.get(key):
            for settings in (beginning, current):
                terms.put(settings, key, given.get(key))
    # Where the server listens may have been amended, too.
    beginning["server"] = {**beginning["server"], **_host_keys(current["server"])}
    spec = check_spec(current, "the amended spec", also=faults)
    path = folder / CURRENT
    try:
        keep_bytes(path, resolved_yaml(spec).encode(), mode=0o644)
        keep_spec_base(folder)
    except OSError as error:
        raise cannot_write(path, error) from None
    return SettledSpec(check_spec(beginning, "the spec", also=faults), spec, path)


def _host_keys(server: Mapping[str, Any]) -> dict[str, object]:
    return {key: value for key, value in server.items() if _of_a_host(f"server.{key}")}


def _edited(
    folder: Path, there: Mapping[str, Any], here: Mapping[str, Any], *, fresh: bool
) -> SpecError:
    """Lists what differs from the newest terms, and the command that would make it so."""
    changes = [change for change in terms.changes(there, here) if not _of_a_host(change.key)]
    lines = [f"  {_line(change)}" for change in changes]
    refused = [fault for change in changes if (fault := terms.forbidden(change))]
    over = ["--fresh starts over in this folder"] if fresh else []
    over.append("--dir FOLDER starts beside it")
    if refused:
        hint = f"{refused[0].key} {refused[0].message}. {refused[0].hint} Or {', '.join(over)}."
    else:
        hint = f"{amend_command(folder, changes)} makes it so; {', '.join(over)}."
    return SpecError(
        f"{folder} holds a run that has begun with other settings:\n" + "\n".join(lines), hint=hint
    )


def _line(change: terms.KeyChange) -> str:
    if change.key.startswith("regions.") and change.key.count(".") == 1:
        return f"{change.key}: {'not there' if change.before is None else 'there'}, " + (
            "listed here" if change.after else "not listed here"
        )
    return f"{change.key}: {_shown(change.before)} there, {_shown(change.after)} here"


def _shown(value: Any) -> str:
    return "absent" if value is None else repr(value)


def amend_command(folder: Path, changes: Sequence[terms.KeyChange]) -> str:
    """The command that makes these changes."""
    words = ["diloco", "amend", str(folder)]
    for change in changes:
        region = change.key.removeprefix("regions.")
        if change.key != region and "." not in region:
            words += ["--add-region" if change.after else "--remove-region", region]
        else:
            words += ["--set", f"{change.key}={json.dumps(change.after, ensure_ascii=False)}"]
    return shlex.join(words)
