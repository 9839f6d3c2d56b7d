"""How is the run? The document that `GET /v1/status` answers, and the summary at its end."""

from __future__ import annotations

from dataclasses import asdict
from typing import TypedDict

from diloco_cli.core.claims import Allowance
from diloco_cli.core.journal_records import TermsAmended
from diloco_cli.core.ledger import Ledger
from diloco_cli.observe.metrics import (
    bits_per_parameter,
    blocked_share,
    goodput,
    goodputs,
    is_exploded,
    overshoot,
    slow_line,
    staleness,
)
from diloco_cli.observe.status import (
    DivergenceStatus,
    FragmentStatus,
    FragmentSummary,
    FragmentTokens,
    Goodputs,
    HostStatus,
    LossStatus,
    RebuiltStatus,
    RegionStatus,
    RegionSummary,
    RunTokens,
    StartStatus,
    Status,
    Summary,
    TextStatus,
    WireUse,
)
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.server.rounds.divergence import divergence_of
from diloco_cli.server.rounds.leases import Lease
from diloco_cli.server.rounds.membership import in_words
from diloco_cli.wire.messages import Amendment, Heartbeat

MOST_RETIRED_SHOWN = 64
"""Retired regions that a status document shows, the last ones."""
TRAINING = "training"
"""What a trainer says that nothing holds up."""
SILENT = "its worker, its host or its line is down"
"""What the server can tell of a region that it does not hear."""
MOST_AMENDMENTS = 64
"""That a status document shows, the newest; `GET /v1/amendments` lists all."""


def build_status(coordinator: Coordinator, url: str) -> Status:
    """Says everything about the run that a person or a program may want to know now."""
    state = coordinator.state
    ledger, allowance = state.ledger, state.allowance()
    tokens = _tokens(coordinator)
    return Status(
        run=state.store.run,
        name=state.spec.name,
        url=url,
        state=state.phase,
        why=_why(coordinator),
        trouble=state.trouble,
        regions_go_on=bool(state.stopping) and not state.everyone,
        clock=tuple(slot.version for slot in ledger.slots),
        outer_steps=ledger.outer_steps,
        tokens=tokens,
        loss=_losses(coordinator),
        wire=_wire(coordinator),
        goodput=goodput(tokens.applied, tokens.trained),
        goodputs=_goodputs(coordinator),
        seconds=round(state.seconds, 1),
        fragments=tuple(
            FragmentStatus(
                fragment=fragment,
                version=slot.version,
                phase=slot.phase,
                waiting=tuple(sorted(slot.waiting)),
                members=tuple(slot.members),
                why=state.waiting[fragment] if slot.phase == "called" else slot.phase,
            )
            for fragment, slot in enumerate(ledger.slots)
        ),
        regions=tuple(_region(coordinator, name, allowance) for name in _shown(coordinator)),
        terms=ledger.terms,
        amendments=tuple(map(amendment_of, ledger.amendments[-MOST_AMENDMENTS:])),
        parameters=sum(state.settings.sizes),
        quorum=state.sync.quorum,
        texts=_texts(ledger),
        hopeless=state.hopeless,
        **_origin(coordinator),
    )


def amendment_of(record: TermsAmended) -> Amendment:
    """An amendment as people and regions see it."""
    return Amendment(
        number=record.number,
        id=record.id,
        by=record.by,
        why=record.why,
        time=record.time,
        set=dict(record.set),
        add=tuple(dict(region) for region in record.add),
        remove=record.remove,
        repace=record.repace,
        reopens=record.reopens,
    )


