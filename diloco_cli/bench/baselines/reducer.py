"""The middle of a data-parallel job: it gathers gradients, averages them, sends the mean back.

    gather ──all there──▶ load ──▶ step ──▶ step ──▶ … ──▶ stop
       ▲                            │ a member dies
       ├──────── rigid ◀────────────┤    everybody starts again from the checkpoint
       │                            ╰──▶ elastic: the others repeat the exchange without it;
       ╰──────── nobody is left ◀────╯   when it is back it gets a copy of a survivor's state

Gradients come and go in chunks, and a chunk of the mean leaves as soon as all have sent
theirs, so both directions of every link are busy at once. The reducer keeps no weights. A step
is made when its last chunk has been averaged: before that nobody can have moved, and after
that everybody who lives will.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diloco_cli.bench.baselines.accounts import StepAccounts
from diloco_cli.bench.baselines.connections import (
    SILENCE,
    Cancelled,
    MemberConnection,
    MemberConnections,
)
from diloco_cli.bench.baselines.messages import GRADIENT, MessageHead, Words, mean, stride
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


class GradientReducer(MemberConnections):
    def __init__(
        self, regions: Sequence[str], accounts: StepAccounts, options: ParallelOptions
    ) -> None:
        super().__init__(silence=options.silence)
        self.regions, self.accounts, self.options = regions, accounts, options
        self.t0: float | None = None
        """When every region had made its first step, on the monotonic clock."""
        self.rebuilt = 0
        """How often the whole job had to start again; all members of before must go."""
        self.results: dict[str, Words] = {}
        """What members said when they were stopped."""
        self.points: list[tuple[int, float]] = []
        """Tokens applied and seconds, of every snapshot."""
        self.failure: Exception | None = None
        self._saved_at = -math.inf
        self._new: set[str] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="reducer", daemon=True)

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
        if self.options.checkpoint is not None:
            return self.options.checkpoint
        return max(math.sqrt(2 * self.cost * self.options.mtbf) if self.cost else 0.0, self.took)

    def _work(self) -> None:
        try:
            while not self.results:
                with self.changed:
                    self._gather()
                    self._train()
        except Cancelled:
            pass
        except Exception as error:  # For the conductor; a thread has nobody else to tell.
            self.failure = error

    def _gather(self) -> None:
        """Waits for enough members and has them load the last checkpoint."""
        some = self.options.elastic and self.t0 is not None
        wanted = 1 if some else len(self.regions)
        self.until(lambda: len(self.waiting) >= wanted, lambda: [])
        self.members, self.waiting = self.waiting, {}
        for member in self.members.values():
            member.tell(do="load")
        least = 1 if self.options.elastic else len(self.members)
        self.until(
            lambda: (
                len(self.members) < least
                or all(member.loaded is not None for member in self.members.values())
            ),
            lambda: [member for member in self.members.values() if member.loaded is None],
        )
        if len(self.members) < least:
            return self._disband()
        steps = {member.loaded or 0 for member in self.members.values()}
        if len(steps) > 1:
            raise RunFailed(f"Members loaded different checkpoints, of steps {sorted(steps)}.")
        self.step, self.attempt = steps.pop(), 0
        self.accounts.back_to(self.step)
        self._new = set(self.members)

    def _disband(self) -> None:
        """Sends everybody away; the conductor starts them all again."""
        self.rebuilt += 1
        self.drop(list(self.members.values()))

    def _train(self) -> None:
        """Makes steps until somebody dies whom we cannot do without, or we are stopped."""
        disturbed = held = True
        while self.members:
            if self._stopping:
                return self._stop_all()
            # Whoever was told to go on already is told nothing else before the next step.
            if held and self.waiting and self.options.elastic:
                disturbed = True
                self._admit()
            for member in self.members.values() if held else ():
                member.tell(do="go")
            whole = len(self.members)
            if self._exchange():
                held = self._commit(undisturbed=not disturbed and len(self.members) == whole)
                disturbed = False
            elif not self._stopping:
                return self._disband()

    def _admit(self) -> None:
        """Has a survivor send its state to those who wait; everybody else stands meanwhile."""
        while self.members and self.waiting:
            donor = min(self.members.values(), key=lambda member: member.region)
            if self._hand_over(donor, list(self.waiting.values())):
                return

    def _hand_over(self, donor: MemberConnection, receivers: list[MemberConnection]) -> bool:
        """Says whether the donor lived to give everything."""
        self.receivers, donor.given = receivers, None
        self.paused_at = time.monotonic()
        for receiver in receivers:
            receiver.tell(do="take", arrived=False)
        donor.tell(do="give")
        self.until(lambda: donor.given is not None or not donor.alive, lambda: [donor])
        if donor.given is None:
            return False
        for receiver in receivers:
            receiver.tell(do="take", arrived=True, step=self.step)
        self.until(
            lambda: all(
                receiver.loaded is not None or not receiver.alive for receiver in receivers
            ),
            lambda: [receiver for receiver in receivers if receiver.loaded is None],
        )
        for receiver in receivers:
            if receiver.alive:
                self.members[receiver.region] = self.waiting.pop(receiver.region)
                self._new.add(receiver.region)
        return True

    def _exchange(self) -> bool:
        """Averages one step's gradients; False if the step cannot be made."""
        while self.members and not self._stopping:
            try:
                self._reduce([self.members[name] for name in sorted(self.members)])
                return True
            except Lost as lost:
                if not self.options.elastic:
                    return False
                if lost.args[0]:
                    self._again()
        return False

    def _again(self) -> None:
        """Begins the exchange anew, so that every mean is one of the same members throughout."""
        self.attempt += 1
        for member in self.members.values():
            member.arrived, member.loss = 0, None
            member.tell(do="again", attempt=self.attempt)

    def _reduce(self, members: list[MemberConnection]) -> None:
        shares = list(self._shares([member.region for member in members]).values())
        size = len(members[0].gradient)
        for at in range(0, size, step := stride(size)):
            end = min(at + step, size)
            self._all(members, lambda member, end=end: member.arrived >= end, begun=at > 0)
            parts = [
                (w, member.gradient[at:end]) for w, member in zip(shares, members, strict=True)
            ]
            head = MessageHead(GRADIENT, self.step, self.attempt, at)
            self.changed.release()  # Others go on receiving while we add.
            try:
                data = mean(parts, self.options.gradients).data
            finally:
                self.changed.acquire()
            for member in members:
                member.send(head, data)
        self._all(members, lambda member: member.loss is not None, begun=True)

    def _shares(self, names: Sequence[str]) -> dict[str, float]:
        """What each weighs in a mean: its share of the tokens."""
        total = self.accounts.size(names)
        return {name: self.accounts.tokens[name] / total for name in names}

    def _all(
        self,
        members: list[MemberConnection],
        has: Callable[[MemberConnection], bool],
        *,
        begun: bool,
    ) -> None:
        def lost() -> bool:
            return self._stopping or not all(member.alive for member in members)

        self.until(
            lambda: lost() or all(has(member) for member in members),
            lambda: [member for member in members if not has(member)],
        )
        if lost():
            raise Lost(begun)

    def _commit(self, *, undisturbed: bool) -> bool:
        """Enters the step into the books and tells everybody; says whether they now wait."""
        now, members = time.monotonic(), tuple(sorted(self.members))
        self.t0 = now if self.t0 is None else self.t0
        self.accounts.commit(members, now - self.t0, undisturbed=undisturbed)
        for region in self._new:
            self.note("stepped", region)
        self._new = set()
        if save := now >= self._saved_at + self.checkpoint_seconds:
            self._saved_at = now
        snapshot = None
        if now - self.t0 >= len(self.points) * self.options.snapshots:
            snapshot = len(self.points)
            self.points.append((self.accounts.applied, now - self.t0))
        loss = sum(
            w * (self.members[name].loss or 0.0) for name, w in self._shares(members).items()
        )
        hold = self._stopping or bool(self.waiting and self.options.elastic)
        self.step, self.attempt = self.step + 1, 0
        for name, member in self.members.items():
            member.arrived, member.loss = 0, None
            first = name == members[0]
            member.tell(
                **{"do": "done", "loss": loss, "then": "hold" if hold else "go"},
                **{"save": save and first, "snapshot": snapshot if first else None},
            )
        return hold

    def _stop_all(self) -> None:
        """Stops everybody; the first one left evaluates."""
        first, everybody = min(self.members), dict(self.members)
        for name, member in everybody.items():
            member.tell(do="stop", first=name == first)
        self.until(
            lambda: all(member.results or not member.alive for member in everybody.values()),
            lambda: [],
        )
        self.results = {n: member.results for n, member in everybody.items() if member.results}
        if first not in self.results:
            raise RunFailed(f"{first} ended before it had evaluated the weights.")
