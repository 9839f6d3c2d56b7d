"""When to stop before the budget: `--until tokens=100000`, `steps=200`, `minutes=5`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco_cli.errors import SpecError

KINDS = ("tokens", "steps", "minutes")


@dataclass(frozen=True)
class StopCondition:
    kind: str
    amount: float

    def reached(self, status: Mapping[str, Any], *, seconds: float) -> bool:
        """Says whether it is time: merged tokens, inner steps of the furthest region, minutes."""
        if self.kind == "minutes":
            return seconds >= 60 * self.amount
        if self.kind == "tokens":
            return ((status.get("tokens") or {}).get("applied") or 0) >= self.amount
        steps = [region.get("step") or 0 for region in status.get("regions") or []]
        return max(steps, default=0) >= self.amount

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
