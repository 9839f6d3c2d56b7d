"""How fast each pair of numbers of a head turns with the position (RoPE), and its scalings.

    default        θ ** (−pair ÷ pairs)
    linear         the same, divided by `factor`
    llama3         slow pairs are divided by `factor`, fast ones are not, those between smoothly
    yarn           likewise with a ramp over the pairs; queries and keys grow a little as well
    proportional   only the first `share` of the pairs turn

Reckoned in float64 and rounded once: what a network multiplies positions by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from diloco_cli.errors import RegistryError


class Rope(NamedTuple):
    """How positions are encoded."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    """The length of the sequences before the scaling."""
    low: float = 1.0
    high: float = 4.0
    """llama3: turns within `original` below and above which a pair is slow and fast."""
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    """yarn: the same."""
    truncate: bool = True
    """yarn: the ramp begins and ends at a whole pair."""
    attention_factor: float | None = None
    """yarn: what queries and keys are multiplied by; follows from `factor` when left out."""
    share: float = 1.0
    """proportional: of the pairs."""

    def speeds(self, head: int) -> np.ndarray:
        """The angle of each pair for one position."""
        pairs = head // 2
        plain = self.theta ** -(np.arange(pairs) / pairs)
        if self.kind == "llama3":
            turns = self.original * plain / (2 * math.pi)
            smooth = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
            plain = plain * (smooth + (1 - smooth) / self.factor)
        elif self.kind == "yarn":
            first, last = self._ramp(head)
            ramp = np.clip((np.arange(pairs) - first) / (last - first), 0, 1)
            plain = plain * (1 - ramp + ramp / self.factor)
        else:
            plain = plain / self.factor
        if self.kind == "proportional":
            plain[int(self.share * head // 2) :] = 0
        return plain.astype(np.float32)

    @property
    def gain(self) -> float:
        """What queries and keys are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def _ramp(self, head: int) -> tuple[float, float]:
        def pair(turns: float) -> float:
            """The pair that makes so many turns within `original`."""
            length = self.original / (turns * 2 * math.pi)
            return head * math.log(length) / (2 * math.log(self.theta))

        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head - 1)
        return first, last if last > first else first + 0.001


_NEEDS = {
    "default": {},
    "linear": {"factor": ()},
    "llama3": {"factor": (), "original": (), "low": (1.0,), "high": (4.0,)},
    "yarn": {
        **{"factor": (), "original": (), "beta_fast": (32.0,), "beta_slow": (1.0,)},
        **{"attention_factor": (None,), "truncate": (True,)},
    },
}
"""The options of each kind that a spec can ask for, and their defaults if they have one."""


def rope_of(theta: float, scaling: Mapping[str, Any] | None) -> Rope:
    """Reads `model.rope`; raises with what it lacks or should not have."""
    if scaling is None:
        return Rope(theta)
    options = dict(scaling)
    kind = options.pop("kind", None)
    if kind not in _NEEDS:
        raise RegistryError(
            f"There is no scaling of positions called {kind!r}.",
            hint=f"Known kinds: {', '.join(_NEEDS)}",
            key="rope.kind",
        )
    known = _NEEDS[kind]
    for name in options:
        if name not in known:
            raise RegistryError(
                f"rope of kind {kind} has no option {name!r}.",
                hint=f"Its options are: {', '.join(known) or 'none'}",
                key=f"rope.{name}",
            )
    values: dict[str, Any] = {}
    for name, default in known.items():
        if name not in options and not default:
            raise RegistryError(f"rope of kind {kind} needs {name!r}.", key="rope.kind")
        values[name] = _number(name, options[name]) if name in options else default[0]
    rope = Rope(theta, kind, **values)
    if kind == "llama3" and not rope.low < rope.high:
        raise RegistryError(
            f"rope.low is {rope.low:g} and rope.high {rope.high:g}: low must be less.",
            key="rope.low",
        )
    return rope


def _number(name: str, value: Any) -> Any:
    if name == "truncate":
        if isinstance(value, bool):
            return value
    elif isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return int(value) if name == "original" else float(value)
    elif value is None and name == "attention_factor":
        return None
    wanted = "true or false" if name == "truncate" else "a positive number"
    raise RegistryError(f"rope.{name} is {value!r}, it must be {wanted}.", key=f"rope.{name}")
