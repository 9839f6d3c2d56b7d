"""How is the run? The document that `GET /v1/status` answers, and the summary at its end."""

from __future__ import annotations

from dataclasses import asdict

from diloco_cli.observe.metrics import (
    bits_per_parameter,
    blocked_share,
    goodput,
    goodputs,
    staleness,
)
from diloco_cli.observe.status import (
    FragmentStatus,
    FragmentSummary,
    FragmentTokens,
    Goodputs,
    LossStatus,
    RegionStatus,
    RegionSummary,
    RunTokens,
    Status,
    Summary,
    WireUse,
)
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.server.rounds.leases import Lease


def build_status(coordinator: Coordinator, url: str) -> Status:
    """Says everything about the run that a person or a program may want to know now."""
    state = coordinator.state
    ledger = state.ledger
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
        regions=tuple(_region(coordinator, region.name) for region in state.spec.regions),
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
            region.name: RegionSummary(
                share=totals.share(region.name),
                applied=round(totals.applied(region.name), 1),
                refused=ledger.refused.get(region.name, 0),
                lost=round(totals.lost(region.name), 1),
            )
            for region in state.spec.regions
        },
        spec_digest=state.settings.spec_digest,
        layout_digest=state.settings.layout.digest,
    )


def _goodputs(coordinator: Coordinator) -> Goodputs:
    state = coordinator.state
    totals = state.totals
    elapsed = totals.elapsed_at(state.seconds, state.wall())
    if state.ledger.finished:
        elapsed = totals.elapsed  # No region trains after the last round.
    return goodputs(
        [totals.effort(region.name) for region in state.spec.regions],
        elapsed=elapsed,
        rounds=totals.rounds,
        contributions=totals.contributions,
    )


def _tokens(coordinator: Coordinator) -> RunTokens:
    state = coordinator.state
    sizes = state.settings.sizes
    fragments = state.totals.fates(finished=bool(state.ledger.finished))
    means = {
        fate: sum(size * getattr(one, fate) for size, one in zip(sizes, fragments, strict=True))
        / sum(sizes)
        for fate in FragmentTokens.model_fields
    }
    return RunTokens(budget=state.spec.budget.tokens, **means)


def _losses(coordinator: Coordinator) -> LossStatus:
    state = coordinator.state
    heldout = [float(evaluation.loss) for evaluation in state.ledger.evaluations]
    heartbeats = [lease.heartbeat for lease in state.leases.all.values() if lease.heartbeat]
    train = [heartbeat.loss for heartbeat in heartbeats if heartbeat.loss is not None]
    return LossStatus(
        heldout=heldout[-1] if heldout else None,
        train=sum(train) / len(train) if train else None,
        first=heldout[0] if heldout else None,
        best=min(heldout, default=None),
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


def _region(coordinator: Coordinator, name: str) -> RegionStatus:
    state = coordinator.state
    ledger, totals = state.ledger, state.totals
    lease = state.leases.all.get(name)
    heartbeat = lease.heartbeat if lease else None
    alive = state.leases.lease_left(name, now=state.clock()) > 0
    merged_at = totals.merged_at.get(name)
    since = None if merged_at is None else round(max(0.0, state.wall() - merged_at), 1)
    behind = blocked = None
    if heartbeat:
        published = [slot.version for slot in ledger.slots]
        behind = staleness(published, [fragment.version for fragment in heartbeat.fragments])
        blocked = blocked_share(heartbeat.blocked, heartbeat.worked)
    return RegionStatus(
        name=name,
        alive=alive,
        training=bool(alive and heartbeat and heartbeat.training),
        contributing=alive and _contributing(coordinator, name),
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
        why=_region_why(coordinator, name, lease),
    )


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
    if lease is None:
        return f"not joined yet (`diloco work … --region {name}`)"
    now, heartbeat = state.clock(), lease.heartbeat
    if _done(coordinator, name):
        return ""
    if heartbeat and heartbeat.stopping:
        return heartbeat.why
    if now >= lease.seen + state.spec.server.lease:
        return f"silent for {now - lease.seen:.0f} s"
    if heartbeat is None:
        return "joined, no report yet"
    if (conduct := state.ledger.conduct.get(name)) and conduct.quarantined:
        return conduct.why
    if heartbeat.why:
        return heartbeat.why
    owed = [str(f) for f in state.ledger.calls() if name not in state.ledger.slots[f].waiting]
    if owed:
        return f"asked for fragment {', '.join(owed)}"
    return "training" if heartbeat.training else "not training"
