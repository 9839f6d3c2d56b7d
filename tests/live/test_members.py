"""A region that nobody declared joins over TLS in mid-run, contributes, and leaves for good."""

from __future__ import annotations

import shutil
import sys
from collections import Counter

import pytest

from diloco_cli.assemble import build_terms, resolve, settings_of
from diloco_cli.core.journal_records import (
    Entry,
    FrameDecided,
    LanesDealt,
    RegionRetired,
    decode_all,
)
from diloco_cli.launch import Role
from diloco_cli.net.credentials import load_credentials
from diloco_cli.server.access.issue import CredentialFolder
from diloco_cli.server.recovery.fold import fold
from diloco_cli.server.recovery.verify import replay
from diloco_cli.server.terms import TermsHistory
from tests.live.test_away import diloco
from tests.server.harness import read_journal

pytestmark = pytest.mark.live


def windows_read(records: list[Entry]) -> tuple[dict[str, int], int]:
    """Windows of merged work by region, and how many of them another one read as well."""
    grants: dict[tuple[int, int], tuple[str, int]] = {}
    furthest: dict[tuple[int, int], int] = {}
    for number, record in decode_all(records):
        if isinstance(record, LanesDealt):
            grants |= {(move.lane, number): (move.to, move.at) for move in record.moves}
        elif isinstance(record, FrameDecided) and record.fate == "pending":
            for lane, at in (record.lanes or {}).items():
                furthest[lane, at.grant] = max(at.position, furthest.get((lane, at.grant), 0))
    windows = [
        (region, lane, position)
        for (lane, grant), (region, began) in grants.items()
        for position in range(began, furthest.get((lane, grant), began))
    ]
    read = Counter(region for region, _, _ in windows)
    return dict(read), len(windows) - len({(lane, position) for _, lane, position in windows})


def test_a_region_nobody_declared_joins_contributes_and_leaves(live, tmp_path):
    credentials = CredentialFolder(tmp_path / "certs")
    credentials.create_missing("tiny", [], 30)
    credentials.issue("upload", "paris", 30, renew=False)
    server_of = {"lease": 3.0, "certs": str(credentials.folder), "admit": "credentialed"}
    run = live({"name": "paris"}, server=server_of)
    run.credentials = load_credentials(credentials.folder / "admins" / "operator")
    server, paris = run.serve(), run.work("paris")
    run.wait_for(lambda: run.status().outer_steps >= 2, server, paris)
    spec = run.file.read_bytes()

    # On the server's host this is all; on the new one there is the spec and its credential.
    code, _, said = diloco("certs", "issue", "--region", "oslo", "--dir", credentials.folder)
    assert code == 0, said
    away = tmp_path / "oslo"
    away.mkdir()
    shutil.copy(run.file, away / "run.yaml")
    shutil.copytree(credentials.folder / "regions" / "oslo", away / "credential")

    def work(*more: str) -> Role:
        words = ["work", str(away / "run.yaml"), "--region", "oslo", "--dir", str(away / "run")]
        words += ["--server", run.address["url"], "--certs", str(away / "credential")]
        return Role("oslo", (sys.executable, "-m", "diloco_cli", *words, "--with-parent", *more))

    oslo = run.start(work())
    everybody = (server, paris, oslo)
    run.wait_for(lambda: (run.region("paris").share or 0) > 0, *everybody)
    run.wait_for(lambda: any(r.name == "oslo" for r in run.status().regions), *everybody)
    run.wait_for(lambda: (run.region("oslo").share or 0) > 0, *everybody)
    status = run.region("oslo")
    assert status.member and not status.listed and status.alive

    # Stopped, it is away; only told to leave is it gone for good.
    oslo.ask()
    assert run.exit_code(oslo) == 0
    # Its goodbye is sent once; without it the lease ends by itself.
    run.wait_for(lambda: run.region("oslo").left or not run.region("oslo").alive, server, paris)
    assert run.region("oslo").member
    leaving = run.start(work("--leave"))
    assert run.exit_code(leaving, seconds=120.0) == 0, leaving.last_words()
    status = run.region("oslo")
    assert not status.member and status.state == "retired" and "left for good" in status.retired
    assert (status.share or 0) > 0
    seen = run.status().outer_steps
    run.wait_for(lambda: run.status().outer_steps >= seen + 2, server, paris)

    paris.ask()
    assert run.exit_code(paris) == 0
    run.wait_for(lambda: not run.region("paris").alive, server)
    server.ask()
    assert run.exit_code(server) == 0
    summary = run.summary()
    assert summary["balanced"] and summary["tokens"]["given_up"] == 0, summary
    assert summary["regions"]["oslo"]["applied"] > 0
    assert run.file.read_bytes() == spec, "nobody edited anything"

    settings = settings_of(run.spec, resolve(run.spec))
    records = read_journal(run.folder)
    retired = [record for _, record in decode_all(records) if isinstance(record, RegionRetired)]
    assert [record.region for record in retired] == ["oslo"]
    ledger, _ = fold(TermsHistory(settings, build_terms), records, base=0)
    (table,) = ledger.orders.values()
    assert {owner.region for owner in table.owners.values()} == {"paris"}
    assert len(table.owners) == table.count and table.repeated == table.unread == 0
    read, twice = windows_read(records)
    assert {"oslo", "paris"} <= read.keys() and all(read.values()) and twice == 0
    (left,) = (n for n, record in decode_all(records) if isinstance(record, RegionRetired))
    dealt = [(n, record) for n, record in decode_all(records) if isinstance(record, LanesDealt)]
    assert any(n > left for n, _ in dealt), "paris took oslo's lanes over"
    assert replay(settings, run.folder / "server", build=build_terms).lines
