"""What stands in for arrays, files and messages.

A vector is one number and the tokens that made it. The number goes through a real
quantiser, so that what a frame decodes to differs from what was held; the tokens are
exact, so that every step can be followed to where it ended.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, field, replace

from diloco_cli.core import pace
from diloco_cli.core.lanes import Assignment, Cursor, Positions
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
    cursor: Cursor
    lie: float = 1.0
    """Times what is in it that it claims, and times what it has ever trained that its books say."""
    balanced: bool = True
    """Its books say the same as its claim."""

    @property
    def claimed_totals(self) -> Totals:
        lie = self.lie if self.balanced else 1.0
        return self.totals if lie == 1 else Totals(*(lie * each for each in astuple(self.totals)))

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
            self.lie * self.work.tokens,
            self.lie * self.work.steps,
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


def outer_step(
    state: State, members: list[tuple[Work, float]], *, drain: bool, lr: float, mu: float
) -> State:
    """Token-weighted mean, Nesterov, and a quantised delta against what was published."""
    # One of which nothing counts is merged all the same, with next to no weight.
    weights = [max(work.tokens**2 / work.steps if work.steps else 0.0, TINY) for work, _ in members]
    mean = sum(w * value for w, (_, value) in zip(weights, members, strict=True)) / sum(weights)
    momentum = state.momentum if drain else mu * state.momentum + mean
    theta = state.theta - lr * (mean if drain else mean + mu * momentum)
    delta = quantised(theta - state.published)
    return State(theta, momentum, state.published + delta, delta)


@dataclass(frozen=True, slots=True)
class News:
    n: int
    versions: tuple[int, ...]
    calls: Mapping[int, int]
    fates: Mapping[int, tuple[str, str]]
    ended: int
    """Number of the record that called the end; 0 while none stands."""
    finished: bool
    terms: int = 0
    lanes: Assignment | None = None
    until: float | None = None
    """How far the region may train."""


@dataclass(frozen=True, slots=True)
class ReportedTokens:
    """By fragment, as a heartbeat has them."""

    trained: tuple[float, ...]
    applied: tuple[float, ...]
    pending: tuple[float, ...]
    refused: tuple[float, ...]
    discarded: tuple[float, ...]

    @classmethod
    def of(cls, totals: Collection[Totals], pending: Collection[float]) -> ReportedTokens:
        return cls(
            tuple(each.trained for each in totals),
            tuple(each.applied for each in totals),
            tuple(pending),
            tuple(each.refused for each in totals),
            tuple(each.discarded for each in totals),
        )


@dataclass(frozen=True, slots=True)
class Fenced:
    pass


@dataclass(frozen=True, slots=True)
class Welcome:
    epoch: int
    high: int
    news: News


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat."""

    reports: tuple[pace.Report, ...]
    empty: tuple[bool, ...]
    """By fragment: nothing is left to send."""
    ended: int
    """Which end it answers by having nothing left at all; 0 if it has something, or knows none."""
    step_seconds: float
    tokens: ReportedTokens
    made: int = 0
    """Steps since its trainer was started."""
    until: float | None = None
    """How far it may train, as it was last told."""
    lanes: Positions = field(default_factory=dict)
    released: Positions = field(default_factory=dict)
    """Given up by a checkpoint that is durable."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A fragment on its way down: whole when there is no base, else deltas to add."""

    version: int
    merged: str | None
    base: int | None
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint."""

    clock: int
    books: tuple[Book, ...]
    held: tuple[Vector, ...]
    cursor: Cursor
    owner: str


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
    terms: int = 0
    """Number of the terms that the next trainer starts under."""
    lanes: Assignment | None = None
    """What the agent was told to read; durable before the trainer follows."""

    def copy(self) -> Folder:
        return replace(self, outbox=dict(self.outbox), fate=dict(self.fate), image=dict(self.image))
