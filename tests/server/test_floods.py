"""Whoever is turned away on and on is told to wait, and pushes nothing out of the audit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diloco_cli.server.access import floods
from diloco_cli.server.access.floods import Flood
from diloco_cli.server.http.audit import TURNED_AWAY, Audit, Watched
from diloco_cli.server.intake.body import LimitedReceive


def test_so_many_at_once_and_then_a_trickle_with_the_rest_counted(monkeypatch):
    now = [0.0]
    flood = Flood(3, 0.5, clock=lambda: now[0])
    assert [flood.take("a") for _ in range(5)] == [0, 0, 0, None, None]
    assert flood.take("b") == 0, "others are not held up"
    now[0] += 2
    assert flood.take("a") == 2 and flood.take("a") is None
    monkeypatch.setattr(floods, "MOST_PEERS", 10)
    for number in range(100):
        flood.take(str(number))
    assert len(flood._peers) <= 11


async def _nothing(*_: Any) -> Any: ...


def note(audit: Audit, status: int, call: str) -> None:
    scope = {"client": ("192.0.2.1", 1), "path": "/v1/status"}
    watched = Watched(scope, LimitedReceive(_nothing), _nothing)
    watched.status, watched.state["call"] = status, call
    watched.note(audit)


def test_ten_thousand_bad_credentials_leave_what_others_did_in_the_audit(tmp_path: Path):
    audit = Audit(tmp_path / "audit.jsonl", most=100_000, kept=2)
    note(audit, 201, "contribute")
    for _ in range(10_000):
        note(audit, 401, "status")
    audit.close()
    files = sorted(tmp_path.glob("audit.jsonl*"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [line["call"] for line in lines].count("contribute") == 1
    assert len(lines) <= TURNED_AWAY[0] + 20
