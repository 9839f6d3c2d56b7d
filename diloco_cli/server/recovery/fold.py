"""Fold: the ledger and the token totals that a journal's records add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from diloco_cli.core.journal_records import Entry, Record, decode_all
from diloco_cli.core.ledger import Ledger
from diloco_cli.server.rounds.token_totals import RunTotals
from diloco_cli.server.terms import TermsHistory

Look = Callable[[int, Record, Ledger, RunTotals], None]


def fold(
    history: TermsHistory, entries: Iterable[Entry], *, base: int, look: Look | None = None
) -> tuple[Ledger, RunTotals]:
    """Adds up a journal's entries; `base` is the number before the first.

    `look` sees each record with what those before it amount to; `history` follows.
    """
    ledger, totals = Ledger.empty(len(history.newest.sizes)), RunTotals(history)
    for number, record in decode_all(entries, base=base):
        if look:
            look(number, record, ledger, totals)
        ledger.apply(number, record)
        history.apply(ledger, record)
        totals.apply(record)
    return ledger, totals
