"""What becomes of an amendment that somebody asks for?

    request ─▶ judge (core) ─▶ journal ─▶ in force ─▶ flush ─▶ reply

Between the judgement and the record nothing else runs, so no two amendments are made for the
same terms.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from diloco_cli.core.journal_records import TermsAmended
from diloco_cli.core.terms import Made, Overtaken, touched
from diloco_cli.server.refusals import HttpRefusal
from diloco_cli.server.rounds.membership import let_go
from diloco_cli.server.rounds.state import State
from diloco_cli.server.terms import NotAmendable, request_of
from diloco_cli.system.failpoints import reach
from diloco_cli.wire.messages import Amend, Amended


async def amend(state: State, request: Amend, *, by: str) -> tuple[Amended, bool]:
    """Changes settings of the run; says what became of it, and whether it is new."""
    wanted = request_of(request, by=by)
    try:
        judged = state.history.judge(state.ledger, wanted)
    except NotAmendable as error:
        raise _not_amendable(error) from None
    if isinstance(judged, Overtaken):
        raise _overtaken(judged)
    if isinstance(judged, Made):
        answer = Amended(terms=judged.record.number, recorded=True)
        return await state.answer_when_durable(lambda: answer), False
    answer = judged.answer(state.ledger.terms)
    if request.dry_run or not judged.changes:
        return answer, False
    if judged.ends and not request.sure:
        raise HttpRefusal(
            "unconfirmed",
            f"{state.ledger.applied(state.settings.sizes):.0f} tokens are merged, so the "
            "run would end with this budget.",
            "Say --yes to end it so.",
        )
    record = judged.record
    if record.repace:
        record = replace(record, at=state.allowance_clock)
    _amended(state, record)
    return await state.answer_when_durable(
        lambda: answer.model_copy(update={"terms": record.number})
    ), True


def _amended(state: State, record: TermsAmended) -> None:
    state.record(record)
    state.note(
        "amended",
        number=record.number,
        by=record.by,
        why=record.why,
        set=dict(record.set),
        add=[region["name"] for region in record.add],
        remove=list(record.remove),
        repace=list(record.repace),
        reopens=record.reopens,
    )
    for name in record.remove:
        let_go(state, name, record.why, record.by)
    state.leases.seconds = state.spec.server.lease
    if record.reopens:
        state.table.ended_at = state.finished_at = None
    reach("amendment.recorded")
    state.wake.set()


def _not_amendable(error: NotAmendable) -> HttpRefusal:
    first, *others = error.faults
    more = "".join(f"\n{fault.key}: {fault.message}" for fault in others)
    return HttpRefusal(
        "not-amendable",
        f"{first.key}: {first.message}{more}",
        first.hint or None,
        faults=[asdict(fault) for fault in error.faults],
    )


def _overtaken(judged: Overtaken) -> HttpRefusal:
    keys = [key for record in judged.since for key in touched(record)]
    return HttpRefusal(
        "terms-changed",
        f"The run is at terms {judged.newest} by now; since then these keys changed: "
        f"{', '.join(dict.fromkeys(keys)) or 'none'}.",
        "Look at `diloco status`, and ask again if the change is still wanted.",
        terms=judged.newest,
    )
