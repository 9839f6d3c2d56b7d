"""Weights and figures from the folder of a run whose server is not running; it is only read."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diloco_cli.assemble import build_terms, load_run, resolve, settings_of
from diloco_cli.core.fragments import scatter
from diloco_cli.errors import DilocoError, SpecError, StoreDamaged
from diloco_cli.models import first_tensors
from diloco_cli.observe.status import LastKnown
from diloco_cli.run.folder import RESOLVED, is_a_regions, server_elsewhere
from diloco_cli.server.recovery.fold import fold
from diloco_cli.server.recovery.start import restored
from diloco_cli.server.store import stores
from diloco_cli.server.store.archive import Archive
from diloco_cli.server.store.run_identity import in_use, run_of
from diloco_cli.server.terms import TermsHistory
from diloco_cli.server.versions.export import about_model
from diloco_cli.spec.load import load_spec
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system.locks import FileLock
from diloco_cli.system.outputs import cannot_be_written


@dataclass(frozen=True)
class StoredWeights:
    """The published weights of a run, from its folder."""

    spec: RunSpec
    """By the newest terms."""
    params: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]
    momentum: tuple[np.ndarray, ...] = ()
    """Of the outer optimiser, by fragment; empty unless it was asked for."""


def read_weights(
    folder: Path, *, version: int | None = None, momentum: bool = False, ema: bool = False
) -> StoredWeights:
    """Reads the newest published weights, or those of one version; with `ema` their average.

    A server that runs there may delete what is being read: then this fails, and may be tried
    again.
    """
    spec = load_run(folder / RESOLVED).spec
    parts = resolve(spec)
    if not (folder / "server" / "journal").exists():
        if is_a_regions(folder):
            raise server_elsewhere(folder, "pull")
        if any((folder / "server").glob("fragments/*")):
            journal = folder / "server" / "journal"
            raise StoreDamaged(f"{journal} is missing, though its server has run.")
        raise SpecError(f"{folder} has no weights yet: its server never ran.")
    settings = settings_of(spec, parts)
    blobs, journal = stores.build(spec.server.store).read(
        folder / "server", layout=parts.layout.digest, spec=settings.spec_digest
    )
    archive = Archive(blobs, journal.run)
    history = TermsHistory(settings, build_terms)
    ledger, _ = fold(history, journal.records, base=journal.base)
    newest = [slot.version for slot in ledger.slots]
    versions = newest if version is None else [version] * len(newest)
    params = {tensor.name: np.empty(tensor.shape, np.float32) for tensor in parts.model.tensors()}
    moving: list[np.ndarray] = []
    for fragment, number, last in zip(parts.layout.fragments, versions, newest, strict=True):
        if momentum or ema:
            slot = ledger.slots[fragment.number]
            state = restored(history, archive, fragment.number, slot)
            moving += [state.momentum] if momentum else []
            chosen = state.average if ema else state.published
            if chosen is None:
                raise no_average(str(folder))
            scatter(chosen, fragment, params)
        else:
            made = spec.start is None
            published = _published(archive, fragment.number, number, last, seed_makes_first=made)
            scatter(published, fragment, params)
    metadata = {
        "run": archive.run,
        "versions": json.dumps(versions),
        "layout": parts.layout.digest,
        **about_model(settings, average=ema),
    }
    return StoredWeights(history.newest.spec, params, metadata, tuple(moving))


def no_average(run: str) -> SpecError:
    """What to say where an average is asked for and none is kept."""
    return SpecError(
        f"{run} keeps no average of its published weights, or has not begun one.",
        hint="Set `outer.ema: 0.05`; `diloco amend` does so while a run goes on.",
    )


def write_weights(
    folder: Path, out: Path, *, version: int | None = None, ema: bool = False
) -> dict[str, str]:
    """Writes the published weights as safetensors and returns the file's metadata."""
    if pid := FileLock(folder / "server" / "lock").holder():
        raise in_use(folder / "server", pid)
    stored = read_weights(folder, version=version, ema=ema)
    return _write(stored.params, stored.metadata, out)


def write_first_weights(folder: Path, out: Path) -> dict[str, str]:
    """Writes version 0 as the seed made it: it is deleted to save room."""
    spec = load_run(folder / RESOLVED).spec
    parts = resolve(spec)
    metadata = {
        "run": run_of(folder / "server") or "unknown",
        "versions": json.dumps([0] * spec.sync.fragments),
        "layout": parts.layout.digest,
        **about_model(settings_of(spec, parts)),
    }
    return _write(first_tensors(parts.model, spec.seed), metadata, out)


def _write(
    weights: Mapping[str, np.ndarray], metadata: Mapping[str, str], out: Path
) -> dict[str, str]:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    params, about = dict(weights), dict(metadata)
    draft = out.with_name(out.name + ".draft")
    try:
        save_file(params, draft, metadata=about)
        os.replace(draft, out)
    except (OSError, SafetensorError) as error:
        raise cannot_be_written(out, "--out", error) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    return about


def known_without_server(folder: Path) -> LastKnown:
    """Says what the run log tells of a run whose server ended without a summary."""
    from diloco_cli.observe.events import read_events
    from diloco_cli.observe.last_known import last_known

    known = last_known(read_events(folder / "events.jsonl"))
    with contextlib.suppress(DilocoError):
        budget = load_spec(folder / RESOLVED).spec.budget.tokens
        known = known.model_copy(update={"tokens": {**known.tokens, "budget": budget}})
    if known.time is None:
        return known
    heard = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(known.time))
    return known.model_copy(update={"why": f"last heard of at {heard}"})


def _published(
    archive: Archive, fragment: int, version: int, newest: int, *, seed_makes_first: bool
) -> np.ndarray:
    weights = archive.published(fragment, version) if version <= newest else None
    if weights is None:
        kept = archive.versions(fragment)
        also = (
            "0, which the seed makes again, and "
            if seed_makes_first and min(kept, default=0) > 0
            else ""
        )
        raise SpecError(
            f"Version {version} of fragment {fragment} is not kept; versions "
            f"{also}{kept[0]} to {newest} are."
            if kept
            else f"Fragment {fragment} has no version yet.",
            hint="Leave --version out for the newest.",
        )
    return weights
