"""May this folder speak for its region?

The folder has a random owner id and counts how often an agent was started on it. With
both the server can tell a retried join from a new worker, a restarted worker from a
rival, and a folder restored from an old copy from the one that went on.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from diloco_cli.data import datasets
from diloco_cli.errors import SET_BACK, LinkError, SpecError, StoreError
from diloco_cli.net.client import Client, Held, OlderCopy
from diloco_cli.net.credentials import Untrusted
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system.wakeup import Wakeup
from diloco_cli.wire.messages import Amendments, Joined, Run, TextOrder
from diloco_cli.worker.agent.published_weights import other_history
from diloco_cli.worker.mailbox import FolderOwner, Mailbox

log = logging.getLogger(__name__)

T = TypeVar("T")

ASK_AGAIN = 0.5
LONGEST_PAUSE = 5.0


@dataclass(frozen=True)
class SharedSettings:
    """What this worker and the server must have in common."""

    settings: Mapping[str, Any]
    spec_digest: str
    layout_digest: str


class RegionJoin:
    """Where a worker asks to be let in."""

    def __init__(
        self,
        mailbox: Mailbox,
        region: str,
        shared: SharedSettings,
        wakeup: Wakeup,
        order: TextOrder | None = None,
    ) -> None:
        """`order` is how the region reads which text, if that can be read."""
        self.mailbox, self.region, self.shared = mailbox, region, shared
        self.wakeup, self.order = wakeup, order
        self.identity = FolderOwner("", 0)

    def boot(self) -> None:
        """Counts this start, durably, before anybody hears of it."""
        known = self.mailbox.identity() or FolderOwner(secrets.token_hex(8), 0)
        if known.region not in ("", self.region):
            known = self._moved(known)
        key = known.key or secrets.token_hex(16)
        self._remember(replace(known, boot=known.boot + 1, key=key, region=self.region))

    def _moved(self, known: FolderOwner) -> FolderOwner:
        """The folder of another region is used for this one: what it posted is not ours to send.

        A frame of the old name may still be merged, so what it holds would count twice.
        """
        log.info(
            f"{self.mailbox.folder} was the folder of {known.region}; what {known.region} held and "
            f"the run has not merged is dropped"
        )
        self._keep(self.mailbox.clear_outbox)
        return FolderOwner(secrets.token_hex(8), 0, known.run)

    def is_replaced(self, about: Run) -> bool:
        """Says whether the run of this folder trained nothing and made way for the server's."""
        return bool(self.identity.run) and self.identity.run in about.was

    def is_continued(self, about: Run) -> bool:
        """Says whether the server's run goes on from the run of this folder."""
        return bool(self.identity.run) and self.identity.run in about.continues

    def go_over(self, about: Run) -> None:
        """Makes the folder one of the run that continues its own; nobody may be training.

        All the rest follows from that: images, frames and the checkpoint name their run, and
        what is of an earlier one is realigned by the next trainer. It does not matter which of
        them are, so this may end anywhere.
        """
        log.info(
            f"the server's disk was lost and its run rebuilt: {self.region} goes over from run "
            f"{self.identity.run} to {about.run} with what it holds"
        )
        # Before the identity: what was reported and heard of the old run is not of the new one.
        self._keep(self.mailbox.forget_news)
        known = {*self.identity.was, self.identity.run}
        was = tuple(run for run in about.continues if run in known)
        new = {"run": about.run, "was": was, "owner": secrets.token_hex(8), "boot": 1, "high": -1}
        self._remember(replace(self.identity, **new, renamed=False))

    def begin_anew(self, about: Run) -> None:
        """Makes the folder a new one; interrupted, it is still one of the old run."""
        log.info(f"run {self.identity.run} trained nothing; beginning anew in run {about.run}")
        try:
            self.mailbox.clear()
        except OSError as error:
            raise _unwritable(self.mailbox.folder, error) from None
        self._remember(FolderOwner(secrets.token_hex(8), 1, region=self.region))

    def check(self, about: Run) -> None:
        """Refuses a server whose run is not the one of this folder and this spec."""
        if self.identity.run and self.identity.run != about.run:
            raise SpecError(
                f"{self.mailbox.folder} belongs to run {self.identity.run}, "
                f"the server runs {about.run}.",
                hint="Give this worker another folder with --dir, or delete the old one.",
            )
        # A worker may come with any settings that the run has had: it is told the newest.
        if self.shared.spec_digest not in (about.spec_digest, *about.digests):
            lines = "\n".join(differences(about.settings, self.shared.settings))
            raise SpecError(
                f"The server's run has other settings than this spec:\n{lines}",
                hint="Start this worker with the spec of the server, or change the run itself "
                "with `diloco amend` on the server.",
            )
        if about.layout_digest != self.shared.layout_digest:
            raise SpecError(
                f"The server cuts the model differently: layout {about.layout_digest[:12]}… "
                f"there, {self.shared.layout_digest[:12]}… here.",
                hint="The two sides run different versions; compare `diloco --version`.",
            )

    def join(self, server: Client, run: str, *, wait: float) -> Joined | None:
        """Takes the lease, after another worker if need be; None when told to leave meanwhile."""
        while True:
            try:
                joined = self.ask(partial(self._join, server), wait=wait)
            except OlderCopy as error:
                log.info(f"{error.message}; going on under a new name")
                owner = secrets.token_hex(8)
                self._remember(replace(self.identity, owner=owner, boot=1, renamed=True))
                continue
            if joined is not None:
                self._remember(replace(self.identity, run=run, high=joined.high))
                self._refuse_older_server(joined)
                self.ask(partial(self._refuse_other_history, server, joined), wait=wait)
            return joined

    def _join(self, server: Client) -> Joined:
        return server.join(
            self.region,
            owner=self.identity.owner,
            boot=self.identity.boot,
            spec_digest=self.shared.spec_digest,
            layout_digest=self.shared.layout_digest,
            order=self.order,
            key=self.identity.key,
        )

    def ask(self, question: Callable[[], T], *, wait: float) -> T | None:
        """Asks until the server answers; None when told to leave meanwhile.

        A server that is not there is waited for; a region that another worker holds is
        waited for without end, because that is what a stand-by does.
        """
        deadline, said = time.monotonic() + wait, ""
        while not self.wakeup.stop_reason:
            pause = ASK_AGAIN
            try:
                return question()
            except LinkError as error:
                # Before the first answer, somebody is there to mend it.
                hopeless = isinstance(error, Untrusted) and wait < float("inf")
                if hopeless or time.monotonic() >= deadline:
                    raise error if hopeless or error.answered else _nobody(error) from None
                why = "waiting for the server"
                detail = error.message
            except Held as error:
                why, detail = "waiting to take over", error.message
                pause = min(error.retry_seconds, LONGEST_PAUSE)
            if why != said:
                log.info(f"{why}: {detail}")
                said = why
            self.wakeup.pause(pause)
        return None

    def remember_terms(self, terms: Amendments) -> None:
        """Keeps the amendments that the server has, which may be fewer than we had heard of."""
        if terms != self.mailbox.terms():
            self._keep(partial(self.mailbox.write_terms, terms))

    def _remember(self, identity: FolderOwner) -> None:
        self.identity = identity
        self._keep(partial(self.mailbox.write_identity, identity))

    def _keep(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            raise _unwritable(self.mailbox.folder, error) from None

    def _refuse_older_server(self, joined: Joined) -> None:
        for number, version in enumerate(joined.versions):
            have = self.mailbox.image_version(number)
            if have > version:
                raise StoreError(
                    f"This region holds version {have} of fragment {number}, but the server's "
                    f"newest is {version}: the server was restored from an older copy.",
                    hint=SET_BACK,
                )

    def _refuse_other_history(self, server: Client, joined: Joined) -> None:
        """Raises if the server published other weights under a number that we hold.

        Older numbers show themselves when the next version is fetched: see `images`.
        """
        for number, version in enumerate(joined.versions):
            have, published = self.mailbox.image_name(number)
            if have != version:
                continue
            latest = server.latest(number, after=-1, wait=0)
            if latest and latest.version == have and latest.published != published:
                digests = f"{latest.published[:12]} there, {published[:12]} here:"
                raise other_history(number, have, f"its digest, {digests}")


def _nobody(error: LinkError) -> LinkError:
    over = "A run that is finished is served no longer: `diloco status` on the server's host."
    return LinkError(error.message, hint=f"{error.hint or ''} {over}".strip())


def _unwritable(folder: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{folder} cannot be written: {error.strerror}.",
        hint="Free some space or fix the permissions, or choose another folder with --dir.",
    )


def order_of(spec: RunSpec, region: str) -> TextOrder | None:
    """How a region reads which text; None if it cannot be read, and the trainer says why."""
    inner = spec.inner_of(region)
    try:
        dataset = datasets.build(spec.data_of(region))
        stream = dataset.open(spec.seed, inner.batch, inner.sequence)
    # A dataset may be somebody else's code, and this is no place to judge it.
    except Exception as error:
        log.info(f"the text cannot be read: {error}")
        return None
    return TextOrder(**asdict(stream.order.named))


def differences(there: Any, here: Any, path: str = "") -> Iterator[str]:
    """Lists the keys of two settings that differ, with both values."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in dict.fromkeys([*there, *here]):
            inner = f"{path}.{key}" if path else str(key)
            yield from differences(there.get(key), here.get(key), inner)
    elif there != here:
        yield f"  {path}: {there!r} there, {here!r} here"
