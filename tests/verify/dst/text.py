"""Who read which window of the text, and which windows came into the weights twice.

A lane is read by one region at a time. Where a region fell silent or was removed, others read
on; what it had read after that and brings back later is the only work that may repeat theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from diloco_cli.core.lanes import LapsedGrant
from diloco_cli.wire.messages import TextOrder

Window = tuple[int, int]
"""Lane and position."""

WINDOWS = 10_000
"""Of an epoch: more than any run reads."""
LANES = 6
ORDER = TextOrder(
    digest="0" * 32, settings="1" * 32, tokens=8 * WINDOWS, windows=WINDOWS, sequence=8, lanes=LANES
)


class TextAudit:
    def __init__(self) -> None:
        self.windows: dict[int, Window] = {}
        self.readers: dict[int, str] = {}
        """Both by inner step."""

    def reads(self, step: int, region: str, window: Window) -> None:
        self.windows[step], self.readers[step] = window, region

    def repeated(
        self, steps: Iterable[int], lapsed: Collection[LapsedGrant], spoiled: Collection[str]
    ) -> Mapping[Window, list[str]]:
        """Windows that came in more than once for no reason that is allowed, with their readers."""
        seen: dict[Window, list[str]] = {}
        for step in steps:
            if step in self.windows:
                seen.setdefault(self.windows[step], []).append(self.readers[step])
        return {
            window: readers
            for window, readers in seen.items()
            if len(readers) > 1 and not _is_excused(window, set(readers), lapsed, spoiled)
        }


def _is_excused(
    window: Window, readers: set[str], lapsed: Collection[LapsedGrant], spoiled: Collection[str]
) -> bool:
    lane, position = window
    return bool(readers & set(spoiled)) or any(
        old.lane == lane and old.region in readers and position >= old.end for old in lapsed
    )
