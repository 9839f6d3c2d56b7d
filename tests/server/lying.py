"""A region that says what it likes about its work, beside two that make one step a second."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from diloco_cli.core.rounds import Accept, Answer
from diloco_cli.server.intake.intake import Intake
from diloco_cli.server.intake.partial import UploadAddress
from diloco_cli.wire.frame import open_frame
from tests.server.harness import Bench, Region, make_settings, make_spec

STEP_TOKENS = 32.0
CAP = 18.0
"""Steps that count of a region of which nothing is known."""


class Trial(Bench):
    """Regions that make one step a second, and one that says what it likes."""

    def __init__(
        self,
        folder: Path,
        *,
        budget: int = 40_000_000,
        paces: Mapping[str, float] | None = None,
        **changes: Any,
    ) -> None:
        """`paces` are those that the spec declares."""
        names, declared = ("evil", "iowa", "paris"), dict(paces or {})
        spec = make_spec(names, pace=None, budget={"tokens": budget}, **changes)
        regions = tuple(
            region.model_copy(update={"pace": declared.get(region.name)}) for region in spec.regions
        )
        spec = spec.model_copy(update={"regions": regions})
        super().__init__(folder, make_settings(spec))
        self.intake = Intake(self.server)
        self.kept: list[bytes] = []

    def restart(self) -> None:
        super().restart()
        self.intake = Intake(self.server)

    async def upload(self, name: str, data: bytes) -> Answer:
        frame = open_frame(data)
        header = frame.header
        epoch = self.regions[name].epoch
        address = UploadAddress(header.fragment, name, header.base, header.clock, epoch)
        self.kept.append(data)
        return await self.intake.take(address, pieces(data), length=len(data))

    def lie(self, fragment: int, **claim: float) -> bytes:
        """Work that claims what it likes, in a header that does not contradict itself."""
        evil = self.regions["evil"]
        steps = claim.get("steps", 6.0)
        tokens = claim.get("tokens", STEP_TOKENS * steps)
        data = evil.frame(fragment, steps, tokens=tokens, totals=totals(evil, fragment, tokens))
        evil.trained[fragment] += tokens - STEP_TOKENS * steps
        evil.pending[fragment] += tokens - STEP_TOKENS * steps
        return data

    async def exchange(
        self, fragment: int, lie: dict[str, float] | None, seconds: float = 6.0
    ) -> Answer | None:
        """So many seconds of everybody's work on one fragment."""
        self.clock.now += seconds
        steps = [0.0] * len(self.settings.sizes)
        steps[fragment] = seconds
        for name in self.regions:
            speed = 1e-9 if name == "evil" else 1.0
            await self.beat(name, steps, step_seconds=speed, step=100)
        self.server.tick()
        answer = None
        for name in ("iowa", "paris"):
            region = self.regions[name]
            said = totals(region, fragment, seconds * STEP_TOKENS)
            data = region.frame(fragment, seconds, totals=said)
            assert isinstance(await self.upload(name, data), Accept)
        if lie is not None:
            answer = await self.upload("evil", self.lie(fragment, **lie))
        await self.settle()
        return answer

    def counted(self, name: str) -> float:
        """Steps of a region that counted on the fragment on which most did."""
        applied = [slot.applied.get(name, 0.0) for slot in self.state.ledger.slots]
        return max(applied) / STEP_TOKENS


def totals(region: Region, fragment: int, tokens: float) -> dict[str, float]:
    applied = region.applied[fragment]
    return {"trained": applied + tokens, "applied": applied, "refused": 0.0, "discarded": 0.0}


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data
