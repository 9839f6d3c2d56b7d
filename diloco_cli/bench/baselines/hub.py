"""The middle of a data-parallel job: it gathers gradients, averages them, sends the mean back.

    gather ──all there──▶ load ──▶ step ──▶ step ──▶ … ──▶ stop
       ▲                            │ a member dies
       ├──────── rigid ◀────────────┤    everybody starts again from the checkpoint
       │                            ╰──▶ elastic: the others repeat the exchange without it;
       ╰──────── nobody is left ◀────╯   when it is back it gets a copy of a survivor's state

Gradients come and go in chunks, and a chunk of the mean leaves as soon as all have sent
theirs, so both directions of every link are busy at once. The hub keeps no weights. A step
is made when its last chunk has been averaged: before that nobody can have moved, and after
that everybody who lives will.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_cli.bench.baselines.accounts import StepAccounts
from diloco_cli.bench.baselines.lobby import SILENCE, MemberConnections, Over
from diloco_cli.bench.baselines.messages import GRADIENT, MessageHead, mean, stride
from diloco_cli.bench.baselines.seat import MemberConnection
from diloco_cli.errors import RunFailed


class Lost(Exception):
    """A member died; the argument says whether parts of a mean it shares are out already."""


@dataclass(frozen=True)
class ParallelOptions:
    """How a job goes about it."""

    elastic: bool
    gradients: str = "fp32"
    mtbf: float = math.inf
    """Seconds between two deaths, for Young's rule."""
    checkpoint: float | None = None
    """Seconds between two checkpoints; None: by the rule."""
    snapshots: float = 10.0
    """Seconds between two copies of the weights for the curve."""
    silence: float = SILENCE


