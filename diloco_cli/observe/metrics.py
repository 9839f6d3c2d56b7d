"""What it adds up to: figures from events and status documents.

Everything here is a pure function of plain data: of the events of a run, or of the
status document that `GET /v1/status` answers and `diloco status --format json` prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_cli.observe.events import Event

Status = Mapping[str, Any]

GOODPUTS = ("time", "tokens", "participation")
FATES = ("applied", "pending", "refused", "discarded")


def bits_per_parameter(bytes_moved: float, parameters_moved: float) -> float | None:
    """Says how many bits on the wire one parameter cost, headers included; None before any did."""
    return 8 * bytes_moved / parameters_moved if parameters_moved else None


def goodput(applied: float, trained: float) -> float | None:
    """Says which share of the tokens trained has reached the global weights.

    Tokens on their way count as trained and not yet as applied, so a healthy run shows
    a little less than 1 until it is drained. Time lost to restarts is not in it: a
    region that stands still trains no tokens.
    """
    return applied / trained if trained else None


@dataclass(frozen=True, slots=True)
class Effort:
    """What one region has done so far, or within a window of time."""

    worked: float = 0.0
    """Seconds spent in inner steps, those whose work was lost included."""
    trained: float = 0.0
    """Tokens of all inner steps, lost ones included."""
    kept: float = 0.0
    """Of these, what is applied or still can be: not lost, not refused, not discarded."""
    applied: float = 0.0
    """Of these, what is in published weights."""
    pace: float = 0.0
    """Tokens a second when nothing is wrong; 0 if it is not known yet."""


def goodputs(
    efforts: Sequence[Effort], *, elapsed: float, rounds: int, contributions: int
) -> dict[str, float | None]:
    """Says the three goodputs of a run: of its time, of its tokens, of its rounds.

    `contributions` is the sum over `rounds` of how many regions each one merged.
    """
    return {
        "time": time_goodput(efforts, elapsed),
        "tokens": token_goodput(efforts, elapsed),
        "participation": participation(rounds, contributions, len(efforts)),
    }


def time_goodput(efforts: Sequence[Effort], elapsed: float) -> float | None:
    """Says which share of the regions' time went into inner steps whose work was kept."""
    if not efforts or elapsed <= 0:
        return None
    kept = [one.worked * one.kept / one.trained for one in efforts if one.trained]
    return sum(kept) / (len(efforts) * elapsed)


def token_goodput(efforts: Sequence[Effort], elapsed: float) -> float | None:
    """Says which share of the tokens that a run without faults trains was applied.

    A region whose pace nobody has seen yet counts as fast as the others on average.
    """
    paces = [one.pace for one in efforts if one.pace > 0]
    if not paces or elapsed <= 0:
        return None
    fault_free = sum(paces) / len(paces) * len(efforts)
    return sum(one.applied for one in efforts) / (fault_free * elapsed)


def participation(rounds: int, contributions: int, regions: int) -> float | None:
    """Says which share of the regions a round merged, on average."""
    return contributions / (rounds * regions) if rounds and regions else None


def blocked_share(blocked: float, worked: float) -> float | None:
    """Says which share of a trainer's time the exchange held up; None before its first steps.

    `worked` are its seconds in steps, `blocked` those between steps that went into mail, new
    versions and waiting for them.
    """
    return round(blocked / (blocked + worked), 5) if worked > 0 else None


def staleness(published: Sequence[int], adopted: Sequence[int]) -> int:
    """Says how many versions the furthest fragment of a region is behind."""
    return max((max(0, new - old) for new, old in zip(published, adopted, strict=True)), default=0)


def seconds_left(points: Sequence[tuple[float, float]], budget: float) -> float | None:
    """Estimates the time to the budget from (time, applied tokens); None if there is no telling."""
    if len(points) < 2:
        return None
    (began, first), (now, applied) = points[0], points[-1]
    if applied <= first or now <= began or applied >= budget:
        return None
    return (budget - applied) * (now - began) / (applied - first)


