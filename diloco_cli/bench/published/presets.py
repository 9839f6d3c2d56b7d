"""Rehearsals that everybody can repeat: published tables, and sizes nobody has at hand."""

from __future__ import annotations

from collections.abc import Callable

from diloco_cli.bench.published import bandwidth, goodput, scale
from diloco_cli.bench.published.verdict import Verdict

PRESETS: dict[str, Callable[..., Verdict]] = {
    "streaming-table4": bandwidth.streaming_table4,
    "decoupled-table1": goodput.decoupled_table1,
    "dp-bandwidth": bandwidth.dp_bandwidth,
    "hetero": goodput.hetero,
    "llama3": goodput.llama3,
    "12b-four-regions": bandwidth.four_regions,
    "planet": scale.planet,
}
