"""Fold: the ledger and the token totals that a journal's records add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from diloco_cli.core.journal_records import Entry, Record, decode_all
from diloco_cli.core.ledger import Ledger
from diloco_cli.server.rounds.token_totals import RunTotals
from diloco_cli.server.settings import ServerSettings

Look = Callable[[int, Record, Ledger, RunTotals], None]


def fold(
    settings: ServerSettings, entries: Iterable[Entry], *, base: int, look: Look | None = None
) -> tuple[Ledger, RunTotals]:
    """Adds up a journal's entries; `base` is the number before the first.

    `look` sees each record with what those before it amount to.
    """
    ledger, totals = Ledger.empty(len(settings.sizes)), RunTotals(settings)
    for number, record in decode_all(entries, base=base):
        if look:
            look(number, record, ledger, totals)
        ledger.apply(number, record)
        totals.apply(record)
    return ledger, totals
