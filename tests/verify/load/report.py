"""What a load amounted to: figures, goals, and whether the journal agrees with the clients."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco_cli.core.journal_records import decode_all
from diloco_cli.core.ledger import Ledger
from diloco_cli.server.store.journal import read_journal
from tests.verify.load.clients import Outcome

RATE_GOAL = 50.0
FLAT = 1.1
"""The last minute's memory beside the first one's after the warm-up."""
MINUTE = 60.0


@dataclass(frozen=True)
class Sample:
    """The memory of a process at one moment, in MB; `anonymous` is that without mapped files."""

    second: float
    resident: float
    anonymous: float

    @staticmethod
    def of(pid: int, second: float) -> Sample:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        said = dict(line.split(":", 1) for line in lines)
        resident, anonymous = (int(said[key].split()[0]) for key in ("VmRSS", "RssAnon"))
        return Sample(round(second, 1), resident * 1024 / 1e6, anonymous * 1024 / 1e6)


def figures(
    outcomes: Sequence[Outcome],
    samples: Sequence[Sample],
    *,
    began: float,
    seconds: float,
    server_cpu: float,
) -> dict[str, Any]:
    uploads = [each for outcome in outcomes for each in outcome.uploads]
    # What was acknowledged after the time was sent in it, but does not count.
    counted = [each for each in uploads if each[0] < began + seconds]
    minutes = Counter(int((at - began) // MINUTE) for at, _, _ in counted)
    lengths = [min(MINUTE, seconds - MINUTE * m) for m in range(-int(-seconds // MINUTE))]
    waits = sorted(took for _, took, _ in counted) or [0.0]
    rate, memory = len(counted) / seconds, _memory(samples, seconds)
    return {
        "seconds": seconds,
        "acknowledged": len(counted),
        "per_second": rate,
        "per_second_by_minute": [minutes[m] / length for m, length in enumerate(lengths)],
        "bytes_each": statistics.mean([size for _, _, size in counted] or [0]),
        "upload_p50": waits[len(waits) // 2],
        "upload_p99": waits[int(0.99 * len(waits))],
        "retries": dict(sum((outcome.retries for outcome in outcomes), Counter())),
        "refused": dict(sum((outcome.refused for outcome in outcomes), Counter())),
        "unmerged": sum(outcome.unmerged for outcome in outcomes),
        "server_cpu_seconds": server_cpu,
        "client_cpu_seconds": sum(outcome.cpu_seconds for outcome in outcomes),
        "memory": memory,
        "samples": [asdict(sample) for sample in samples],
        "met": rate >= RATE_GOAL and memory["ratio"] <= FLAT,
    }


def _memory(samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """Compares a minute after the warm-up with the last one; of a short load, fifths of it."""
    part = min(MINUTE, seconds / 5)
    last_from = max(sample.second for sample in samples) - part
    early = [s for s in samples if part <= s.second < 2 * part] or samples[:1]
    late = [s for s in samples if s.second >= last_from]
    first, last = (statistics.median(s.resident for s in group) for group in (early, late))
    return {
        "warm_seconds": part,
        "first_mb": first,
        "last_mb": last,
        "ratio": last / first,
        "most_mb": max(sample.resident for sample in samples),
        "anonymous_ratio": statistics.median(s.anonymous for s in late)
        / statistics.median(s.anonymous for s in early),
    }


def audit(server: Path, fragments: int, outcomes: Sequence[Outcome]) -> list[str]:
    """Says where the journal differs from what clients were told: merged once, each of them."""
    content = read_journal(server / "journal")
    ledger = Ledger.folded(fragments, decode_all(content.records, base=content.base))
    faults = []
    for outcome in outcomes:
        for (region, fragment), told in outcome.told.items():
            slot = ledger.slots[fragment]
            applied, merged = slot.applied.get(region, 0.0), slot.merged.get(region, "")
            if (applied, merged) != (told.tokens, told.last):
                faults.append(
                    f"{region} {fragment}: {told.frames} frames with {told.tokens:g} tokens up to "
                    f"{told.last[:12]} were acknowledged, {applied:g} up to {merged[:12]} merged"
                )
    return faults


def text(found: dict[str, Any]) -> str:
    memory, seconds = found["memory"], found["seconds"]
    minutes = " ".join(f"{rate:.0f}" for rate in found["per_second_by_minute"])
    cpu = [
        found[f"{who}_cpu_seconds"] / found["seconds_with_drain"] for who in ("server", "client")
    ]
    lines = [
        f"{found['clients']} clients, {seconds:.0f} s, {found['bytes_each'] / 1e6:.2f} MB each",
        f"acknowledged   {found['acknowledged']}, {found['per_second']:.1f}/s "
        f"(goal {RATE_GOAL:g}); by minute {minutes}",
        f"one upload     p50 {found['upload_p50']:.2f} s, p99 {found['upload_p99']:.2f} s",
        f"told later     {found['retries'] or 'never'}",
        f"refused        {found['refused'] or 'none'}",
        f"memory         {memory['first_mb']:.0f} MB after {memory['warm_seconds']:.0f} s, "
        f"{memory['last_mb']:.0f} MB at the end: × {memory['ratio']:.3f} (goal {FLAT:g}); "
        f"most {memory['most_mb']:.0f} MB",
        f"processors     server {cpu[0]:.2f}, clients {cpu[1]:.2f} of {found['cores']}; "
        f"load before {found['load_before'][0]:.1f}, after {found['load_after'][0]:.1f}",
        f"journal        {len(found['faults'])} differences, {found['unmerged']} not merged",
        *found["faults"][:10],
        "goal met" if found["met"] and not found["faults"] else "goal missed",
    ]
    return "\n".join(lines)