def warnings(status: Status) -> list[str]:
    """Names what a glance at the figures would miss, one sentence each."""
    trouble = [str(status["trouble"])] if status.get("trouble") else []
    return trouble + _loneliness(status)


def _loneliness(status: Status) -> list[str]:
    regions = status.get("regions") or []
    if status.get("state") != "training" or len(regions) < 2 or not status.get("outer_steps"):
        return []
    tokens = status.get("tokens") or {}
    if (tokens.get("applied") or 0) >= (tokens.get("budget") or float("inf")):
        return []  # The rest is draining; whoever is done has nothing left to give.
    active = [str(region["name"]) for region in regions if region.get("contributing")]
    others = [str(region["name"]) for region in regions if not region.get("contributing")]
    if any(region.get("alive") and not region.get("step") for region in regions):
        return []  # Somebody is still starting; that is not yet worth an alarm.
    if len(active) == 1:
        return [f"{active[0]} is training alone: nothing arrives from {', '.join(others)}"]
    if not active:
        return ["no region's work reaches the global weights at the moment"]
    return []


def last_known(events: Iterable[Event]) -> dict[str, Any]:
    """Folds the run log into what can still be said when the server does not answer.

    The oldest events may not be kept any more; sums and firsts are then those of the rest.
    """
    known: dict[str, Any] = {
        "state": "unknown",
        "outer_steps": 0,
        "tokens": {},
        "loss": {},
        "wire": {},
        "regions": {},
        "away": {},
    }
    served, newest = 0.0, dict[int, int]()
    for event in events:
        fields = event.fields
        known["time"] = event.time
        _place(known, event)
        if event.kind == "server-started":
            known["url"] = fields.get("url")
            # What a crash kept from the log is in the journal, which the server has read.
            known["outer_steps"] = max(known["outer_steps"], fields.get("recovered") or 0)
            served = known.get("wall_seconds", 0.0)
        if event.process == "server":
            known["wall_seconds"] = round(served + event.seconds, 1)
        if event.kind == "published" and "version" in fields:
            newest[fields["fragment"]] = fields["version"]
        _count(known, event)
    known["outer_steps"] = max(known["outer_steps"], sum(newest.values()))
    return known


_STATES = {
    "server-started": "training",
    "run-ended": "draining",
    "run-finished": "finished",
    "run-stopped": "stopped",
}
_PRESENCE = {"joined": "joined", "revived": "joined", "lapsed": "lapsed", "left": "left"}


def _place(known: dict[str, Any], event: Event) -> None:
    """Says after an event what the run does, and who is there."""
    kind, region, regions = event.kind, event.fields.get("region"), known["regions"]
    # Whose first events are not kept any more is known by the later ones.
    if kind in _STATES:
        known["state"] = _STATES[kind]
    elif known["state"] == "unknown" and event.process == "server":
        known["state"] = "training"
    if kind == "accepted" and region:
        regions.setdefault(region, "joined")
    if kind in _PRESENCE and region and not (regions.get(region) == "left" and kind == "lapsed"):
        regions[region] = _PRESENCE[kind]
    if kind == "link-lost":
        known["away"].setdefault(region, event.time)
    elif kind in ("link-back", "trainer-started"):  # None starts without a server.
        known["away"].pop(region, None)


def _count(known: dict[str, Any], event: Event) -> None:
    """Adds an event to the figures that only grow."""
    fields, wire = event.fields, known["wire"]
    if event.kind == "published":
        known["outer_steps"] += 1
        if fields.get("tokens") is not None:
            known["tokens"]["applied"] = fields["tokens"]
    if event.kind == "accepted":
        wire["bytes_up"] = wire.get("bytes_up", 0) + (fields.get("bytes") or 0)
    if event.kind == "evaluated" and (loss := fields.get("loss")) is not None:
        first, best = known["loss"].get("first", loss), known["loss"].get("best", loss)
        known["loss"] = {"heldout": loss, "first": first, "best": min(best, loss)}


