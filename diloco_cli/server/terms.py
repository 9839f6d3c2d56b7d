"""The settings of every terms that a run has had, by number.

A version is made by the terms that its round was closed under, so old terms are needed for as
long as a version may be computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco_cli.core import terms
from diloco_cli.core.journal_records import Record, RunRebuilt, Snapshot, TermsAmended
from diloco_cli.core.ledger import Ledger
from diloco_cli.server.settings import ServerSettings
from diloco_cli.spec.load import SpecErrors, check_spec
from diloco_cli.spec.resolved import resolved
from diloco_cli.wire.codecs import Codec
from diloco_cli.wire.messages import Amend, Amended, AmendedKey

Build = Callable[[ServerSettings, Mapping[str, Any]], ServerSettings]
"""Makes the next settings from the last ones and a resolved spec; raises SpecError."""


def build_plain(last: ServerSettings, data: Mapping[str, Any]) -> ServerSettings:
    """Makes settings without what only `assemble` knows: kinds, plugins, the shared digest."""
    return last.amended(check_spec(data, "the amended spec"))


class NotAmendable(Exception):
    """An amendment that may not be made, with everything that is wrong with it."""

    def __init__(self, faults: Sequence[terms.AmendmentFault]) -> None:
        super().__init__("; ".join(f"{fault.key}: {fault.message}" for fault in faults))
        self.faults = tuple(faults)


@dataclass(frozen=True, slots=True)
class Amendable:
    """An amendment that may be made: what to record, and what it changes."""

    record: TermsAmended
    changes: tuple[terms.KeyChange, ...]
    ends: bool
    """Nothing is left of the budget under these terms."""

    def answer(self, number: int) -> Amended:
        """What whoever asked for it hears; `number` is that of the newest terms."""
        keys = tuple(
            AmendedKey(key=change.key, before=change.before, after=change.after, when=change.when)
            for change in self.changes
        )
        return Amended(terms=number, changes=keys, reopens=self.record.reopens, ends=self.ends)


def request_of(message: Amend, *, by: str) -> terms.AmendmentRequest:
    """The request that a message makes, on behalf of somebody."""
    return terms.AmendmentRequest(
        message.id,
        message.after,
        message.set,
        message.add,
        message.remove,
        by,
        message.why,
        message.undo,
        message.repace,
    )


class TermsHistory:
    """Settings by the number of their terms; a fold over the journal, as the ledger is."""

    def __init__(self, first: ServerSettings, build: Build = build_plain) -> None:
        self._all, self._build = [first], build
        self.first = resolved(first.spec)
        """Terms 0 as plain data."""

    def __getitem__(self, number: int) -> ServerSettings:
        return self._all[number]

    def __iter__(self) -> Iterator[ServerSettings]:
        return iter(self._all)

    @property
    def newest(self) -> ServerSettings:
        return self._all[-1]

    @property
    def up_codecs(self) -> list[Codec]:
        """Every codec that contributions may have been packed with."""
        return list(dict.fromkeys(settings.up for settings in self._all))

    @property
    def digests(self) -> tuple[str, ...]:
        """Of the shared settings of every terms."""
        return tuple(dict.fromkeys(settings.spec_digest for settings in self._all))

    def most_step_tokens(self, region: str) -> int:
        """The largest step that a region may have been told to make."""
        return max(settings.step_tokens(region) for settings in self._all)

    def judge(
        self, ledger: Ledger, request: terms.AmendmentRequest
    ) -> terms.Made | terms.Overtaken | Amendable:
        """Says what becomes of a request; raises NotAmendable with all that is wrong with it."""
        if answer := terms.known(ledger.amendments, request):
            return answer
        if request.undo is not None:
            undoing = terms.undo(self.first, ledger.amendments, request.undo)
            if isinstance(undoing, terms.AmendmentFault):
                raise NotAmendable([undoing])
            request = replace(
                request, set=undoing.set, add=undoing.add, remove=undoing.remove, undo=None
            )
        before = resolved(self.newest.spec)
        listed = {each["name"] for each in before["regions"]}
        joined = [
            name
            for name in ledger.regions
            if name not in listed and not (name in ledger.retired and ledger.retired[name].barred)
        ]
        if faults := terms.faults_of(before, request, joined):
            raise NotAmendable(faults)
        try:
            data = terms.overlay(self.first, [*ledger.amendments, request])
            settings = self._build(self.newest, data)
        except SpecErrors as error:
            raise NotAmendable(
                [terms.AmendmentFault(it.key, it.message, it.hint or "") for it in error.problems]
            ) from None
        after = resolved(settings.spec)
        changes = terms.changes(before, after)
        changes += [terms.removal(name) for name in request.remove if name in joined]
        changes += [
            terms.repacing(name, known.steps_per_second if known else 0.0)
            for name in request.repace
            for known in [ledger.paces.get(name)]
        ]
        # A section that is given anew may change keys that nobody named.
        if faults := [fault for change in changes if (fault := terms.forbidden(change))]:
            raise NotAmendable(faults)
        applied = ledger.applied(settings.sizes)
        record = TermsAmended(
            ledger.terms + 1,
            request.id,
            request.set,
            request.add,
            request.remove,
            request.by,
            request.why,
            reopens=bool(ledger.end) and terms.reopens(after, before, applied=applied),
            digest=settings.spec_digest,
            repace=request.repace,
        )
        ends = not ledger.end and settings.spec.budget.tokens <= applied
        return Amendable(record, tuple(changes), ends)

    def apply(self, ledger: Ledger, record: Record) -> None:
        """Follows a record that the ledger has taken in."""
        if isinstance(record, Snapshot | RunRebuilt):
            del self._all[1:]
        if isinstance(record, Snapshot | RunRebuilt | TermsAmended):
            for number in range(len(self._all), ledger.terms + 1):
                data = terms.overlay(self.first, ledger.amendments[:number])
                self._all.append(self._build(self.newest, data))
