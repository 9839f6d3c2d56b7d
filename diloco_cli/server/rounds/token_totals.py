"""What do the journal and the reports add up to?

The ledger holds what decides; these totals hold what people want to see: tokens by fate,
shares, bytes, times. It is a fold over the same records, so a restarted server does not
forget who did what. Nothing is ever decided on it.

Tokens are booked for each folder of a region (its `owner`), fragment by fragment. A
region that lost its disk starts its books again, and the old ones stay as they were:

    trained = applied + pending + refused + discarded        in each folder and fragment

`applied` is the server's own sum over what it published; the rest is what the region
reports. So the equation fails if anything was merged twice, lost or made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, assert_never

from diloco_cli.core.journal_records import (
    Entry,
    FragmentCalled,
    FrameDecided,
    MemberDropped,
    Record,
    RegionJoined,
    RoundClosed,
    RunEnded,
    RunFinished,
    Snapshot,
    VersionPublished,
    VersionStored,
    WeightsEvaluated,
)
from diloco_cli.core.rounds import Receipt
from diloco_cli.observe.metrics import Effort
from diloco_cli.server.settings import ServerSettings
from diloco_cli.wire.messages import Heartbeat, Tokens

FATES = ("trained", "applied", "pending", "refused", "discarded")
SNAPSHOT_FIELDS = (
    "shares",
    "rounds",
    "merged_at",
    "began",
    "seconds",
    "bytes_down",
    "delta_bytes",
    "delta_values",
    "contributions",
    "elapsed",
    "published_at",
)
"""Sums that a snapshot keeps as they are."""

REPORTED_FIELDS = ("reported", "worked", "lost", "pace")
"""What an account knows from heartbeats; no snapshot keeps it, each heartbeat brings it anew."""

REST = 600.0
"""A server that is away for longer was not down but stopped, and the run rested."""


@dataclass(frozen=True, slots=True)
class TokenFates:
    """Tokens by fate, of one fragment in one folder."""

    trained: float = 0.0
    applied: float = 0.0
    pending: float = 0.0
    refused: float = 0.0
    discarded: float = 0.0

    def __add__(self, other: TokenFates) -> TokenFates:
        return TokenFates(*(getattr(self, fate) + getattr(other, fate) for fate in FATES))

    @property
    def gap(self) -> float:
        return self.trained - (self.applied + self.pending + self.refused + self.discarded)


@dataclass(slots=True)
class RegionTotals:
    """One folder of a region: what was merged for it, and what it says."""

    applied: list[float]
    posted: dict[int, TokenFates] = field(default_factory=dict)
    """By fragment: the totals in the header of the newest frame."""
    reported: Tokens | None = None
    worked: float = 0.0
    """Seconds in inner steps, as the region says."""
    lost: float = 0.0
    """Tokens trained and lost with a trainer that died, as the region says."""
    pace: float = 0.0

    def update_from_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.reported, self.worked = heartbeat.tokens, heartbeat.worked
        self.lost, self.pace = heartbeat.lost, heartbeat.pace

    def fates(self, fragment: int) -> TokenFates:
        """The region's newest report on a fragment, with the server's own `applied`.

        A trainer that died right after posting has reported more in the frame than in any
        heartbeat, so the report that knows of more training counts.
        """
        report = self.posted.get(fragment)
        if self.reported is not None:
            heard = TokenFates(*(getattr(self.reported, fate)[fragment] for fate in FATES))
            report = heard if report is None or heard.trained >= report.trained else report
        applied = self.applied[fragment]
        if report is None:
            return TokenFates(trained=applied, applied=applied)
        # What is merged but not yet adopted is still pending in the region's own books.
        pending = report.pending - (applied - report.applied)
        return TokenFates(report.trained, applied, pending, report.refused, report.discarded)


class RunTotals:
    """Sums over a run's journal and its regions' reports."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.accounts: dict[tuple[str, str], RegionTotals] = {}
        self.shares: dict[str, float] = {}
        """Sum over rounds of each region's share of the merged weight."""
        self.rounds = 0
        self.merged_at: dict[str, float] = {}
        self.began: float | None = None
        self.seconds = 0.0
        """Served so far, all starts of the server together."""
        self.bytes_down = 0
        self.delta_bytes = 0
        self.delta_values = 0
        self.contributions = 0
        """Sum over rounds of their members."""
        self.elapsed = 0.0
        """Until the last round: the time served and the outages in between."""
        self.published_at: float | None = None
        self._owner: dict[str, str] = {}
        self._waiting: dict[tuple[str, int], tuple[str, Receipt]] = {}

    def apply(self, record: Record) -> None:
        """Adds one record of the journal."""
        if self.began is None:
            self.began = record.time
        match record:
            case RegionJoined():
                self._owner[record.region] = record.owner
                self.account(record.region)
            case FrameDecided():
                self._decided(record)
            case VersionPublished():
                self._published(record)
            case Snapshot():
                self._restore(record.tally)
            case FragmentCalled() | RoundClosed() | MemberDropped() | VersionStored():
                pass
            case RunEnded() | RunFinished() | WeightsEvaluated():
                pass
            case _:
                assert_never(record)

    def snapshot(self) -> dict[str, Any]:
        """What the journal added up to, as plain data; reports are heard again soon."""
        accounts = [
            {
                "region": region,
                "owner": owner,
                "applied": list(account.applied),
                "posted": {str(f): asdict(fates) for f, fates in account.posted.items()},
            }
            for (region, owner), account in self.accounts.items()
        ]
        waiting = [
            {"region": region, "fragment": fragment, "owner": owner, "receipt": asdict(receipt)}
            for (region, fragment), (owner, receipt) in self._waiting.items()
        ]
        sums = {name: getattr(self, name) for name in SNAPSHOT_FIELDS}
        return {"accounts": accounts, "waiting": waiting, "owner": dict(self._owner), **sums}

    def _restore(self, record: Entry) -> None:
        before, self.accounts = self.accounts, {}
        for each in record["accounts"]:
            key = (each["region"], each["owner"])
            posted = {int(f): TokenFates(**fates) for f, fates in each["posted"].items()}
            self.accounts[key] = RegionTotals(list(each["applied"]), posted)
            if known := before.get(key):
                kept = {name: getattr(known, name) for name in REPORTED_FIELDS}
                self.accounts[key] = replace(self.accounts[key], **kept)
        self._waiting = {
            (each["region"], each["fragment"]): (each["owner"], Receipt(**each["receipt"]))
            for each in record["waiting"]
        }
        self._owner = dict(record["owner"])
        for name in SNAPSHOT_FIELDS:
            kept = record[name]
            setattr(self, name, dict(kept) if isinstance(kept, dict) else kept)

    def account(self, region: str) -> RegionTotals:
        """The account of the folder that speaks for the region now."""
        key = (region, self._owner.get(region, ""))
        if key not in self.accounts:
            self.accounts[key] = RegionTotals([0.0] * len(self._settings.sizes))
        return self.accounts[key]

    def _decided(self, record: FrameDecided) -> None:
        receipt = record.receipt
        if totals := record.totals:
            fates = TokenFates(
                **{fate: totals.get(fate, 0.0) for fate in FATES if fate != "pending"}
            )
            fates = replace(fates, pending=fates.gap)
            self.account(receipt.region).posted[receipt.fragment] = fates
        if record.fate == "pending":
            owner = self._owner.get(receipt.region, "")
            self._waiting[receipt.region, receipt.fragment] = (owner, receipt)

    def _published(self, record: VersionPublished) -> None:
        fragment = record.fragment
        weights: dict[str, float] = {}
        for region in record.members:
            owner, receipt = self._waiting.pop((region, fragment))
            self.accounts[region, owner].applied[fragment] += receipt.tokens
            weights[region] = self._settings.weight(receipt)
            self.merged_at[region] = record.time or 0.0
        for region, weight in weights.items():
            share = weight / sum(weights.values())
            self.shares[region] = self.shares.get(region, 0.0) + share
        self.rounds += 1
        self.contributions += len(record.members)
        if record.time is not None:
            self.elapsed = self.elapsed_at(record.seconds, record.time)
            self.published_at = record.time
        self.delta_bytes += record.bytes
        self.delta_values += self._settings.sizes[fragment]
        self.bytes_down = max(self.bytes_down, record.bytes_down)
        self.seconds = max(self.seconds, record.seconds)

    def elapsed_at(self, seconds: float, wall: float) -> float:
        """How long the run has lasted, when it has been served for `seconds` and it is `wall`.

        The time that the server was down counts, the time that the run rested does not.
        """
        since = self.began if self.published_at is None else self.published_at
        served = max(0.0, seconds - self.seconds)
        passed = served if since is None else max(served, wall - since)
        return self.elapsed + (passed if passed - served < REST else served)

    def effort(self, region: str) -> Effort:
        """What a region has done, all its folders together."""
        own = [account for (name, _), account in self.accounts.items() if name == region]
        sizes = self._settings.sizes
        sums = TokenFates()
        for account in own:
            for fragment, size in enumerate(sizes):
                fates = account.fates(fragment)
                sums += TokenFates(*(getattr(fates, fate) * size / sum(sizes) for fate in FATES))
        return Effort(
            worked=sum(account.worked for account in own),
            trained=sums.trained + sum(account.lost for account in own),
            kept=sums.applied + max(0.0, sums.pending),
            applied=sums.applied,
            pace=max((account.pace for account in own), default=0.0),
        )

    def lost(self, region: str) -> float:
        """Tokens that the region trained and lost with trainers that died."""
        return sum(each.lost for (name, _), each in self.accounts.items() if name == region)

    def applied(self, region: str) -> float:
        """Tokens of the region that were merged: each fragment's, averaged with their sizes."""
        sizes = self._settings.sizes
        merged = [account.applied for (name, _), account in self.accounts.items() if name == region]
        return sum(size * own[n] for own in merged for n, size in enumerate(sizes)) / sum(sizes)

    def share(self, region: str) -> float | None:
        """The region's mean share of the weight merged in a round; None before any round."""
        return self.shares.get(region, 0.0) / self.rounds if self.rounds else None

    def fates(self, *, finished: bool) -> list[TokenFates]:
        """Sums the accounts, fragment by fragment; after the end nothing is pending any more."""
        sums = []
        for fragment in range(len(self._settings.sizes)):
            total = TokenFates()
            for account in self.accounts.values():
                total += account.fates(fragment)
            if finished:
                total = replace(total, pending=0.0, discarded=total.discarded + total.pending)
            sums.append(total)
        return sums

    def balanced(self, applied: Sequence[float]) -> bool:
        """Says whether every token of every folder and fragment has exactly one fate.

        `applied` are the ledger's own sums, one for each fragment.
        """
        # A blend scales work by its share, which rounds; all else is whole numbers.
        rounding = 0.0 if self._settings.spec.sync.alpha in (0.0, 1.0) else 1e-9
        for fragment, expected in enumerate(applied):
            every = [account.fates(fragment) for account in self.accounts.values()]
            for fates in every:
                slack = rounding * max(1.0, fates.trained)
                if abs(fates.gap) > slack or fates.pending < -slack:
                    return False
            applied_here = sum(fates.applied for fates in every)
            if abs(applied_here - expected) > rounding * max(1.0, expected):
                return False
        return True
