"""How is the run? The document that `GET /v1/status` answers, and the summary at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from diloco_cli.observe.metrics import (
    bits_per_parameter,
    blocked_share,
    goodput,
    goodputs,
    staleness,
)
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.server.rounds.leases import Lease
from diloco_cli.server.rounds.token_totals import TokenFates


def status(coordinator: Coordinator, url: str) -> dict[str, Any]:
    """Says everything about the run that a person or a program may want to know now."""
    state = coordinator.state
    ledger = state.ledger
    tokens = _tokens(coordinator)
    return {
        "run": state.store.run,
        "name": state.spec.name,
        "url": url,
        "state": state.phase,
        "why": _why(coordinator),
        "trouble": state.trouble,
        "regions_go_on": bool(state.stopping) and not state.everyone,
        "clock": [slot.version for slot in ledger.slots],
        "outer_steps": ledger.outer_steps,
        "tokens": tokens,
        "loss": _losses(coordinator),
        "wire": _wire(coordinator),
        "goodput": goodput(tokens["applied"], tokens["trained"]),
        "goodputs": _goodputs(coordinator),
        "seconds": round(state.seconds, 1),
        "fragments": [
            {
                "fragment": fragment,
                "version": slot.version,
                "phase": slot.phase,
                "waiting": sorted(slot.waiting),
                "members": list(slot.members),
                "why": state.waiting[fragment] if slot.phase == "called" else slot.phase,
            }
            for fragment, slot in enumerate(ledger.slots)
        ],
        "regions": [_region(coordinator, region.name) for region in state.spec.regions],
    }


def summary(coordinator: Coordinator) -> dict[str, Any]:
    """Sums the run up; what is written to `summary.json` at the end and on every stop."""
    state = coordinator.state
    ledger, tally = state.ledger, state.tally
    tokens = _tokens(coordinator)
    applied = [sum(slot.applied.values()) for slot in ledger.slots]
    books = tally.books(finished=bool(ledger.finished))
    return {
        "run": state.store.run,
        "name": state.spec.name,
        "state": state.phase,
        "why": ledger.finished or state.stopping,
        "regions_go_on": bool(state.stopping) and not state.everyone,
        "tokens": tokens,
        "balanced": tally.balanced(applied),
        "fragments": [
            {"fragment": fragment, "version": slot.version, "tokens": asdict(books[fragment])}
            for fragment, slot in enumerate(ledger.slots)
        ],
        "loss": _losses(coordinator),
        "outer_steps": ledger.outer_steps,
        "wire": _wire(coordinator),
        "goodput": goodput(tokens["applied"], tokens["trained"]),
        "goodputs": _goodputs(coordinator),
        "wall_seconds": round(state.seconds, 1),
        "regions": {
            region.name: {
                "share": tally.share(region.name),
                "applied": round(tally.applied(region.name), 1),
                "refused": ledger.refused.get(region.name, 0),
                "lost": round(tally.lost(region.name), 1),
            }
            for region in state.spec.regions
        },
        "spec_digest": state.recipe.spec_digest,
        "layout_digest": state.recipe.layout.digest,
    }


def _goodputs(coordinator: Coordinator) -> dict[str, float | None]:
    state = coordinator.state
    tally = state.tally
    elapsed = tally.elapsed_at(state.seconds, state.wall())
    if state.ledger.finished:
        elapsed = tally.elapsed  # Nobody trains after the last round.
    return goodputs(
        [tally.effort(region.name) for region in state.spec.regions],
        elapsed=elapsed,
        rounds=tally.rounds,
        contributions=tally.contributions,
    )


def _tokens(coordinator: Coordinator) -> dict[str, float]:
    """Tokens of the run by fate: each fragment's, averaged with the fragments' sizes."""
    state = coordinator.state
    sizes = state.recipe.sizes
    books = state.tally.books(finished=bool(state.ledger.finished))
    averaged = {fate: _mean(books, fate, sizes) for fate in asdict(TokenFates())}
    return {"budget": state.spec.budget.tokens, **averaged}


def _mean(books: Sequence[TokenFates], fate: str, sizes: Sequence[int]) -> float:
    weighted = sum(size * getattr(each, fate) for size, each in zip(sizes, books, strict=True))
    return weighted / sum(sizes)


def _losses(coordinator: Coordinator) -> dict[str, float | None]:
    state = coordinator.state
    heldout = [float(each.loss) for each in state.ledger.evaluations]
    said = [presence.said for presence in state.leases.all.values() if presence.said]
    train = [each.loss for each in said if each.loss is not None]
    return {
        "heldout": heldout[-1] if heldout else None,
        "train": sum(train) / len(train) if train else None,
        "first": heldout[0] if heldout else None,
        "best": min(heldout, default=None),
    }


def _wire(coordinator: Coordinator) -> dict[str, float | None]:
    ledger, tally = coordinator.state.ledger, coordinator.state.tally
    return {
        "bits_per_parameter_up": bits_per_parameter(ledger.bytes_up, ledger.values_up),
        "bits_per_parameter_down": bits_per_parameter(tally.delta_bytes, tally.delta_values),
        "bytes_up": ledger.bytes_up,
        "bytes_down": tally.bytes_down,
    }


def _why(coordinator: Coordinator) -> str:
    state = coordinator.state
    if state.ledger.finished or state.stopping:
        return state.ledger.finished or state.stopping
    if state.ledger.end:
        return f"{state.ledger.end}; what regions still hold is being merged"
    live = len(state.live())
    if live < state.sync.quorum:
        kept_out = sorted(state.ledger.quarantined())
        besides = f"; in quarantine: {', '.join(kept_out)}" if kept_out else ""
        return f"{live} of {state.sync.quorum} regions needed are here{besides}"
    return ""


def _region(coordinator: Coordinator, name: str) -> dict[str, Any]:
    state = coordinator.state
    ledger, tally = state.ledger, state.tally
    presence = state.leases.all.get(name)
    said = presence.said if presence else None
    alive = state.leases.lease_left(name, now=state.clock()) > 0
    merged_at = tally.merged_at.get(name)
    published = [slot.version for slot in ledger.slots]
    return {
        "name": name,
        "alive": alive,
        "training": bool(alive and said and said.training),
        "contributing": alive and _contributing(coordinator, name),
        "left": bool(said and said.stopping and not ledger.finished),
        "done": _done(coordinator, name),
        "step": said.step if said else None,
        "tokens_per_second": said.tokens_per_second if said and alive else None,
        "loss": said.loss if said else None,
        "staleness": staleness(published, [each.version for each in said.fragments])
        if said
        else None,
        "share": tally.share(name),
        "last_merged_seconds": None
        if merged_at is None
        else round(max(0.0, state.wall() - merged_at), 1),
        "restarts": said.restarts if said else None,
        "blocked": blocked_share(said.blocked, said.worked) if said else None,
        "lost": round(tally.lost(name), 1),
        "refused": ledger.refused.get(name, 0),
        "mended": said.mended if said else 0,
        "quarantined": name in ledger.quarantined(),
        "why": _region_why(coordinator, name, presence),
    }


def _contributing(coordinator: Coordinator, name: str) -> bool:
    """Says whether the region is in some fragment's newest version, or in its next round."""
    return any(
        name in slot.members or name in slot.waiting or name in slot.closing
        for slot in coordinator.state.ledger.slots
    )


def _done(coordinator: Coordinator, name: str) -> bool:
    """Says whether the run is finished and nothing more is to come from the region."""
    ledger, presence = coordinator.state.ledger, coordinator.state.leases.all.get(name)
    said = presence.said if presence else None
    return bool(ledger.finished) and name in ledger.regions and (said is None or said.stopping)


def _region_why(coordinator: Coordinator, name: str, presence: Lease | None) -> str:
    state = coordinator.state
    if presence is None:
        return f"has not joined yet; start it with `diloco work … --region {name}`"
    now, said = state.clock(), presence.said
    if _done(coordinator, name):
        return ""
    if said and said.stopping:
        return said.why
    if now >= presence.seen + state.spec.server.lease:
        return f"silent for {now - presence.seen:.0f} s"
    if said is None:
        return "joined, no report yet"
    if (conduct := state.ledger.conduct.get(name)) and conduct.quarantined:
        return conduct.why
    if said.why:
        return said.why
    owed = [str(f) for f in state.ledger.calls() if name not in state.ledger.slots[f].waiting]
    if owed:
        return f"asked for fragment {', '.join(owed)}"
    return "training" if said.training else "not training"
