"""Honest bytes to begin with: a frame of every codec, a chain, a message of every kind."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np

from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.frame import pack
from tests.wire.forged_frames import delta, header, taken_apart

SIZE = 100
DIGEST = "d" * 64
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {"kind": "fp32"},
    "bf16": {"kind": "bf16"},
    "int8": {"kind": "int8", "block": 32},
    "int4": {"kind": "int4", "block": 64},
    "uniform": {"kind": "uniform", "block": 32, "step": 1.0},
    "sign": {"kind": "sign", "block": 32},
    "sparse": {"kind": "sparse", "block": 64, "density": 0.1},
}
CODECS = tuple(OPTIONS)


@functools.cache
def honest(name: str) -> bytes:
    """One region's contribution in this codec."""
    values = np.random.default_rng(len(name)).normal(size=SIZE).astype(np.float32)
    about = header(SIZE, codec=OPTIONS[name], totals={"trained": 9.5}, cursor={"epoch": 1})
    return pack(about, values, threads=1)


@functools.cache
def fields_of(name: str) -> tuple[dict[str, Any], bytes]:
    """An honest frame's header and its chunk."""
    return taken_apart(honest(name))


@functools.cache
def body_bytes(name: str) -> int:
    return codecs.build(OPTIONS[name]).body_size(SIZE)


@functools.cache
def frames() -> tuple[bytes, ...]:
    """Inputs of the target `frame`, some for every depth."""
    values = np.linspace(-1, 1, SIZE, dtype=np.float32)
    chain = b"".join(pack(delta(SIZE, base), values, threads=1) for base in (4, 5))
    found = [b"\0\0" + chain]
    for number, name in enumerate(CODECS):
        fields, chunk = fields_of(name)
        head = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        inside = (honest(name), honest(name)[:-32], head, chunk, _body(name))
        found += [bytes([depth, number]) + each for depth, each in enumerate(inside)]
    return tuple(found)


def _body(name: str) -> bytes:
    values = np.random.default_rng(3).normal(size=SIZE).astype(np.float32)
    return codecs.build(OPTIONS[name]).encode(values)


_NEWS: dict[str, Any] = {
    "n": 17,
    "versions": [4, -1],
    "calls": {"1": 3},
    "fates": {"0": {"digest": DIGEST, "fate": "merged", "why": ""}},
    "end": False,
    "finished": False,
    "stop": False,
    "evaluate": True,
    "lease_seconds": 10.5,
}
SAID: dict[str, dict[str, Any]] = {
    "join": {
        "owner": "0f3e-77",
        "boot": 2,
        "spec_digest": DIGEST,
        "layout_digest": DIGEST,
        "wire": 1,
    },
    "heartbeat": {
        "epoch": 3,
        "step": 120,
        "training": True,
        "stopping": False,
        "ended": 0,
        "fragments": [{"version": 4, "steps": 10}, {"version": -1, "steps": 0.5}],
        "tokens": {
            fate: [100, 90.5] for fate in ("trained", "applied", "pending", "refused", "discarded")
        },
        "loss": 2.5,
        "tokens_per_second": 1000.0,
        "step_seconds": 0.1,
        "restarts": 0,
        "why": "training",
        "heldout": {"versions": [4, 3], "loss": 2.4},
    },
    "run": {
        "run": "quickstart-1",
        "name": "quickstart",
        "state": "running",
        "spec_digest": DIGEST,
        "layout_digest": DIGEST,
        "wire": 1,
        "fragments": [100, 200],
        "lease_seconds": 10.0,
        "settings": {"sync": {"every": 6}, "names": ["a", None, True, 1.5]},
    },
    "news": _NEWS,
    "joined": {**_NEWS, "epoch": 3, "high": -1},
    "latest": {
        "fragment": 0,
        "version": 4,
        "members": ["paris"],
        "merged": {"paris": DIGEST},
        "published": DIGEST[:32],
        "links": {"whole": "/v1/fragments/0/versions/4", "delta": None},
    },
    "answer": {"fate": "returned", "why": "too old", "merged": DIGEST, "recorded": False},
    "having": {"have": [[0, 50], [100, 200]], "decided": False},
    "listed": {
        "region": "paris",
        "fragment": 0,
        "base": 4,
        "clock": 500,
        "epoch": 2,
        "frame": DIGEST,
        "size": 1000,
        "have": [[0, 50], [100, 200]],
    },
    "error": {
        "error": {"code": "held", "message": "paris is held.", "hint": "Wait."},
        "retry_seconds": 3.5,
    },
}


@functools.cache
def said() -> dict[str, dict[str, Any]]:
    """A message of every kind, as plain data."""
    return {**SAID, "header": fields_of("int4")[0]}


@functools.cache
def spoken() -> tuple[bytes, ...]:
    """Inputs of the target `message`, one for every kind."""
    return tuple(
        bytes([number]) + json.dumps(each).encode() for number, each in enumerate(said().values())
    )


SEEDS = {"frame": frames, "message": spoken}
