"""The status document in Prometheus' text format, as `GET /metrics` answers it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from diloco_cli.observe.metrics import standing, warnings
from diloco_cli.observe.status import STATES, Status

FATES = ("applied", "uncounted", "pending", "refused", "discarded", "trained")

_RUN = (
    # name, where in the document, help
    ("outer_steps", "outer_steps", "Versions published, all fragments together"),
    ("tokens_budget", "tokens.budget", "Merged tokens at which the run ends"),
    ("loss_heldout", "loss.heldout", "Held-out loss of the global weights, nats per token"),
    (
        "loss_heldout_outer_steps",
        "loss.heldout_at",
        "Outer steps of the weights that were measured",
    ),
    ("loss_heldout_ema", "loss.ema", "Held-out loss of the average of the published weights"),
    ("loss_heldout_ema_outer_steps", "loss.ema_at", "Outer steps of the average that was measured"),
    ("loss_train", "loss.train", "Training loss, averaged over regions"),
    ("goodput_ratio", "goodput", "Kept: tokens applied over tokens trained"),
    ("goodput_time_ratio", "goodputs.time", "Share of the time in steps whose work is useful"),
    ("goodput_tokens_ratio", "goodputs.tokens", "Tokens applied over fault-free tokens"),
    ("participation_ratio", "goodputs.participation", "Mean share of regions in a round"),
)

_WIRE = (("wire_bytes", "bytes_{}", "Bytes of frames moved"),)

_REGION = (
    ("region_alive", "alive", "1 while the region's lease runs"),
    ("region_training", "training", "1 while the region makes inner steps"),
    ("region_contributing", "contributing", "1 while the region's work reaches the global weights"),
    ("region_step", "step", "Inner steps made"),
    ("region_tokens_per_second", "tokens_per_second", "Training speed"),
    ("region_devices", "devices", "Devices the region trains on"),
    ("region_tflops", "tflops", "Tera-operations per second of one device"),
    ("region_mfu_ratio", "mfu", "Share of what a device can do at best"),
    ("region_device_memory_bytes", "device_memory", "Bytes in use on the fullest device"),
    ("region_loss", "loss", "Training loss"),
    ("region_blocked_ratio", "blocked", "Share of the training time that the exchange held up"),
    ("region_staleness", "staleness", "Versions the furthest fragment is behind"),
    ("region_share_ratio", "share", "Share of the merged weight"),
    ("region_lanes", "lanes", "Lanes of its text that the region reads"),
    ("region_last_merged_seconds", "last_merged_seconds", "Since the region was last merged"),
    ("region_silent_seconds", "silent_seconds", "Since the region's last heartbeat"),
    ("region_link_up_bytes_per_second", "link_up", "Measured rate of uploads"),
    ("region_link_down_bytes_per_second", "link_down", "Measured rate of downloads"),
    ("region_restarts", "restarts", "Trainer restarts"),
    ("region_tokens_lost", "lost", "Tokens trained and lost with a trainer that died"),
    ("region_refused", "refused", "Contributions refused"),
    ("region_quarantined", "quarantined", "1 while the region's work is kept out"),
    ("region_pace_steps_per_second", "pace", "Pace on record, up to which claims count"),
    ("region_unbalanced", "unbalanced", "1 while the region's reports contradict what is merged"),
    ("region_mended", "mended", "Copies of published weights replaced for having other bits"),
)

COUNTERS = frozenset(
    f"{prefix}{name}"
    for prefix, names in (
        ("", ("outer_steps", "wire_bytes", "http_requests")),
        ("region_", ("restarts", "tokens_lost", "refused", "mended")),
    )
    for name in names
)
"""Never fall while their process lives; the rest may go up and down."""

METRICS = (
    *(f"diloco_{name}{'_total' * (name in COUNTERS)}" for name, _, _ in _RUN + _WIRE + _REGION),
    *(
        "diloco_bytes_per_parameter",
        "diloco_http_requests_total",
        "diloco_expiry_timestamp_seconds",
    ),
    *("diloco_round_seconds_sum", "diloco_round_seconds_count"),
    "diloco_regions",
    "diloco_state",
    "diloco_tokens",
    *("diloco_trouble", "diloco_warnings", "diloco_build_info", "diloco_disk_free_bytes"),
    *("diloco_tokens_given_up", "diloco_tokens_repeated", "diloco_tokens_unread"),
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


@dataclass(frozen=True)
class ServerFacts:
    """What a server knows of itself."""

    version: str
    disk_free: int | None = None
    answers: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """By call and status."""
    expiries: Mapping[str, float] = field(default_factory=dict)
    """Until when certificates and credentials are good, by name."""
    rounds: Mapping[str, float] = field(default_factory=dict)
    """How many there were, and their seconds."""


def process_text(facts: ServerFacts) -> str:
    """What the server's process, its disk and its clients are at, in the same format."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import SummaryMetricFamily
    from prometheus_client.process_collector import ProcessCollector
    from prometheus_client.registry import Collector

    class Once(Collector):
        def collect(self) -> Iterator[Any]:
            built = [((facts.version,), 1.0)]
            yield _family("build_info", "1, for this version", ("version",), built)
            free = [((), facts.disk_free)]
            yield _family("disk_free_bytes", "Room on the server's disk", (), free)
            answers = [((call, str(code)), n) for (call, code), n in sorted(facts.answers.items())]
            labels = ("call", "code")
            yield _family("http_requests", "Requests by call and status", labels, answers)
            ends = [((name,), at) for name, at in sorted(facts.expiries.items())]
            meaning = "Until when a certificate or credential is good"
            yield _family("expiry_timestamp_seconds", meaning, ("of",), ends)
            yield SummaryMetricFamily(
                "diloco_round_seconds",
                "Rounds from the call to the new version",
                count_value=int(facts.rounds.get("count", 0)),
                sum_value=facts.rounds.get("seconds", 0.0),
            )

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Once())
    ProcessCollector(registry=registry)
    return generate_latest(registry).decode()


