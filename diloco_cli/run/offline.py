"""Weights and figures from the folder of a run whose server is not running; it is only read."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import numpy as np

from diloco_cli.assemble import load_run, recipe_of, resolve
from diloco_cli.core.fragments import scatter
from diloco_cli.errors import DilocoError, SpecError, StoreError
from diloco_cli.observe.status import LastKnown
from diloco_cli.run.folder import RESOLVED, is_a_regions, server_elsewhere
from diloco_cli.server.recovery.fold import fold
from diloco_cli.server.store import stores
from diloco_cli.server.store.archive import Archive
from diloco_cli.server.store.run_identity import in_use
from diloco_cli.spec.load import load_spec
from diloco_cli.system.locks import FileLock

ANOTHER_OUT = "Choose another --out, on a disk with room that you may write to."


def write_weights(folder: Path, out: Path, *, version: int | None = None) -> dict[str, str]:
    """Writes the published weights as safetensors and returns the file's metadata."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    spec = load_run(folder / RESOLVED).spec
    parts = resolve(spec)
    if not (folder / "server" / "journal").exists():
        if is_a_regions(folder):
            raise server_elsewhere(folder, "pull")
        raise SpecError(f"{folder} has no weights yet: its server never ran.")
    if pid := FileLock(folder / "server" / "lock").holder():
        raise in_use(folder / "server", pid)
    settings = recipe_of(spec, parts)
    blobs, journal = stores.build(spec.server.store).read(
        folder / "server", layout=parts.layout.digest, spec=settings.spec_digest
    )
    archive = Archive(blobs, journal.run)
    ledger, _ = fold(settings, journal.records, base=journal.base)
    newest = [slot.version for slot in ledger.slots]
    versions = newest if version is None else [version] * len(newest)
    params = {tensor.name: np.empty(tensor.shape, np.float32) for tensor in parts.model.tensors()}
    for fragment, number, last in zip(parts.layout.fragments, versions, newest, strict=True):
        scatter(_published(archive, fragment.number, number, last), fragment, params)
    metadata = {
        "run": archive.run,
        "versions": json.dumps(versions),
        "layout": parts.layout.digest,
    }
    draft = out.with_name(out.name + ".draft")
    try:
        save_file(params, draft, metadata=metadata)
        os.replace(draft, out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"{out} cannot be written: {reason}.", hint=ANOTHER_OUT) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    return metadata


def refuse_unwritable(out: Path) -> None:
    """Raises before anything is fetched when its file could not be written."""
    if out.is_dir():
        raise SpecError(
            f"{out} is a folder.", hint=f"Name the file, as in {out / 'weights.safetensors'}."
        )
    if not out.parent.is_dir():
        raise SpecError(f"There is no folder {out.parent} to write {out.name} into.")
    draft = out.with_name(out.name + ".draft")
    try:
        draft.write_bytes(b"")
        draft.unlink()
    except OSError as error:
        raise StoreError(f"{out} cannot be written: {error.strerror}.", hint=ANOTHER_OUT) from error


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


def _published(archive: Archive, fragment: int, version: int, newest: int) -> np.ndarray:
    weights = archive.published(fragment, version) if version <= newest else None
    if weights is None:
        kept = archive.versions(fragment)
        raise SpecError(
            f"Version {version} of fragment {fragment} is not kept; versions "
            f"{kept[0]} to {newest} are."
            if kept
            else f"Fragment {fragment} has no version yet.",
            hint="Leave --version out for the newest.",
        )
    return weights