def build_summary(coordinator: Coordinator) -> Summary:
    """Sums the run up; what is written to `summary.json` at the end and on every stop."""
    state = coordinator.state
    ledger, totals = state.ledger, state.totals
    tokens = _tokens(coordinator)
    applied = [sum(slot.applied.values()) for slot in ledger.slots]
    fates = totals.fates(finished=bool(ledger.finished))
    return Summary(
        run=state.store.run,
        name=state.spec.name,
        state=state.phase,
        why=ledger.finished or state.stopping,
        regions_go_on=bool(state.stopping) and not state.everyone,
        tokens=tokens,
        balanced=totals.balanced(applied),
        overshoot=_overshoot(coordinator),
        fragments=tuple(
            FragmentSummary(
                fragment=fragment,
                version=slot.version,
                tokens=FragmentTokens(**asdict(fates[fragment])),
            )
            for fragment, slot in enumerate(ledger.slots)
        ),
        loss=_losses(coordinator),
        outer_steps=ledger.outer_steps,
        wire=_wire(coordinator),
        goodput=goodput(tokens.applied, tokens.trained),
        goodputs=_goodputs(coordinator),
        wall_seconds=round(state.seconds, 1),
        regions={
            name: RegionSummary(
                share=totals.share(name),
                applied=round(totals.applied(name), 1),
                refused=ledger.refused.get(name, 0),
                lost=round(totals.lost(name), 1),
            )
            for name in _shown(coordinator)
        },
        spec_digest=state.settings.spec_digest,
        layout_digest=state.settings.layout.digest,
        hopeless=state.hopeless,
        **_origin(coordinator),
    )


def _overshoot(coordinator: Coordinator) -> str:
    state = coordinator.state
    budget = state.spec.budget.tokens
    return overshoot(
        state.ledger.applied(state.settings.sizes),
        budget,
        step=sum(state.settings.step_tokens(region) for region in state.ledger.members),
        away=state.rooms.brought,
        lowered=any(settings.spec.budget.tokens > budget for settings in state.history),
    )


class _OriginKeys(TypedDict, total=False):
    start: StartStatus
    rebuilt: RebuiltStatus


def _origin(coordinator: Coordinator) -> _OriginKeys:
    """What the run began with and goes on from; one that made its own weights has no such keys."""
    ledger, keys = coordinator.state.ledger, _OriginKeys()
    if begun := ledger.begun:
        keys["start"] = StartStatus(
            source=begun.source, weights=begun.weights, momentum=begun.momentum
        )
    if ledger.continues:
        keys["rebuilt"] = RebuiltStatus(
            continues=tuple(ledger.continues),
            lost=round(coordinator.state.totals.lost_with_server(), 1),
            awaited=tuple(
                sorted(name for name in ledger.members if not ledger.regions[name].owner)
            ),
        )
    return keys


def _goodputs(coordinator: Coordinator) -> Goodputs:
    state = coordinator.state
    totals = state.totals
    elapsed = totals.elapsed_at(state.seconds, state.wall())
    if state.ledger.finished:
        elapsed = totals.elapsed  # No region trains after the last round.
    return goodputs(
        [totals.effort(name, elapsed) for name in state.ledger.regions],
        elapsed=elapsed,
        contributions=totals.contributions,
        chances=totals.chances,
    )


def _shown(coordinator: Coordinator) -> list[str]:
    """The regions that the spec lists, other members, and the last that were retired."""
    state = coordinator.state
    listed = [region.name for region in state.spec.regions]
    gone = state.ledger.retired
    last = sorted(gone, key=lambda name: (-gone[name].record, name))[:MOST_RETIRED_SHOWN]
    return list(dict.fromkeys([*listed, *sorted(state.ledger.members), *last]))


def _tokens(coordinator: Coordinator) -> RunTokens:
    state = coordinator.state
    sizes = state.settings.sizes
    fragments = state.totals.fates(finished=bool(state.ledger.finished))
    means = {
        fate: sum(
            size * getattr(tokens, fate) for size, tokens in zip(sizes, fragments, strict=True)
        )
        / sum(sizes)
        for fate in FragmentTokens.model_fields
    }
    budget, given_up = state.spec.budget.tokens, state.totals.given_up()
    tables = state.ledger.orders.values()
    return RunTokens(
        budget=budget,
        **means,
        given_up=given_up,
        repeated=float(sum(table.repeated * table.order.sequence for table in tables)),
        unread=float(sum(table.unread * table.order.sequence for table in tables)),
    )


def _texts(ledger: Ledger) -> tuple[TextStatus, ...]:
    readers: dict[str, list[str]] = {}
    for name in sorted(ledger.members):
        readers.setdefault(ledger.regions[name].order, []).append(name)
    return tuple(
        TextStatus(
            order=order,
            tokens=table.order.tokens,
            lanes=table.count,
            regions=tuple(readers[order]),
            settings=table.order.settings,
        )
        for order, table in ledger.orders.items()
        if order in readers
    )


