"""Status documents for tests: whole ones, of which a test says only what matters to it."""

from __future__ import annotations

import json
from typing import Any

from diloco_cli.observe.status import RegionStatus, Status

FATES = ("trained", "applied", "uncounted", "pending", "refused", "discarded")
TOKENS = {"budget": 1000, **dict.fromkeys(FATES, 0)}
WIRE = {
    "bits_per_parameter_up": None,
    "bits_per_parameter_down": None,
    "bytes_up": 0,
    "bytes_down": 0,
}
REGION: dict[str, Any] = {
    "name": "left",
    **dict.fromkeys(("alive", "training", "contributing", "left", "done"), False),
    **dict.fromkeys(("step", "tokens_per_second", "loss", "staleness", "share"), None),
    **dict.fromkeys(("last_merged_seconds", "restarts", "blocked"), None),
    **{"lost": 0, "refused": 0, "mended": 0, "quarantined": False, "why": ""},
    **{"pace": None, "overclaim": "", "unbalanced": False, "until": None},
}
STATUS: dict[str, Any] = {
    "run": "r1",
    "name": "quickstart",
    "url": "http://127.0.0.1:4321",
    "state": "waiting",
    "why": "",
    "trouble": "",
    "regions_go_on": False,
    "clock": [0, 0],
    "outer_steps": 0,
    "tokens": TOKENS,
    "loss": {},
    "wire": WIRE,
    "goodput": None,
    "goodputs": {},
    "seconds": 0.0,
    "fragments": [],
    "regions": [],
}


def region_json(name: str, **changes: Any) -> dict[str, Any]:
    return {**REGION, "name": name, **changes}


def make_region(name: str, **changes: Any) -> RegionStatus:
    return RegionStatus.read(json.dumps(region_json(name, **changes)).encode())


def status_json(**changes: Any) -> dict[str, Any]:
    """The document; `tokens` and `wire` may name single keys, `regions` are dicts."""
    for part, whole in (("tokens", TOKENS), ("wire", WIRE)):
        if part in changes:
            changes[part] = {**whole, **changes[part]}
    regions = [region_json(**region) for region in changes.pop("regions", ())]
    return {**STATUS, **changes, "regions": regions}


def make_status(**changes: Any) -> Status:
    return Status.read(json.dumps(status_json(**changes)).encode())
