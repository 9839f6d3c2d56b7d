"""Rehearsals that everybody can repeat: published tables, and sizes nobody has at hand."""

from __future__ import annotations

from collections.abc import Callable

from diloco_cli.sim import preset_bandwidth, preset_goodput, preset_scale
from diloco_cli.sim.verdict import Verdict

PRESETS: dict[str, Callable[..., Verdict]] = {
    "streaming-table4": preset_bandwidth.streaming_table4,
    "decoupled-table1": preset_goodput.decoupled_table1,
    "dp-bandwidth": preset_bandwidth.dp_bandwidth,
    "hetero": preset_goodput.hetero,
    "llama3": preset_goodput.llama3,
    "12b-four-regions": preset_bandwidth.four_regions,
    "planet": preset_scale.planet,
}