def _losses(coordinator: Coordinator) -> LossStatus:
    state = coordinator.state
    measured = [(float(each.loss), sum(each.versions)) for each in state.ledger.evaluations]
    last, last_at = measured[-1] if measured else (None, None)
    first, first_at = measured[0] if measured else (None, None)
    best, best_at = min(measured, default=(None, None))
    averaged = state.ledger.ema_evaluations[-1] if state.ledger.ema_evaluations else None
    heartbeats = [lease.heartbeat for lease in state.leases.all.values() if lease.heartbeat]
    train = [heartbeat.loss for heartbeat in heartbeats if heartbeat.loss is not None]
    return LossStatus(
        heldout=last,
        train=sum(train) / len(train) if train else None,
        first=first,
        best=best,
        heldout_at=last_at,
        first_at=first_at,
        best_at=best_at,
        ema=float(averaged.loss) if averaged else None,
        ema_at=sum(averaged.versions) if averaged else None,
    )


def _wire(coordinator: Coordinator) -> WireUse:
    ledger, totals = coordinator.state.ledger, coordinator.state.totals
    return WireUse(
        bits_per_parameter_up=bits_per_parameter(ledger.bytes_up, ledger.values_up),
        bits_per_parameter_down=bits_per_parameter(totals.delta_bytes, totals.delta_values),
        bytes_up=ledger.bytes_up,
        bytes_down=totals.bytes_down,
    )


def _why(coordinator: Coordinator) -> str:
    state = coordinator.state
    if state.ledger.finished or state.stopping:
        return state.ledger.finished or state.stopping
    if state.ledger.end:
        return f"{state.ledger.end}; what regions still hold is being merged"
    live = len(state.live())
    if live < state.sync.quorum:
        excluded = sorted(state.ledger.quarantined())
        quarantine = f"; in quarantine: {', '.join(excluded)}" if excluded else ""
        return f"{live} of {state.sync.quorum} regions needed are here{quarantine}"
    return ""


def _region(coordinator: Coordinator, name: str, allowance: Allowance) -> RegionStatus:
    state = coordinator.state
    ledger, totals = state.ledger, state.totals
    lease = state.leases.all.get(name)
    heartbeat = lease.heartbeat if lease else None
    alive = state.leases.lease_left(name, now=state.clock()) > 0
    pace = ledger.paces.get(name)
    merged_at = totals.merged_at.get(name)
    since = None if merged_at is None else round(max(0.0, state.wall() - merged_at), 1)
    behind = blocked = divergence = None
    if heartbeat:
        published = [slot.version for slot in ledger.slots]
        behind = staleness(published, [fragment.version for fragment in heartbeat.fragments])
        blocked = blocked_share(heartbeat.blocked, heartbeat.worked)
        if found := divergence_of(state, name):
            divergence = DivergenceStatus(**found.model_dump())
    return RegionStatus(
        name=name,
        alive=alive,
        training=bool(alive and heartbeat and heartbeat.training),
        contributing=alive and not divergence and _contributing(coordinator, name),
        left=bool(heartbeat and heartbeat.stopping and not ledger.finished),
        done=_done(coordinator, name),
        step=heartbeat.step if heartbeat else None,
        tokens_per_second=heartbeat.tokens_per_second if heartbeat and alive else None,
        loss=heartbeat.loss if heartbeat else None,
        staleness=behind,
        share=totals.share(name),
        last_merged_seconds=since,
        restarts=heartbeat.restarts if heartbeat else None,
        blocked=blocked,
        lost=round(totals.lost(name), 1),
        refused=ledger.refused.get(name, 0),
        mended=heartbeat.mended if heartbeat else 0,
        quarantined=name in ledger.quarantined(),
        pace=state.settings.paces.get(name) or (pace and pace.steps_per_second) or None,
        overclaim=allowance.overclaim(name),
        unbalanced=totals.account(name).unbalanced() if name in ledger.regions else False,
        until=state.rooms.outstanding(state, name) if name in ledger.regions else None,
        why=_region_why(coordinator, name, lease),
        member=name in ledger.members,
        listed=any(region.name == name for region in state.spec.regions),
        retired=_retired(coordinator, name),
        terms=heartbeat.terms if heartbeat else None,
        lanes=_lanes(ledger, name),
        devices=heartbeat.devices if heartbeat else None,
        tflops=heartbeat.tflops if heartbeat and alive else None,
        mfu=heartbeat.mfu if heartbeat and alive else None,
        device_memory=heartbeat.device_memory if heartbeat and alive else None,
        hosts=_hosts(heartbeat) if heartbeat and alive else (),
        link_up=heartbeat.link_up if heartbeat and alive else None,
        link_down=heartbeat.link_down if heartbeat and alive else None,
        silent_seconds=round(max(0.0, state.clock() - lease.seen), 1) if lease else None,
        divergence=divergence,
        exploded=alive and _exploded(coordinator, name, heartbeat),
    )