_RUN = (
    # name, where in the document, help
    ("outer_steps", ("outer_steps",), "Versions published, all fragments together"),
    ("tokens_budget", ("tokens", "budget"), "Merged tokens at which the run ends"),
    ("loss_heldout", ("loss", "heldout"), "Held-out loss of the global weights, nats per token"),
    ("loss_train", ("loss", "train"), "Training loss, averaged over regions"),
    ("goodput_ratio", ("goodput",), "Tokens applied over tokens trained"),
    ("goodput_time_ratio", ("goodputs", "time"), "Share of the time in steps that were kept"),
    ("goodput_tokens_ratio", ("goodputs", "tokens"), "Tokens applied over fault-free tokens"),
    ("participation_ratio", ("goodputs", "participation"), "Mean share of regions in a round"),
)

_WIRE = (
    ("bits_per_parameter", "bits_per_parameter_{}", "Bits on the wire for one parameter"),
    ("wire_bytes", "bytes_{}", "Bytes of frames moved"),
)

_REGION = (
    ("region_alive", "alive", "1 while the region's lease runs"),
    ("region_training", "training", "1 while the region makes inner steps"),
    ("region_contributing", "contributing", "1 while the region's work reaches the global weights"),
    ("region_step", "step", "Inner steps made"),
    ("region_tokens_per_second", "tokens_per_second", "Training speed"),
    ("region_loss", "loss", "Training loss"),
    ("region_blocked_ratio", "blocked", "Share of the training time that the exchange held up"),
    ("region_staleness", "staleness", "Versions the furthest fragment is behind"),
    ("region_share_ratio", "share", "Share of the merged weight"),
    ("region_last_merged_seconds", "last_merged_seconds", "Since the region was last merged"),
    ("region_restarts", "restarts", "Trainer restarts"),
    ("region_tokens_lost", "lost", "Tokens trained and lost with a trainer that died"),
    ("region_refused", "refused", "Contributions refused"),
    ("region_quarantined", "quarantined", "1 while the region's work is kept out"),
    ("region_mended", "mended", "Copies of published weights replaced for having other bits"),
)

STATES = ("waiting", "training", "finished", "stopped")

METRICS = (
    *(f"diloco_{name}" for name, _, _ in _RUN + _WIRE + _REGION),
    "diloco_state",
    "diloco_tokens",
)
"""Every name `/metrics` may show."""


def prometheus_text(status: Status) -> str:
    """Renders a status document in Prometheus' text format; what is unknown is left out."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.registry import Collector

    class Once(Collector):
        def collect(self) -> Iterator[Any]:
            return _families(status)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Once())
    return generate_latest(registry).decode()


def _families(status: Status) -> Iterator[Any]:
    yield _family("state", "1 for the state the run is in", ("state",), _states(status))
    fates = [((fate,), _at(status, "tokens", fate)) for fate in (*FATES, "trained")]
    yield _family("tokens", "Tokens by what became of them", ("fate",), fates)
    for name, path, meaning in _RUN:
        yield _family(name, meaning, (), [((), _at(status, *path))])
    for name, key, meaning in _WIRE:
        ways = [((way,), _at(status, "wire", key.format(way))) for way in ("up", "down")]
        yield _family(name, meaning, ("direction",), ways)
    regions = status.get("regions") or []
    for name, key, meaning in _REGION:
        rows = [((str(region["name"]),), _at(region, key)) for region in regions]
        yield _family(name, meaning, ("region",), rows)


def _states(status: Status) -> list[tuple[tuple[str, ...], float]]:
    return [((state,), float(status.get("state") == state)) for state in STATES]


def _family(
    name: str,
    meaning: str,
    labels: tuple[str, ...],
    rows: Iterable[tuple[tuple[str, ...], float | None]],
) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    # Gauges throughout: the server counts durably, so a restart does not start these at zero,
    # but a replaced folder may; a counter would promise more than we know.
    family = GaugeMetricFamily(f"diloco_{name}", meaning, labels=labels)
    for values, number in rows:
        if number is not None:
            family.add_metric(values, number)
    return family


def _at(document: Any, *path: str) -> float | None:
    for key in path:
        document = document.get(key) if isinstance(document, Mapping) else None
    return float(document) if isinstance(document, (int, float)) else None
