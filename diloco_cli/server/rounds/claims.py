"""What counts of an accepted contribution is put on record, and so is a pace that it shows."""

from __future__ import annotations

from collections.abc import Mapping

from diloco_cli.core.journal_records import FrameDecided, RegionPaced
from diloco_cli.core.lanes import Positions
from diloco_cli.core.rounds import Receipt
from diloco_cli.server.rounds.state import State


def record_accepted(
    state: State,
    receipt: Receipt,
    why: str,
    totals: Mapping[str, float],
    *,
    norm: float,
    lanes: Positions | None,
) -> None:
    """Records an accepted contribution, what of it counts, and its region's pace if it shows it."""
    region, allowance = receipt.region, state.allowance()
    verdict, before = allowance.judge(receipt), allowance.overclaim(region)
    state.record(
        FrameDecided(
            receipt,
            "pending",
            why,
            totals,
            values=state.settings.sizes[receipt.fragment],
            norm=norm,
            lanes=lanes,
            at=allowance.at,
            counted=verdict.counted,
            credit=verdict.credit,
        )
    )
    after = state.allowance()
    if (pace := after.learnt(region)) is not None:
        state.record(RegionPaced(region, pace, after.at, after.terms.steps_cap))
        state.note("paced", region=region, steps_per_second=round(pace, 4))
    if (words := after.overclaim(region)) and not before:
        state.note("note", region=region, why=f"{region} {words}")
