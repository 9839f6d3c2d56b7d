"""What stands in for arrays and files.

A vector is one number and the tokens that made it. The number goes through a real
quantiser, so that what a frame decodes to differs from what was held; the tokens are
exact, so that every step can be followed to where it ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from diloco_cli.core.rounds import Receipt
from diloco_cli.core.unmerged_work import Book, Mix, Posted, Totals, Work

Tokens = Mapping[int, float]
"""Token → share of it that is here."""
TINY = 1e-9


def worth(token: int) -> float:
    """What one inner step adds to a vector: fixed, and different for every step."""
    return (token * 2_654_435_761 % 1_000_003) / 1_000_003 - 0.5


def quantised(value: float) -> float:
    """Four significant bits, like a codec whose blocks hold one value."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 16), exponent - 4)


@dataclass(slots=True)
class Vector:
    value: float = 0.0
    tokens: dict[int, float] = field(default_factory=dict)

    def step(self, token: int) -> None:
        self.value += worth(token)
        self.tokens[token] = 1.0

    def copy(self) -> Vector:
        return Vector(self.value, dict(self.tokens))

    def mixed(self, mix: Mix, frame: Frame | None) -> Vector:
        """Does to the vector what the books say: a·held − b·frame."""
        value = mix.held * self.value
        tokens = {t: mix.held * share for t, share in self.tokens.items()} if mix.held else {}
        if mix.flight:
            assert frame is not None, "the books subtract a frame that is not in the outbox"
            value -= mix.flight * frame.value
            for token, share in frame.tokens.items():
                tokens[token] = tokens.get(token, 0.0) - mix.flight * share
        return Vector(value, {t: share for t, share in tokens.items() if abs(share) > TINY})


@dataclass(frozen=True, slots=True)
class Frame:
    """One contribution: header, decoded value, and what is really in it."""

    region: str
    fragment: int
    base: int
    clock: int
    prev: str
    work: Work
    totals: Totals
    digest: str
    value: float
    tokens: Tokens

    def posted(self) -> Posted:
        return Posted(self.clock, self.base, self.prev, self.work, self.digest, self.totals)

    def receipt(self) -> Receipt:
        return Receipt(
            self.region,
            self.fragment,
            self.base,
            self.clock,
            self.digest,
            self.prev,
            self.work.tokens,
            self.work.steps,
        )


@dataclass(frozen=True, slots=True)
class Image:
    version: int
    merged: str | None
    """This region's last merged frame; None: the metadata does not speak of this region."""
    value: float


@dataclass(frozen=True, slots=True)
class State:
    """One version of a fragment at the server."""

    theta: float = 0.0
    momentum: float = 0.0
    published: float = 0.0
    delta: float = 0.0


def outer_step(state: State, members: list[tuple[Work, float]], *, drain: bool) -> State:
    """Token-weighted mean, Nesterov, and a quantised delta against what was published."""
    weights = [work.tokens**2 / work.steps for work, _ in members]
    mean = sum(w * value for w, (_, value) in zip(weights, members, strict=True)) / sum(weights)
    momentum = state.momentum if drain else 0.9 * state.momentum + mean
    theta = state.theta - 0.4 * (mean if drain else mean + 0.9 * momentum)
    delta = quantised(theta - state.published)
    return State(theta, momentum, state.published + delta, delta)


@dataclass(frozen=True, slots=True)
class News:
    n: int
    versions: tuple[int, ...]
    calls: Mapping[int, int]
    fates: Mapping[int, tuple[str, str]]
    end: bool
    finished: bool


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint."""

    clock: int
    books: tuple[Book, ...]
    held: tuple[Vector, ...]


@dataclass
class Folder:
    """The durable files of one region folder."""

    owner: str
    boot: int = 0
    outbox: dict[int, Frame] = field(default_factory=dict)
    fate: dict[int, tuple[str, str]] = field(default_factory=dict)
    image: dict[int, Image] = field(default_factory=dict)
    calls: News | None = None
    checkpoint: Saved | None = None

    def copy(self) -> Folder:
        return replace(self, outbox=dict(self.outbox), fate=dict(self.fate), image=dict(self.image))
