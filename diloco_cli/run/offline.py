"""What the folder of a run still knows when its server is not running: weights, figures."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from diloco_cli.assemble import load_run, resolve, shared_digest
from diloco_cli.core.fragments import scatter
from diloco_cli.core.journal_records import decode_all
from diloco_cli.core.ledger import Ledger
from diloco_cli.errors import DilocoError, SpecError, StoreError
from diloco_cli.run.folder import RESOLVED, is_a_regions, server_elsewhere
from diloco_cli.server.store.on_disk import Store, stores
from diloco_cli.spec.load import load_spec

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
    params = {tensor.name: np.empty(tensor.shape, np.float32) for tensor in parts.model.tensors()}
    kind = stores.build(spec.server.store)
    store, records = kind.open(
        folder / "server", layout=parts.layout.digest, spec=shared_digest(spec)
    )
    try:
        numbered = decode_all(records, base=store.journal.base)
        ledger = Ledger.folded(len(parts.layout.fragments), numbered)
        versions = [slot.version if version is None else version for slot in ledger.slots]
        for fragment, wanted in zip(parts.layout.fragments, versions, strict=True):
            newest = ledger.slots[fragment.number].version
            scatter(_published(store, fragment.number, wanted, newest), fragment, params)
        metadata = {
            "run": store.run,
            "versions": json.dumps(versions),
            "layout": parts.layout.digest,
        }
    finally:
        store.close()
    draft = out.with_name(out.name + ".draft")
    try:
        save_file(params, draft, metadata=metadata)
        os.replace(draft, out)
    except (OSError, SafetensorError) as error:
        said = getattr(error, "strerror", None) or error
        raise StoreError(f"{out} cannot be written: {said}.", hint=ANOTHER_OUT) from error
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


def known_without_server(folder: Path) -> dict[str, Any]:
    """Says what the run log tells of a run whose server ended without a summary."""
    from diloco_cli.observe.events import read_events
    from diloco_cli.observe.metrics import last_known

    known = last_known(read_events(folder / "events.jsonl"))
    with contextlib.suppress(DilocoError):
        known["tokens"] |= {"budget": load_spec(folder / RESOLVED).spec.budget.tokens}
    if heard := known.get("time"):
        known["why"] = (
            f"last heard of at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(heard))}"
        )
    return known


def _published(store: Store, fragment: int, wanted: int, newest: int) -> np.ndarray:
    found = store.published(fragment, wanted) if wanted <= newest else None
    if found is None:
        kept = store.versions(fragment)
        raise SpecError(
            f"Version {wanted} of fragment {fragment} is not kept; versions "
            f"{kept[0]} to {newest} are."
            if kept
            else f"Fragment {fragment} has no version yet.",
            hint="Leave --version out for the newest.",
        )
    return found
