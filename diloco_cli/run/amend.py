"""Amends a run: through its server, or in the folder of one whose server is not running."""

from __future__ import annotations

import getpass
import json
import time
from dataclasses import replace
from pathlib import Path

from diloco_cli.assemble import build_terms, resolve, settings_of, spelled_out
from diloco_cli.core.journal_records import encode
from diloco_cli.core.terms import Made, Overtaken
from diloco_cli.errors import LinkError, SpecError
from diloco_cli.net.client import Client
from diloco_cli.net.credentials import Credentials
from diloco_cli.net.options import Options, Retry
from diloco_cli.run.folder import RESOLVED, Target, is_a_regions, server_elsewhere
from diloco_cli.server.recovery.fold import fold
from diloco_cli.server.store.run_store import open_store
from diloco_cli.server.terms import NotAmendable, TermsHistory, request_of
from diloco_cli.spec.resolved import read_resolved
from diloco_cli.system.files import keep_bytes
from diloco_cli.system.locks import FileLock
from diloco_cli.wire.messages import Amend, Amended

TRIES = 5


def amend(run: Target, request: Amend, credentials: Credentials) -> Amended:
    """Makes an amendment; raises SpecError when it may not be made."""
    if run.folder and is_a_regions(run.folder):
        raise server_elsewhere(run.folder, "amend")
    served = run.folder is None or not FileLock(run.folder / "server" / "lock").is_free()
    if served:
        if run.url is None:
            raise LinkError(f"{run} has a server that does not listen yet.", hint="Try again.")
        options = Options(retry=Retry(tries=TRIES), credentials=credentials)
        with Client(run.url, options) as client:
            return client.amend(request)
    assert run.folder is not None
    return amend_folder(run.folder, request)


def amend_folder(folder: Path, request: Amend) -> Amended:
    """Amends a run whose server is not running; takes its folder as a server would."""
    if not (folder / "server" / "journal").exists():
        raise SpecError(
            f"{folder} has not begun: its server never ran.",
            hint=f"Edit {folder / RESOLVED}'s original and start it; nothing is on record yet.",
        )
    spec = spelled_out(read_resolved(folder))
    settings = settings_of(spec, resolve(spec))
    store, records = open_store(
        spec.server.store,
        folder / "server",
        layout=settings.layout.digest,
        spec=settings.spec_digest,
    )
    try:
        history = TermsHistory(settings, build_terms)
        ledger, _ = fold(history, records, base=store.journal.base)
        try:
            judged = history.judge(ledger, request_of(request, by=getpass.getuser()))
        except NotAmendable as error:
            lines = "\n".join(f"{fault.key}: {fault.message}" for fault in error.faults)
            raise SpecError(lines, hint=error.faults[0].hint or None) from None
        if isinstance(judged, Overtaken):
            raise SpecError(f"The run is at terms {judged.newest} by now.", hint="Ask again.")
        if isinstance(judged, Made):
            return Amended(terms=judged.record.number, recorded=True)
        answer = judged.answer(ledger.terms)
        if request.dry_run or not judged.changes:
            return answer
        if judged.ends and not request.sure:
            raise SpecError(
                f"{ledger.applied(settings.sizes):.0f} tokens are merged, so the run would end "
                "with this budget.",
                hint="Say --yes to end it so.",
            )
        if judged.record.reopens:
            # Before the record: a start between the two finds the run finished and says so again.
            _restate(folder, state="stopped", why="opened again by an amendment")
        now = time.time()
        at = round(ledger.allowance.restarted(now), 3) if judged.record.repace else None
        store.journal.append(encode(replace(judged.record, time=round(now, 3), at=at)))
        store.journal.sync()
        if "budget.tokens" in judged.record.set:
            budget = next(each.after for each in judged.changes if each.key == "budget.tokens")
            _restate(folder, budget=budget)
        return answer.model_copy(update={"terms": judged.record.number})
    finally:
        store.close()


def _restate(folder: Path, *, budget: int | None = None, **changes: str) -> None:
    """Changes what the last summary says of the run."""
    path = folder / "summary.json"
    if path.exists():
        summary = json.loads(path.read_bytes()) | changes
        if budget is not None and summary.get("tokens"):
            summary["tokens"] |= {"budget": budget}
        keep_bytes(path, json.dumps(summary, indent=2).encode() + b"\n")
