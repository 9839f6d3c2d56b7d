"""What do the journal and the reports add up to?

The ledger holds what decides; these totals hold what people want to see: tokens by fate,
shares, bytes, times. It is a fold over the same records, so a restarted server does not
forget who did what. What was merged of a folder is held against the headers of its frames.

Tokens are booked for each folder of a region (its `owner`), fragment by fragment. A
region that lost its disk starts its books again, and the old ones stay as they were:

    trained = applied + uncounted + pending + refused + discarded     in each folder and fragment

`applied` is the server's own sum over what it published and counted, `uncounted` what it
published beyond what a claim may count; the rest is what the region reports. So the equation
fails if anything was merged twice, lost or made up. A report that contradicts what is merged
is not added to anything: what the headers of accepted frames said is known to hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, assert_never

from diloco_cli.core.journal_records import (
    Entry,
    FragmentCalled,
    FrameDecided,
    LanesDealt,
    MemberDropped,
    Record,
    RegionJoined,
    RegionPaced,
    RegionRetired,
    RoundClosed,
    RunBegun,
    RunEnded,
    RunFinished,
    RunRebuilt,
    RunResumed,
    Snapshot,
    TermsAmended,
    VersionPublished,
    VersionStored,
    WeightsEvaluated,
)
from diloco_cli.core.rounds import Receipt
from diloco_cli.observe.metrics import Effort
from diloco_cli.server.terms import TermsHistory
from diloco_cli.wire.messages import Heartbeat, Tokens

REPORTED_FATES = ("trained", "applied", "pending", "refused", "discarded")
"""What regions tell; for them, merged is applied."""
FATES = ("trained", "applied", "uncounted", "pending", "refused", "discarded")
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
    "chances",
    "members",
    "present",
    "elapsed",
    "published_at",
)
"""Sums that a snapshot keeps as they are."""

REPORTED_FIELDS = ("reported", "worked", "lost", "lost_with_server", "pace")
"""What an account knows from heartbeats; no snapshot keeps it, each heartbeat brings it anew."""

ROUNDING = 1e-9
"""Share of a sum by which two ways to add it up may differ."""

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
    uncounted: float = 0.0

    def __add__(self, other: TokenFates) -> TokenFates:
        sums = {fate: getattr(self, fate) + getattr(other, fate) for fate in FATES}
        return TokenFates(**sums)

    def scaled(self, share: float) -> TokenFates:
        return TokenFates(**{fate: getattr(self, fate) * share for fate in FATES})

    @property
    def gap(self) -> float:
        given = self.applied + self.uncounted + self.pending + self.refused + self.discarded
        return self.trained - given


@dataclass(slots=True)
class RegionTotals:
    """One folder of a region: what was merged for it, and what it says."""

    merged: list[float]
    """By fragment: tokens that were published, as the frames claimed them."""
    applied: list[float]
    """By fragment: tokens of these that count."""
    posted: dict[int, TokenFates] = field(default_factory=dict)
    """By fragment: the totals in the header of the newest frame."""
    reported: Tokens | None = None
    worked: float = 0.0
    """Seconds in inner steps, as the region says."""
    lost: float = 0.0
    """Tokens trained and lost with a trainer that died, as the region says."""
    lost_with_server: float = 0.0
    """Tokens merged in versions that went with the last server's disk, as the region says."""
    pace: float = 0.0

    def update_from_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.reported, self.worked = heartbeat.tokens, heartbeat.worked
        self.lost, self.pace = heartbeat.lost, heartbeat.pace
        self.lost_with_server = heartbeat.lost_with_server

    @property
    def trained(self) -> float:
        """Tokens since the folder began, of the fragment of which it trained most.

        As the region says: how far it may train is counted from there.
        """
        posted = (report.trained for report in self.posted.values())
        return max((*self.merged, *posted, *(self.reported.trained if self.reported else ())))

    def fates(self, fragment: int) -> TokenFates:
        """The region's newest report on a fragment, with the server's own `applied`.

        A trainer that died right after posting has reported more in the frame than in any
        heartbeat, so the report that knows of more training counts.
        """
        report, heard = self.posted.get(fragment), self._heard(fragment)
        if heard is not None and not self._contradicts(heard, fragment):
            report = heard
        merged, applied = self.merged[fragment], self.applied[fragment]
        if report is None:
            return TokenFates(trained=merged, applied=applied, uncounted=merged - applied)
        return replace(
            report,
            applied=applied,
            uncounted=merged - applied,
            pending=max(0.0, self._pending(report, fragment)),
        )

    def unbalanced(self) -> bool:
        """Says whether a heartbeat contradicts itself or what is merged, and so is not believed."""
        heard = [self._heard(fragment) for fragment in range(len(self.merged))]
        return any(
            report and self._contradicts(report, fragment) for fragment, report in enumerate(heard)
        )

    def _heard(self, fragment: int) -> TokenFates | None:
        """The newest heartbeat, unless the newest frame is newer."""
        if self.reported is None:
            return None
        report = {fate: getattr(self.reported, fate)[fragment] for fate in REPORTED_FATES}
        posted = self.posted.get(fragment)
        older = posted is not None and report["trained"] < posted.trained
        return None if older else TokenFates(**report)

    def _pending(self, report: TokenFates, fragment: int) -> float:
        # What is merged but not yet adopted is still pending in the region's own books.
        return report.pending - (self.merged[fragment] - report.applied)

    def _contradicts(self, report: TokenFates, fragment: int) -> bool:
        slack = ROUNDING * max(1.0, report.trained)
        made_up = report.applied - self.merged[fragment] > slack
        return made_up or abs(report.gap) > slack or self._pending(report, fragment) < -slack