class GradientHub(MemberConnections):
    def __init__(
        self, regions: Sequence[str], ledger: StepAccounts, manner: ParallelOptions
    ) -> None:
        super().__init__(silence=manner.silence)
        self.regions, self.ledger, self.manner = regions, ledger, manner
        self.t0: float | None = None
        """When every region had made its first step, on the monotonic clock."""
        self.rebuilt = 0
        """How often the whole job had to start again; all members of before must go."""
        self.parting: dict[str, dict[str, Any]] = {}
        """What members said when they were stopped."""
        self.points: list[tuple[int, float]] = []
        """Tokens applied and seconds, of every snapshot."""
        self.failure: Exception | None = None
        self._saved_at = -math.inf
        self._new: set[str] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="hub", daemon=True)

    def open(self) -> None:
        super().open()
        self._thread.start()

    def stop(self) -> None:
        """Lets everybody keep the weights they have, and leave."""
        with self.changed:
            self._stopping = True
            self.changed.notify_all()

    def close(self) -> None:
        super().close()
        if self._thread.is_alive():
            self._thread.join(10)

    @property
    def finished(self) -> bool:
        return not self._thread.is_alive()

    @property
    def checkpoint_seconds(self) -> float:
        """Young's interval, from what a checkpoint costs and how often somebody dies."""
        if self.manner.checkpoint is not None:
            return self.manner.checkpoint
        return max(math.sqrt(2 * self.cost * self.manner.mtbf) if self.cost else 0.0, self.took)

    def _work(self) -> None:
        try:
            while not self.parting:
                with self.changed:
                    self._gather()
                    self._train()
        except Over:
            pass
        except Exception as error:  # For the conductor; a thread has nobody else to tell.
            self.failure = error

    def _gather(self) -> None:
        """Waits for enough members and has them load the last checkpoint."""
        some = self.manner.elastic and self.t0 is not None
        wanted = 1 if some else len(self.regions)
        self.until(lambda: len(self.waiting) >= wanted, lambda: [])
        self.seats, self.waiting = self.waiting, {}
        for seat in self.seats.values():
            seat.tell(do="load")
        least = 1 if self.manner.elastic else len(self.seats)
        self.until(
            lambda: (
                len(self.seats) < least
                or all(seat.loaded is not None for seat in self.seats.values())
            ),
            lambda: [seat for seat in self.seats.values() if seat.loaded is None],
        )
        if len(self.seats) < least:
            return self._disband()
        steps = {seat.loaded or 0 for seat in self.seats.values()}
        if len(steps) > 1:
            raise RunFailed(f"Members loaded different checkpoints, of steps {sorted(steps)}.")
        self.step, self.attempt = steps.pop(), 0
        self.ledger.back_to(self.step)
        self._new = set(self.seats)

    def _disband(self) -> None:
        """Sends everybody away; the conductor starts them all again."""
        self.rebuilt += 1
        self.drop(list(self.seats.values()))

    def _train(self) -> None:
        """Makes steps until somebody dies whom we cannot do without, or we are stopped."""
        disturbed = held = True
        while self.seats:
            if self._stopping:
                return self._part()
            # Whoever was told to go on already is told nothing else before the next step.
            if held and self.waiting and self.manner.elastic:
                disturbed = True
                self._admit()
            for seat in self.seats.values() if held else ():
                seat.tell(do="go")
            whole = len(self.seats)
            if self._exchange():
                held = self._commit(undisturbed=not disturbed and len(self.seats) == whole)
                disturbed = False
            elif not self._stopping:
                return self._disband()

    def _admit(self) -> None:
        """Has a survivor send its state to those who wait; everybody else stands meanwhile."""
        while self.seats and self.waiting:
            giver = min(self.seats.values(), key=lambda seat: seat.region)
            if self._hand_over(giver, list(self.waiting.values())):
                return

    def _hand_over(self, giver: MemberConnection, takers: list[MemberConnection]) -> bool:
        """Says whether the giver lived to give everything."""
        self.takers, giver.given = takers, None
        self.paused_at = time.monotonic()
        for taker in takers:
            taker.tell(do="take", arrived=False)
        giver.tell(do="give")
        self.until(lambda: giver.given is not None or not giver.alive, lambda: [giver])
        if giver.given is None:
            return False
        for taker in takers:
            taker.tell(do="take", arrived=True, step=self.step)
        self.until(
            lambda: all(taker.loaded is not None or not taker.alive for taker in takers),
            lambda: [taker for taker in takers if taker.loaded is None],
        )
        for taker in takers:
            if taker.alive:
                self.seats[taker.region] = self.waiting.pop(taker.region)
                self._new.add(taker.region)
        return True

    def _exchange(self) -> bool:
        """Averages one step's gradients; False if the step cannot be made."""
        while self.seats and not self._stopping:
            try:
                self._reduce([self.seats[name] for name in sorted(self.seats)])
                return True
            except Lost as lost:
                if not self.manner.elastic:
                    return False
                if lost.args[0]:
                    self._again()
        return False

    def _again(self) -> None:
        """Begins the exchange anew, so that every mean is one of the same members throughout."""
        self.attempt += 1
        for seat in self.seats.values():
            seat.arrived, seat.loss = 0, None
            seat.tell(do="again", attempt=self.attempt)

    def _reduce(self, members: list[MemberConnection]) -> None:
        shares = list(self._shares([seat.region for seat in members]).values())
        size = len(members[0].gradient)
        for at in range(0, size, step := stride(size)):
            end = min(at + step, size)
            self._all(members, lambda seat, end=end: seat.arrived >= end, begun=at > 0)
            parts = [(w, seat.gradient[at:end]) for w, seat in zip(shares, members, strict=True)]
            head = MessageHead(GRADIENT, self.step, self.attempt, at)
            self.changed.release()  # Others go on receiving while we add.
            try:
                data = mean(parts, self.manner.gradients).data
            finally:
                self.changed.acquire()
            for seat in members:
                seat.send(head, data)
        self._all(members, lambda seat: seat.loss is not None, begun=True)

    def _shares(self, names: Sequence[str]) -> dict[str, float]:
        """What each weighs in a mean: its share of the tokens."""
        total = self.ledger.size(names)
        return {name: self.ledger.tokens[name] / total for name in names}

    def _all(
        self,
        members: list[MemberConnection],
        has: Callable[[MemberConnection], bool],
        *,
        begun: bool,
    ) -> None:
        def lost() -> bool:
            return self._stopping or not all(seat.alive for seat in members)

        self.until(
            lambda: lost() or all(has(seat) for seat in members),
            lambda: [seat for seat in members if not has(seat)],
        )
        if lost():
            raise Lost(begun)

    def _commit(self, *, undisturbed: bool) -> bool:
        """Enters the step into the books and tells everybody; says whether they now wait."""
        now, members = time.monotonic(), tuple(sorted(self.seats))
        self.t0 = now if self.t0 is None else self.t0
        self.ledger.commit(members, now - self.t0, undisturbed=undisturbed)
        for region in self._new:
            self.note("stepped", region)
        self._new = set()
        if save := now >= self._saved_at + self.checkpoint_seconds:
            self._saved_at = now
        snapshot = None
        if now - self.t0 >= len(self.points) * self.manner.snapshots:
            snapshot = len(self.points)
            self.points.append((self.ledger.applied, now - self.t0))
        loss = sum(w * (self.seats[name].loss or 0.0) for name, w in self._shares(members).items())
        hold = self._stopping or bool(self.waiting and self.manner.elastic)
        self.step, self.attempt = self.step + 1, 0
        for name, seat in self.seats.items():
            seat.arrived, seat.loss = 0, None
            first = name == members[0]
            seat.tell(
                **{"do": "done", "loss": loss, "then": "hold" if hold else "go"},
                **{"save": save and first, "snapshot": snapshot if first else None},
            )
        return hold

    def _part(self) -> None:
        """Stops everybody; the first one left evaluates."""
        first, everybody = min(self.seats), dict(self.seats)
        for name, seat in everybody.items():
            seat.tell(do="stop", first=name == first)
        self.until(
            lambda: all(seat.parting or not seat.alive for seat in everybody.values()), lambda: []
        )
        self.parting = {n: seat.parting for n, seat in everybody.items() if seat.parting}
        if first not in self.parting:
            raise RunFailed(f"{first} ended before it had evaluated the weights.")
