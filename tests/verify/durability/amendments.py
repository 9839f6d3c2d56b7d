"""Amends a run under load while its server is killed; ends with 1 if a promise was broken.

    python -m tests.verify.durability.amendments --amendments 50 --kills 20

Four client processes upload as fast as the server takes it, an operator amends the run at
random, and at random moments, often while an amendment is on its way, the server gets SIGKILL.
A request whose answer was lost is sent again under its id. After every death the disk is
compared with what clients and operator were told, and every version is recomputed by the terms
of its round.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from diloco_cli.core.journal_records import TermsAmended
from diloco_cli.errors import LinkError
from diloco_cli.net.client import Client
from diloco_cli.net.options import ONCE, Options, Timeouts
from diloco_cli.run.edited_spec import folded_amendments
from diloco_cli.server.store.journal import read_journal
from diloco_cli.wire.messages import Amend
from tests.verify.durability.killable_server import Broken, Stage

CHOICES: dict[str, tuple[Any, ...]] = {
    "outer.lr": (0.2, 0.3, 0.4, 0.5),
    "outer": ({"kind": "sgd", "lr": 0.5}, {"kind": "nesterov", "lr": 0.4, "momentum": 0.8}),
    "merge": ({"kind": "mean"}, {"kind": "radial"}),
    "sync.quorum": (1, 2, 3),
    "sync.every": (4, 6, 8),
    "sync.staleness": (1, 2, 3),
    "sync.grace": ({"kind": "fixed", "seconds": 0.02}, {"kind": "none"}),
    "inner.batch": (4, 8),  # Never less than clients claim: that would not be counted.
    "wire.up": ({"kind": "int4", "block": 512}, {"kind": "int8", "block": 512}),
    "wire.down": ({"kind": "int8", "block": 512}, {"kind": "int4", "block": 256}),
    "wire.zstd": (1, 2, 3),
    "server.guard.norm": (15.0, 20.0, 30.0),
    "budget.tokens": (10**12, 2 * 10**12, 3 * 10**12),
    "evaluate.region": ("iowa", "paris", None),
}


class Operator:
    """Amends a run, one amendment after the other, and knows which of them were made."""

    def __init__(self, stage: Stage, rng: random.Random) -> None:
        self._stage, self._rng = stage, rng
        self.made: list[Amend] = []
        """Those whose answer was heard."""
        self._open: Amend | None = None

    def draw(self) -> Amend:
        """The next amendment, or the last one again if its answer was lost."""
        if self._open is None:
            keys = self._rng.sample([*CHOICES], self._rng.randint(1, 2))
            settings = {key: self._other(key) for key in keys}
            self._open = Amend(id=secrets.token_hex(8), set=settings, sure=True)
        return self._open

    def _other(self, key: str) -> Any:
        """A value that the key does not have now: the same again would be no amendment."""
        values = [request.set[key] for request in self.made if key in request.set]
        return self._rng.choice([each for each in CHOICES[key] if each not in values[-1:]])

    def send(self) -> bool:
        """Sends it once; says whether it was answered."""
        request = self.draw()
        with suppress(LinkError), Client(self._stage.url(), _QUICK) as server:
            answer = server.amend(request)
            self._open = None
            if answer.changes or answer.recorded:
                self.made.append(request)
            return True
        return False

    def check(self) -> None:
        """Compares what was answered with what the disk says."""
        on_record = _recorded(self._stage.folder)
        ids = [record.id for record in on_record]
        if len(set(ids)) != len(ids):
            raise Broken(f"an amendment was made twice: {ids}")
        if [record.number for record in on_record] != [*range(1, len(ids) + 1)]:
            raise Broken(f"amendments are not in order: {on_record}")
        known = [request.id for request in self.made]
        if lost := [id for id in known if id not in ids]:
            raise Broken(f"amendments were answered and are lost: {lost}")
        undecided = {self._open.id} if self._open else set()
        if made_up := set(ids) - set(known) - undecided:
            raise Broken(f"amendments that nobody asked for: {made_up}")


_QUICK = Options(Timeouts(connect=1.0, answer=10.0), ONCE)


def _recorded(folder: Path) -> list[TermsAmended]:
    return folded_amendments(read_journal(folder / "server" / "journal").records)


def amend_and_kill(folder: Path, amendments: int, kills: int, seed: int) -> str:
    """One run; raises Broken, or says what was seen."""
    rng = random.Random(seed)
    stage = Stage(folder)
    operator = Operator(stage, rng)
    struck = set(rng.sample(range(amendments), min(kills, amendments)))
    try:
        stage.start()
        stage.add_clients()
        stage.until_accepted(4)
        turn = 0
        while len(operator.made) < amendments:
            if turn in struck:
                # Somewhere between the request's first byte and well after its answer.
                blow = threading.Timer(rng.uniform(0.0, 0.06), stage.kill)
                stage.url()
                blow.start()
                operator.send()
                blow.join()
                stage.check()
                operator.check()
                stage.start()
            stage.until_accepted(1)
            stage.wait(operator.send)
            turn += 1
        stage.until_published()
        stage.kill()
        found = stage.check()
        operator.check()
    except (Broken, AssertionError) as error:
        raise Broken(f"seed {seed}, {folder}: {error}") from error
    finally:
        stage.close()
    versions = sum(line.version for line in found.lines)
    return (
        f"{len(_recorded(folder))} amendments made in {turn} turns, {len(struck)} kills, "
        f"{stage.accepted} frames acknowledged, lost 0, doubled 0, {stage.made_again} of "
        f"{versions} versions recomputed, all equal"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--amendments", type=int, default=50)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="diloco-amend-") as folder:
        try:
            print(amend_and_kill(Path(folder) / "run", asked.amendments, asked.kills, asked.seed))
        except Broken as error:
            print(f"broken: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
