"""The traffic between a region's mailbox and the server, for as long as one epoch lasts.

    heartbeat   progress ─▶ server       news ─▶ mailbox      at least every quarter lease
                                         newer terms ─▶ mailbox
    calls       waiting GET              news ─▶ mailbox
    upload      outbox ─▶ server         its answer ─▶ fate
    download    newer versions ─▶ image
    average     the run's average ─▶ ema.safetensors          where it is to be measured

Threads with a connection each, and more of them for a long body: a link that is full
of weights never makes a heartbeat wait. A server that is away stops none of them for good:
they try again until it is back, and meanwhile the region trains on. What ends them is a
new epoch, an answer a person has to look at, or the agent itself.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from diloco_cli.errors import DilocoError, LinkError, RunFailed, WireError
from diloco_cli.net.client import Client, FencedError, Gone
from diloco_cli.net.options import DEFAULTS, ONCE, Options, Retry, Timeouts
from diloco_cli.net.transfer.throughput import Throughput
from diloco_cli.observe.events import EventLog
from diloco_cli.observe.metrics import blocked_share, staleness
from diloco_cli.observe.metrics_file import MetricsFile, Traffic
from diloco_cli.system.failpoints import reach
from diloco_cli.system.wakeup import Wakeup
from diloco_cli.wire.messages import (
    Amendments,
    Heartbeat,
    Joined,
    LaneAssignment,
    News,
    Run,
    TrainerProgress,
)
from diloco_cli.worker.agent.average_fetch import AverageFetch
from diloco_cli.worker.agent.link_state import CONTROL, LinkState
from diloco_cli.worker.agent.published_weights import PublishedWeights
from diloco_cli.worker.mailbox import Fate, Mailbox, Stamp, stamp

log = logging.getLogger(__name__)

SHORTEST_GAP = 0.05
"""Between two heartbeats, however often the trainer has progressed."""
PATIENT = Retry(first=0.25, most=10.0)
LONGEST_WHY = 1000
TRAINING_FACTS = ("loss", "learning_rate", "gradient_norm", "tokens_per_second", "mfu")
"""What a line of the metrics takes from the trainer's report as it is."""
FINAL = ("returned", "refused", "foreign", "merged")


class PostedFrame(NamedTuple):
    """What the outbox holds of one fragment."""

    fragment: int
    digest: str
    base: int
    clock: int


@dataclass(frozen=True, slots=True)
class Idle:
    """No trainer trains, and why; the report in the mailbox is an earlier trainer's."""

    why: str = ""


class Reporting:
    """The trainer has reported since it was started: its report holds."""