def _exploded(coordinator: Coordinator, name: str, heartbeat: Heartbeat | None) -> bool:
    """Held against the loss of the first weights; another program may mean another loss by it."""
    state = coordinator.state
    ours = state.spec.region(name).trainer is None
    first = next((float(each.loss) for each in state.ledger.evaluations), None)
    trains = bool(heartbeat and heartbeat.training)  # Otherwise it is an earlier trainer's loss.
    return bool(trains and heartbeat and ours and is_exploded(heartbeat.loss, first))


def _hosts(heartbeat: Heartbeat) -> tuple[HostStatus, ...]:
    return tuple(
        HostStatus(
            host=each.host,
            work_seconds=round(each.work_seconds, 6),
            step_seconds=round(each.step_seconds, 6),
        )
        for each in heartbeat.hosts
    )


def _lanes(ledger: Ledger, name: str) -> int | None:
    table = ledger.orders.get(ledger.regions[name].order) if name in ledger.regions else None
    return len(table.owned(name)) if table else None


def _retired(coordinator: Coordinator, name: str) -> str:
    """Says why a name is no member any more; one that was added again is expected."""
    state = coordinator.state
    gone = state.ledger.retired.get(name)
    added = any(region.name == name for region in state.spec.regions) and gone and gone.by
    return "" if gone is None or added else in_words(gone)


def _contributing(coordinator: Coordinator, name: str) -> bool:
    """Says whether the region is in some fragment's newest version, or in its next round."""
    return any(
        name in slot.members or name in slot.waiting or name in slot.closing
        for slot in coordinator.state.ledger.slots
    )


def _done(coordinator: Coordinator, name: str) -> bool:
    """Says whether the run is finished and nothing more is to come from the region."""
    ledger, lease = coordinator.state.ledger, coordinator.state.leases.all.get(name)
    heartbeat = lease.heartbeat if lease else None
    heard = heartbeat is None or heartbeat.stopping
    return bool(ledger.finished) and name in ledger.regions and heard


def _region_why(coordinator: Coordinator, name: str, lease: Lease | None) -> str:
    state = coordinator.state
    if why := _retired(coordinator, name):
        return why
    credential = state.credential_trouble(name)
    if lease is None:
        return credential or f"not joined yet (`diloco work … --region {name}`)"
    now, heartbeat = state.clock(), lease.heartbeat
    if _done(coordinator, name):
        return ""
    if heartbeat and heartbeat.stopping:
        return heartbeat.why
    if now >= lease.until:
        silent = f"silent for {now - lease.seen:.0f} s"
        return f"{silent}: {credential or SILENT}"
    if heartbeat is None:
        return "joined, no report yet"
    if (conduct := state.ledger.conduct.get(name)) and conduct.quarantined:
        return conduct.why
    told = "" if heartbeat.why == TRAINING else heartbeat.why
    if told and not heartbeat.training:
        return told
    if found := divergence_of(state, name):
        return found.in_words()
    owed = [str(f) for f in state.ledger.calls() if name not in state.ledger.slots[f].waiting]
    asked = f"asked for fragment {', '.join(owed)}" if owed else ""
    slow = _slow_line(coordinator, heartbeat)
    if slow or told:
        return "; ".join(filter(None, (slow, told, asked if slow else "")))
    return asked or (TRAINING if heartbeat.training else "not training")


def _slow_line(coordinator: Coordinator, heartbeat: Heartbeat) -> str:
    state, wire = coordinator.state, _wire(coordinator)
    largest = max(state.settings.sizes)

    def frame(bits: float | None) -> float | None:
        return None if bits is None else largest * bits / 8

    return slow_line(
        up=(frame(wire.bits_per_parameter_up), heartbeat.link_up),
        down=(frame(wire.bits_per_parameter_down), heartbeat.link_down),
        fragments=len(state.settings.sizes),
        cycle_seconds=state.sync.every * (heartbeat.step_seconds or 0.0),
    )