def _families(status: Status) -> Iterator[Any]:
    states = [((state,), float(status.state == state)) for state in STATES]
    yield _family("state", "1 for the state the run is in", ("state",), states)
    standings = [((what,), float(count)) for what, count in standing(status).items()]
    yield _family("regions", "Regions by what they are to the run", ("is",), standings)
    trouble = float(bool(status.trouble))
    yield _family("trouble", "1 while nothing can be acknowledged", (), [((), trouble)])
    alarms = float(len(warnings(status)))
    yield _family("warnings", "Sentences that `diloco status` warns with", (), [((), alarms)])
    fates = [((fate,), getattr(status.tokens, fate)) for fate in FATES]
    yield _family("tokens", "Tokens by what became of them", ("fate",), fates)
    for name, meaning in (
        ("given_up", "Of the discarded, by retirement"),
        ("repeated", "Read by two regions in one epoch, after one had fallen silent"),
        ("unread", "Skipped in an epoch, because the region that read them fell silent"),
    ):
        yield _family(f"tokens_{name}", meaning, (), [((), getattr(status.tokens, name))])
    for name, path, meaning in _RUN:
        yield _family(name, meaning, (), [((), attrgetter(path)(status))])
    costs = [
        ((way,), None if bits is None else bits / 8)
        for way in ("up", "down")
        for bits in [getattr(status.wire, f"bits_per_parameter_{way}")]
    ]
    meaning = "Bytes on the wire for one parameter"
    yield _family("bytes_per_parameter", meaning, ("direction",), costs)
    for name, key, meaning in _WIRE:
        ways = [((way,), getattr(status.wire, key.format(way))) for way in ("up", "down")]
        yield _family(name, meaning, ("direction",), ways)
    for name, key, meaning in _REGION:
        rows = [((region.name,), getattr(region, key)) for region in status.regions]
        yield _family(name, meaning, ("region",), rows)


def _family(
    name: str,
    meaning: str,
    labels: tuple[str, ...],
    rows: Iterable[tuple[tuple[str, ...], float | None]],
) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
    family = kind(f"diloco_{name}", meaning, labels=labels)
    for values, number in rows:
        if number is not None:
            family.add_metric(values, float(number))
    return family