class SyncThreads:
    """Moves one region's frames, news and versions under one epoch."""

    FETCHING = "fetching the published weights"

    def __init__(
        self,
        mailbox: Mailbox,
        region: str,
        joined: Joined,
        *,
        connect: Callable[..., Client],
        options: Options = DEFAULTS,
        events: EventLog,
        on_mail: Callable[[], None],
        on_change: Callable[[], None],
        retiring: bool = False,
    ) -> None:
        """`on_mail` wakes the trainer; `on_change` wakes the agent.

        With `retiring` the trainer is told that the end has come: it trains no more, and what it
        holds is asked for.
        """
        self.mailbox, self.region, self.epoch = mailbox, region, joined.epoch
        self.news: News = joined
        self.trouble: DilocoError | None = None
        """What only a person can fix, or `FencedError`."""
        self.up_to_date = threading.Event()
        """Set once every image is as new as the server's was when we joined."""
        self.closed, self.retiring = threading.Event(), retiring
        self.trainer: Idle | Reporting = Idle()
        """What the agent knows of the trainer; the agent sets it."""
        self.restarts = 0
        self.follows = 0
        """Number of the terms that the trainer works under; the agent sets it."""
        self.remark = ""
        """What else people should know of the region; the agent sets it."""
        identity = mailbox.identity()
        self._was = identity.was if identity else ()
        self.terms = mailbox.terms()
        """The newest amendments that are on our disk."""
        self._connect, self._options, self._events = connect, options, events
        self._metrics, self._moved = MetricsFile(mailbox.folder), Traffic()
        self._on_mail, self._on_change = on_mail, on_change
        waiting = ("heartbeat", "upload", "download", "average")
        self._wakeups = {name: Wakeup() for name in waiting}
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._images = PublishedWeights(mailbox, len(joined.versions))
        self._average = AverageFetch(mailbox)
        self._follows_average = False
        self._frames: dict[int, tuple[Stamp, PostedFrame]] = {}
        self._unreadable: dict[int, WireError] = {}
        """By fragment: why what lies in the outbox is no frame that could be sent."""
        self._fates: dict[int, Fate] = {}
        self._written = ""
        self._lanes: object = None
        self._link = LinkState()
        self._beats = itertools.count(1)
        self._links: dict[str, Throughput] = {}
        """The measured links, by the thread that uses each."""

    def start(self) -> None:
        self.take(self.news)
        for name, act in (
            ("heartbeat", self._heartbeat),
            ("calls", self._calls),
            ("upload", self._upload),
            ("download", self._download),
        ):
            self._begin(name, act)

    def _begin(self, name: str, act: Callable[[Client], None]) -> None:
        thread = threading.Thread(target=self._keep, args=(name, act), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self, seconds: float) -> None:
        """Waits until the threads are gone after `close`, so that none writes late."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        self.closed.set()
        for wakeup in self._wakeups.values():
            wakeup.wake()

    def renew(self, options: Options) -> None:
        """Goes over to other credentials, each thread when it has done what it is at."""
        self._options = options
        for wakeup in self._wakeups.values():
            wakeup.wake()

    def wake(self, words: bytes = b"posted progress") -> None:
        """The trainer has posted a frame or reported progress."""
        if b"posted" in words:
            self._wakeups["upload"].wake()
        if b"progress" in words:
            self._wakeups["heartbeat"].wake()

    def take(self, news: News, *, known: int = -1) -> None:
        """Puts news into the mailbox, once, and wakes the threads it concerns.

        `known` is the number of what we had heard when we asked. Older news than that come
        from a server that was restored from a copy; others were overtaken on another connection.
        """
        with self._lock:
            if self.closed.is_set():
                return
            if known <= news.n < self.news.n:
                # Overtaken, but for what only answers to heartbeats say.
                news = self.news.model_copy(update={"until": news.until})
            if news.until is None:
                news = news.model_copy(update={"until": self.news.until})
            self.news = news
            text = news.model_dump_json(include=set(News.model_fields) - {"fates", "lanes"})
            changed = self._granted(news.lanes) | (text != self._written)
            if changed:
                told = news.model_copy(update={"end": True}) if self.retiring else news
                self.mailbox.write_calls(told)
                self._written = text
            for number, decided in news.fates.items():
                fate = Fate(decided.digest, decided.fate, decided.why)
                changed |= self._decided(number, fate)
            self._forget_lost(news)
            changed |= self._images.doubt(news.mend)  # Or raises: see `_repeat`.
        if news.terms > self.terms.terms:
            self._wakeups["heartbeat"].wake()
        if changed:
            self._on_mail()
            self._wakeups["download"].wake()
            self._on_change()

    def _granted(self, lanes: LaneAssignment | None) -> bool:
        """Keeps what the trainer is to read, unless it knows; positions only say where to begin."""
        if lanes is None:
            return False
        grants = {lane: grant for lane, (grant, _) in lanes.lanes.items()}
        known = (lanes.order, lanes.count, grants, lanes.asked)
        if known == self._lanes:
            return False
        self.mailbox.write_lanes(lanes)
        self._lanes = known
        return True

    def _forget_lost(self, news: News) -> None:
        """Sends again what the server accepted and no longer knows of: it was restored.

        News may be older than the acceptance; then the same answer comes once more.
        """
        for number, fate in list(self._fates.items()):
            known = news.fates.get(number)
            if fate.fate == "pending" and (known is None or known.digest != fate.digest):
                del self._fates[number]
                self._wakeups["upload"].wake()

    def unsent(self) -> list[PostedFrame]:
        """Lists the frames in the outbox that can be sent and whose fate is unknown."""
        frames = [self._posted(number) for number in range(len(self.news.versions))]
        return [
            frame for frame in frames if frame and self._fate(frame.fragment).digest != frame.digest
        ]

    def report(self, *, stopping: bool = False) -> Heartbeat:
        """Puts a heartbeat together from the trainer's progress and what the agent knows."""
        progress = self.mailbox.progress() or TrainerProgress.none(len(self.news.versions))
        fields = dict(progress)
        if isinstance(self.trainer, Idle):
            fields |= {"training": False, "why": self.trainer.why, "divergence": None}
            if not self.up_to_date.is_set() and self.trainer.why == self.FETCHING:
                have, all_of = len(self._images.holds), len(self.news.versions)
                fields["why"] = f"{self.FETCHING}: {have} of {all_of} fragments are here"
            told = self.news.lanes
            # An earlier trainer may have read another text than we have joined with.
            if told and progress.reading and progress.reading.order.digest != told.order:
                fields["reading"] = None
        if beside := [text for text in (self.remark, self._link.hindrance) if text]:
            own = [] if fields["training"] else [fields["why"]]
            fields["why"] = "; ".join(filter(None, [*own, *beside]))[:LONGEST_WHY]
        return Heartbeat(
            **fields,
            restarts=self.restarts,
            terms=self.follows,
            images=dict(self._images.holds),
            mended=self._images.mended,
            link_up=self._rate("upload"),
            link_down=self._rate("download"),
            epoch=self.epoch,
            n=next(self._beats),
            until=self.news.until,
            stopping=stopping,
            retiring=self.retiring,
        )

    def _rate(self, name: str) -> float | None:
        link = self._links.get(name)
        return None if link is None or link.rate is None else round(link.rate, 1)

    # The threads

    def _keep(self, name: str, act: Callable[[Client], None]) -> None:
        """Repeats one of the duties until `close`."""
        while not self.closed.is_set():
            self._keep_with(self._options, name, act)

    def _keep_with(self, given: Options, name: str, act: Callable[[Client], None]) -> None:
        """Repeats it with these options, as long as they are in force."""
        try:
            # Short calls, but many: they share their core with the training.
            options = replace(given, retry=ONCE, control_backend="pyreqwest")
            if name == "heartbeat":
                # A heartbeat that hangs must not cost the lease that it is there to renew.
                soon = Timeouts(answer=min(Timeouts.answer, self.news.lease_seconds / 3))
                options = replace(options, timeouts=soon)
            with self._connect(options, stop=self.closed) as client:
                self._links[name] = client.up if name == "upload" else client.down
                self._repeat(name, act, client, lambda: self._options is given)
        except Exception as error:  # A silent thread would be a region that starves.
            self._give_up(RunFailed(f"Unexpected {error!r} in the {name} thread."))

    def _repeat(
        self, name: str, act: Callable[[Client], None], client: Client, holds: Callable[[], bool]
    ) -> None:
        failures = 0
        while not self.closed.is_set() and holds():
            began = time.monotonic()
            try:
                act(client)
            except FencedError as error:
                return self._give_up(error)
            except (LinkError, WireError, Gone, OSError) as error:
                failures += 1
                if not isinstance(error, Gone):  # A newer version is there instead.
                    self._is_away(name, error)
                self.closed.wait(PATIENT.pause(failures, chance=random.random()))
            except DilocoError as error:
                return self._give_up(error)
            else:
                failures = 0
                self._is_back(name, began)

    def _give_up(self, error: DilocoError) -> None:
        self.trouble = self.trouble or error
        self.close()
        self._on_change()

    def note_metrics(self, report: TrainerProgress, *, last: bool = False) -> None:
        """Writes down how the training goes, if it does and a line is due."""
        if isinstance(self.trainer, Idle) and not last:
            return
        up, down = self._links.get("upload"), self._links.get("download")
        moved = Traffic(up.total if up else 0, down.total if down else 0)
        self._metrics.traffic += moved - self._moved
        self._moved = moved
        fields = {
            "tokens": self.news.merged,
            "trained": round(max(report.tokens.trained), 1),
            **{name: getattr(report, name) for name in TRAINING_FACTS},
            "blocked": blocked_share(report.blocked, report.worked),
            "staleness": staleness(
                self.news.versions, [fragment.version for fragment in report.fragments]
            ),
        }
        self._metrics.note(report.step, report.worked + report.blocked, fields, last=last)

    def _heartbeat(self, client: Client) -> None:
        known, report, began = self.news.n, self.report(), time.monotonic()
        self.note_metrics(report)  # Before it is sent: a server that is away loses no line.
        if self._average.is_due(self.news, report, now=began):
            self._wakeups["average"].wake()
            if not self._follows_average:  # Most runs and regions never need it.
                self._follows_average = True
                self._begin("average", self._fetch_average)
        self.take(client.heartbeat(self.region, report), known=known)
        self._is_back(CONTROL, began)  # What follows is waiting.
        if self.news.terms > self.terms.terms:
            self._learn_terms(client)
        self.closed.wait(SHORTEST_GAP)
        self._wakeups["heartbeat"].pause(self.news.lease_seconds / 4)

    def _learn_terms(self, client: Client) -> None:
        """Makes the newest amendments durable, then known to the agent."""
        terms = terms_of(client.run())
        self.mailbox.write_terms(terms)
        reach("terms.heard")
        self.terms = terms
        self._on_change()

    def _calls(self, client: Client) -> None:
        news = client.calls(self.region, after=self.news.n, epoch=self.epoch)
        if news is not None:
            self.take(news)

    def _upload(self, client: Client) -> None:
        for posted in self.unsent():
            if self.closed.is_set():
                return
            answer = client.submit(
                posted.fragment,
                self.region,
                posted.base,
                posted.clock,
                self.mailbox.outbox_file(posted.fragment),
                epoch=self.epoch,
            )
            forgotten = answer.fate == "foreign" and not answer.merged
            fate = Fate(posted.digest, answer.fate, answer.why, forgotten)
            with self._lock:
                matters = self._decided(posted.fragment, fate)
            if matters:
                self._on_mail()
            self._on_change()
        for error in list(self._unreadable.values()):
            raise error  # Once the others are through: it says what people should know.
        self._wakeups["upload"].pause(self.news.lease_seconds)

    def _download(self, client: Client) -> None:
        for number, version in enumerate(self.news.versions):
            if self._images.version(number) < version and not self.closed.is_set():
                self._fetch(client, number, version)
        if self._was:
            reach("realign.fetched")
        self.up_to_date.set()
        self._on_change()
        self._wakeups["download"].pause(self.news.lease_seconds)

    def _fetch_average(self, client: Client) -> None:
        progress = self.mailbox.progress()
        due = self._average.is_due(self.news, progress, now=time.monotonic())
        if progress and due and self._average.fetch(client, progress):
            self._on_mail()
        wakeup = self._wakeups["average"]
        if wakeup.wait(self.news.lease_seconds):
            wakeup.clear()

    def _fetch(self, client: Client, number: int, version: int) -> None:
        image, why = self._images.fetch(client, number, version)
        if self.closed.is_set():
            return
        self._images.put(number, image)
        self._on_mail()
        if why:
            log.info(f"fragment {number}, version {image.version} was fetched whole: {why}")

    # What they share

    def _posted(self, number: int) -> PostedFrame | None:
        """Says what lies in the outbox; a frame is read again only when it was replaced."""
        file = self.mailbox.outbox_file(number)
        newest, cached = stamp(file), self._frames.get(number)
        if cached and cached[0] == newest:
            return cached[1]
        try:
            frame = self.mailbox.frame(number)
        except WireError as error:
            self._unreadable[number] = WireError(f"{file} is damaged: {error.message}")
            return None
        self._unreadable.pop(number, None)
        if frame is None or frame.header.run in self._was:
            return None  # A frame of a run that was lost is nobody's any more.
        posted = PostedFrame(number, frame.digest, frame.header.base, frame.header.clock)
        if newest is not None:  # Otherwise it was posted just now, and is looked at once more.
            self._frames[number] = newest, posted
        return posted

    def _fate(self, number: int) -> Fate:
        return self._fates.get(number, Fate("", ""))

    def _decided(self, number: int, fate: Fate) -> bool:
        """Takes note of what became of a frame; says whether the trainer has to know."""
        posted, known = self._posted(number), self._fate(number)
        # Answers about older frames would hide the one that the trainer waits for.
        if posted is None or posted.digest != fate.digest or known == fate:
            return False
        if known.digest == fate.digest and known.fate in FINAL and fate.fate == "pending":
            return False
        # Waiting changes nothing for the trainer, and that it is merged an image will say.
        matters = fate.fate not in ("pending", "merged")
        if matters:
            self.mailbox.write_fate(number, fate)
        self._fates[number] = fate
        return matters

    def _is_away(self, name: str, error: Exception) -> None:
        """Says once that something does not work, however many threads notice."""
        with self._lock:
            before = self._link.lost_at
            why = self._link.failed(name, error, now=time.monotonic())
            lost = before is None and self._link.lost_at is not None
        if self.closed.is_set() or not why:
            return
        if lost:
            training = ", training goes on" if isinstance(self.trainer, Reporting) else ""
            since = time.strftime("%H:%M:%S")
            log.info(f"the server is out of reach since {since}{training}: {why}")
            self._events.note("link-lost", region=self.region, why=why)
        else:
            self._warn(why)

    def _is_back(self, name: str, began: float) -> None:
        with self._lock:
            better = self._link.worked(name, began=began, now=time.monotonic())
        if self.closed.is_set():
            return
        if better.silent is not None:
            log.info(f"back in reach after {better.silent:.0f} s")
            seconds = round(better.silent, 1)
            self._events.note("link-back", region=self.region, silent_seconds=seconds)
        if better.again:
            log.info(f"no longer: {better.again}")
        if better.hindered:
            self._warn(better.hindered)

    def _warn(self, why: str) -> None:
        log.warning(why)
        self._events.note("note", region=self.region, why=why)

    @property
    def away(self) -> bool:
        """Whether the server did not answer when last asked."""
        return self._link.lost_at is not None


def terms_of(about: Run) -> Amendments:
    return Amendments(terms=len(about.amendments), amendments=about.amendments)
