"""Published tables, repeated cell by cell by the simulator.

In: a preset's name. Out: a `Verdict`, our table beside the published one. `PRESETS` below lists
them; verdict.py says what they return.

    bandwidth.py  presets about links: how many gigabits per second, and what fewer bits save
    goodput.py    presets about failures and uneven speeds
    plot.py       pictures of simulations as PNG files; needs matplotlib, from the extra `plot`
    scale.py      the preset about size: a thousand regions, a million chips
    verdict.py    a table, what the literature says in the same cells, and the goals
"""

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
