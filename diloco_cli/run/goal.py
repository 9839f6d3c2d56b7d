"""When to stop before the budget: `--until tokens=100000`, `steps=200`, `minutes=5`."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_cli.errors import SpecError
from diloco_cli.observe.status import Status

KINDS = ("tokens", "steps", "minutes")


@dataclass(frozen=True)
class StopCondition:
    kind: str
    amount: float

    def reached(self, status: Status | None, *, seconds: float) -> bool:
        """Says whether it is time: merged tokens, inner steps of the furthest region, minutes."""
        if self.kind == "minutes":
            return seconds >= 60 * self.amount
        if status is None:
            return False
        if self.kind == "tokens":
            return status.tokens.applied >= self.amount
        return max((region.step or 0 for region in status.regions), default=0) >= self.amount

    def __str__(self) -> str:
        amount = f"{self.amount:g}" if self.kind == "minutes" else f"{int(self.amount):_}"
        return f"{self.kind}={amount}"


def parse_goal(text: str | None) -> StopCondition | None:
    """Reads `tokens=N`, `steps=N` or `minutes=N`."""
    if text is None:
        return None
    kind, _, number = text.partition("=")
    try:
        # Half a token or half a step is never reached, only the whole one after it.
        amount = float(number.replace("_", "")) if kind == "minutes" else int(number)
    except ValueError:
        amount = 0.0
    if kind not in KINDS or not 0 < amount < float("inf"):
        raise SpecError(
            f"--until {text} is not understood.",
            hint="Write --until tokens=1_000_000, --until steps=500 (whole numbers) or --until "
            "minutes=10.",
        )
    return StopCondition(kind, amount)