class RunTotals:
    """Sums over a run's journal and its regions' reports."""

    def __init__(self, history: TermsHistory) -> None:
        self._history, self._sizes = history, history.newest.sizes
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
        """Sum over rounds of the regions that were merged."""
        self.chances = 0
        """Sum over rounds of the regions that could have been: the members of the run."""
        self.members: dict[str, float] = {}
        """Of each member: how long the run had lasted when it joined."""
        self.present: dict[str, float] = {}
        """How long a region was a member before it was last retired."""
        self.elapsed = 0.0
        """Until the last round: the time served and the outages in between."""
        self.published_at: float | None = None
        self._owner: dict[str, str] = {}
        self._waiting: dict[tuple[str, int], tuple[str, Receipt]] = {}

    def apply(self, record: Record) -> None:
        """Adds one record of the journal."""
        if self.began is None and not isinstance(record, RunBegun):
            self.began = record.time
        match record:
            case RunBegun():
                pass
            case RegionJoined():
                self._owner[record.region] = record.owner
                self.account(record.region)
                self.members.setdefault(record.region, self._lasted(record.time))
            case RegionRetired():
                self._retired(record.region, record.time)
            case FrameDecided():
                self._decided(record)
            case VersionPublished():
                self._published(record)
            case Snapshot() | RunRebuilt():
                self._restore(record.tally)
            case MemberDropped():
                self._waiting.pop((record.region, record.fragment), None)
            case TermsAmended():
                for region in record.remove:
                    self._retired(region, record.time)
            case FragmentCalled() | RoundClosed() | VersionStored():
                pass
            case RunEnded() | RunFinished() | RunResumed() | RegionPaced():
                pass
            case WeightsEvaluated() | LanesDealt():
                pass
            case _:
                assert_never(record)

    def snapshot(self) -> dict[str, Any]:
        """What the journal added up to, as plain data; reports are heard again soon."""
        accounts = [
            {
                "region": region,
                "owner": owner,
                "merged": list(account.merged),
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

    def rebuilt(self, counted: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """As `snapshot`, for a run that is rebuilt from here on.

        `counted` are each fragment's merged tokens by region, which may be more than we know of.
        No frame of this run is waited for any more: what regions hold comes under new accounts.
        """
        told = self.snapshot()
        accounts: dict[tuple[str, str], Any] = {}
        for each in told["accounts"]:
            posted: dict[str, Any] = {}
            for fragment, fates in each["posted"].items():
                merged = each["merged"][int(fragment)]
                given_up = fates["refused"] + fates["discarded"]
                known = {**fates, "applied": merged, "pending": 0.0, "uncounted": 0.0}
                posted[fragment] = {**known, "trained": merged + given_up}
            accounts[each["region"], each["owner"]] = {**each, "posted": posted}
        for fragment, tokens in enumerate(counted):
            for region, amount in tokens.items():
                known = [it for (name, _), it in accounts.items() if name == region]
                more = amount - sum(it["applied"][fragment] for it in known)
                if abs(more) > ROUNDING * max(1.0, amount):
                    zeros = {"merged": [0.0] * len(counted), "applied": [0.0] * len(counted)}
                    new = {"region": region, "owner": "", **zeros, "posted": {}}
                    account = accounts.setdefault((region, ""), new)
                    account["merged"][fragment] += more
                    account["applied"][fragment] += more
        return {**told, "accounts": list(accounts.values()), "waiting": [], "owner": {}}

    def _restore(self, record: Entry) -> None:
        before, self.accounts = self.accounts, {}
        for each in record["accounts"]:
            key = (each["region"], each["owner"])
            posted = {int(f): TokenFates(**fates) for f, fates in each["posted"].items()}
            self.accounts[key] = RegionTotals(list(each["merged"]), list(each["applied"]), posted)
            if known := before.get(key):
                kept = {name: getattr(known, name) for name in REPORTED_FIELDS}
                self.accounts[key] = replace(self.accounts[key], **kept)
        self._waiting = {
            (each["region"], each["fragment"]): (each["owner"], Receipt.of(each["receipt"]))
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
            zeros = [0.0] * len(self._sizes)
            self.accounts[key] = RegionTotals(zeros, list(zeros))
        return self.accounts[key]

    def _decided(self, record: FrameDecided) -> None:
        receipt = record.receipt
        if totals := record.totals:
            known = {fate: totals.get(fate, 0.0) for fate in REPORTED_FATES if fate != "pending"}
            fates = TokenFates(**known)
            fates = replace(fates, pending=fates.gap)
            self.account(receipt.region).posted[receipt.fragment] = fates
        if record.fate == "pending":
            owner = self._owner.get(receipt.region, "")
            receipt = replace(receipt, counted=record.counted)
            self._waiting[receipt.region, receipt.fragment] = (owner, receipt)

    def _published(self, record: VersionPublished) -> None:
        fragment = record.fragment
        weights: dict[str, float] = {}
        for region in record.members:
            owner, receipt = self._waiting.pop((region, fragment))
            self.accounts[region, owner].merged[fragment] += receipt.tokens
            self.accounts[region, owner].applied[fragment] += receipt.worth.tokens
            weights[region] = self._history[record.terms].weight(receipt)
            self.merged_at[region] = record.time or 0.0
        for region, weight in weights.items():
            share = weight / sum(weights.values())
            self.shares[region] = self.shares.get(region, 0.0) + share
        self.rounds += 1
        self.contributions += len(record.members)
        self.chances += len({*self.members, *record.members})
        if record.time is not None:
            self.elapsed = self.elapsed_at(record.seconds, record.time)
            self.published_at = record.time
        self.delta_bytes += record.bytes
        self.delta_values += self._sizes[fragment]
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

    def _lasted(self, wall: float | None) -> float:
        return self.elapsed if wall is None else self.elapsed_at(self.seconds, wall)

    def _retired(self, region: str, wall: float | None) -> None:
        joined = self.members.pop(region, None)
        if joined is not None:
            stay = max(0.0, self._lasted(wall) - joined)
            self.present[region] = self.present.get(region, 0.0) + stay

    def _fates(self, region: str, owner: str, fragment: int) -> TokenFates:
        """What became of a folder's tokens; of a retired region, what it held is given up.

        Unless it returns: then the next reports count again. What was accepted of it is merged.
        """
        fates = self.accounts[region, owner].fates(fragment)
        given_up = self._given_up(region, owner, fragment, fates)
        return replace(
            fates, pending=fates.pending - given_up, discarded=fates.discarded + given_up
        )

    def waiting(self, region: str, owner: str, fragment: int) -> float:
        """Tokens of a folder in a frame that was accepted and is not merged yet."""
        sender, receipt = self._waiting.get((region, fragment), ("", None))
        return receipt.tokens if receipt and sender == owner else 0.0

    def _given_up(self, region: str, owner: str, fragment: int, fates: TokenFates) -> float:
        if region in self.members or region not in self.present:
            return 0.0
        return max(0.0, fates.pending - self.waiting(region, owner, fragment))

    def given_up(self) -> float:
        """Tokens that retired regions held; each fragment's, averaged with their sizes."""
        sizes = self._sizes
        total = sum(
            size * self._given_up(region, owner, fragment, account.fates(fragment))
            for (region, owner), account in self.accounts.items()
            for fragment, size in enumerate(sizes)
        )
        return total / sum(sizes)

    def effort(self, region: str, elapsed: float) -> Effort:
        """What a region has done in a run of this length, all its folders together."""
        keys = [key for key in self.accounts if key[0] == region]
        own = [self.accounts[key] for key in keys]
        joined = self.members.get(region)
        stay = 0.0 if joined is None else max(0.0, elapsed - joined)
        sizes = self._sizes
        sums = TokenFates()
        for key in keys:
            for fragment, size in enumerate(sizes):
                sums += self._fates(*key, fragment).scaled(size / sum(sizes))
        return Effort(
            worked=sum(account.worked for account in own),
            trained=sums.trained + sum(account.lost for account in own),
            useful=sums.applied + sums.uncounted + sums.pending,
            applied=sums.applied,
            pace=max((account.pace for account in own), default=0.0),
            present=self.present.get(region, 0.0) + stay,
        )

    def lost(self, region: str) -> float:
        """Tokens that the region trained and lost with trainers that died."""
        return sum(each.lost for (name, _), each in self.accounts.items() if name == region)

    def lost_with_server(self) -> float:
        """Tokens merged in versions that went with the last server's disk, as regions say."""
        return sum(account.lost_with_server for account in self.accounts.values())

    def applied(self, region: str) -> float:
        """Tokens of the region that are merged and count, averaged with the fragments' sizes."""
        sizes = self._sizes
        merged = [account.applied for (name, _), account in self.accounts.items() if name == region]
        return sum(size * own[n] for own in merged for n, size in enumerate(sizes)) / sum(sizes)

    def share(self, region: str) -> float | None:
        """The region's mean share of the weight merged in a round; None before any round."""
        return self.shares.get(region, 0.0) / self.rounds if self.rounds else None

    def fates(self, *, finished: bool) -> list[TokenFates]:
        """Sums the accounts, fragment by fragment; after the end nothing is pending any more."""
        sums = []
        for fragment in range(len(self._sizes)):
            total = TokenFates()
            for region, owner in self.accounts:
                total += self._fates(region, owner, fragment)
            if finished:
                total = replace(total, pending=0.0, discarded=total.discarded + total.pending)
            sums.append(total)
        return sums

    def balanced(self, applied: Sequence[float]) -> bool:
        """Says whether every token of every folder and fragment has exactly one fate.

        `applied` are the ledger's own sums, one for each fragment.
        """
        # A blend scales work by its share, which rounds, and so does counting a part of a
        # claim; all else is whole numbers.
        whole = {settings.spec.sync.alpha for settings in self._history} <= {0.0, 1.0}
        if any(account.unbalanced() for account in self.accounts.values()):
            return False
        for fragment, expected in enumerate(applied):
            every = [account.fates(fragment) for account in self.accounts.values()]
            rounding = 0.0 if whole and not any(fates.uncounted for fates in every) else ROUNDING
            if any(abs(fates.gap) > rounding * max(1.0, fates.trained) for fates in every):
                return False
            applied_here = sum(fates.applied for fates in every)
            if abs(applied_here - expected) > rounding * max(1.0, expected):
                return False
        return True
