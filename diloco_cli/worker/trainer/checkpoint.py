"""Where was I? A region's local checkpoint, in one file.

Weights, optimiser, anchors and books belong to the same inner step, so they are one
file, replaced as a whole: a reader sees the old one or the new one, never half of
either. It needs no order relative to what was posted; the outbox speaks for that.

    safetensors   params/NAME, optimizer/PATH, anchor/NUMBER
    metadata      diloco: JSON {version, step, clock, cursor, books, meta, sums}
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from diloco_cli.errors import StoreError
from diloco_cli.system.files import keep_files

VERSION = 1
HINT = "Delete the file; the region then restarts from the published weights."


@dataclass(frozen=True)
class Checkpoint:
    """All a trainer needs to go on as if it had never stopped; plain data and numpy."""

    params: dict[str, np.ndarray]
    opt_state: dict[str, np.ndarray]
    """As `step.flatten_state` gives it."""

    anchors: list[np.ndarray]
    """Published weights as adopted, one vector a fragment."""

    books: list[dict[str, Any]]
    """Held counters and flights, one a fragment."""

    cursor: dict[str, Any]
    clock: int
    step: int
    meta: dict[str, Any] = field(default_factory=dict)
    """Anything else that is plain: run, layout, tokens."""


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Makes a checkpoint durable, then visible, in that order."""
    arrays = _arrays(checkpoint)
    notes = {
        "version": VERSION,
        "step": checkpoint.step,
        "clock": checkpoint.clock,
        "cursor": checkpoint.cursor,
        "books": checkpoint.books,
        "meta": checkpoint.meta,
        "sums": {name: zlib.crc32(values.data) for name, values in arrays.items()},
    }
    about = {"diloco": json.dumps(notes)}
    # Durable with its name: otherwise a power cut could bring back a checkpoint older than
    # frames that were posted long ago.
    keep_files({path: lambda draft: save_file(arrays, draft, metadata=about)})


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint back bit for bit, or says what is wrong with the file."""
    try:
        with safe_open(path, framework="np") as file:
            notes = json.loads((file.metadata() or {})["diloco"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise StoreError(f"There is no checkpoint {path}.", hint=HINT) from None
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise StoreError(f"The checkpoint {path} cannot be read: {error}.", hint=HINT) from None
    if notes.get("version") != VERSION:
        raise StoreError(
            f"The checkpoint {path} has version {notes.get('version')}, this program reads "
            f"version {VERSION}.",
            hint=HINT,
        )
    _check_sums(path, arrays, notes["sums"])
    anchors = _under("anchor/", arrays)
    return Checkpoint(
        params=_under("params/", arrays),
        opt_state=_under("optimizer/", arrays),
        anchors=[anchors[name] for name in sorted(anchors)],
        books=notes["books"],
        cursor=notes["cursor"],
        clock=notes["clock"],
        step=notes["step"],
        meta=notes["meta"],
    )


def _arrays(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    groups: dict[str, Mapping[str, np.ndarray]] = {
        "params/": checkpoint.params,
        "optimizer/": checkpoint.opt_state,
        "anchor/": {f"{number:05d}": one for number, one in enumerate(checkpoint.anchors)},
    }
    return {
        # Not ascontiguousarray: that turns a counter of no dimension into a vector.
        prefix + name: np.asarray(values, order="C")
        for prefix, group in groups.items()
        for name, values in group.items()
    }


def _under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(prefix): values
        for name, values in arrays.items()
        if name.startswith(prefix)
    }


def _check_sums(path: Path, arrays: Mapping[str, np.ndarray], sums: Mapping[str, int]) -> None:
    """Refuses a file whose bytes changed on disk; safetensors itself checks lengths only."""
    if missing := sorted(set(sums) ^ set(arrays)):
        raise StoreError(f"The checkpoint {path} lacks {missing[0]}.", hint=HINT)
    for name, values in arrays.items():
        if zlib.crc32(values.data) != sums[name]:
            raise StoreError(
                f"The checkpoint {path} is damaged: {name} is not what was written.", hint=HINT
            )
