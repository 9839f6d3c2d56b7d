"""The weights of a run whose server is not running, read from its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from diloco_cli.assemble import load_run, resolve, shared_digest
from diloco_cli.cli.folder import RESOLVED
from diloco_cli.core.fragments import scatter
from diloco_cli.core.ledger import Ledger
from diloco_cli.errors import SpecError, StoreError
from diloco_cli.server.store import Store, stores


def write_weights(folder: Path, out: Path, *, version: int | None = None) -> dict[str, str]:
    """Writes the published weights as safetensors and returns the file's metadata."""
    from safetensors.numpy import save_file

    spec = load_run(folder / RESOLVED).spec
    parts = resolve(spec)
    if not (folder / "server" / "journal").exists():
        raise SpecError(f"{folder} has no weights yet: its server never ran.")
    params = {tensor.name: np.empty(tensor.shape, np.float32) for tensor in parts.model.tensors()}
    kind = stores.build(spec.server.store)
    store, records = kind.open(
        folder / "server", layout=parts.layout.digest, spec=shared_digest(spec)
    )
    try:
        ledger = Ledger.empty(len(parts.layout.fragments))
        for number, record in enumerate(records, 1):
            ledger.apply(number, record)
        versions = [slot.version if version is None else version for slot in ledger.slots]
        for fragment, wanted in zip(parts.layout.fragments, versions, strict=True):
            _refuse_missing(store, fragment.number, wanted)
            scatter(store.load_state(fragment.number, wanted).published, fragment, params)
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
    except OSError as error:
        raise StoreError(
            f"{out} cannot be written: {error.strerror}.", hint="Choose another --out."
        ) from error
    finally:
        draft.unlink(missing_ok=True)
    return metadata


def _refuse_missing(store: Store, fragment: int, wanted: int) -> None:
    kept = store.versions(fragment)
    if wanted not in kept:
        raise SpecError(
            f"Version {wanted} of fragment {fragment} is not kept; versions "
            f"{kept[0]} to {kept[-1]} are."
            if kept
            else f"Fragment {fragment} has no version yet.",
            hint="Leave --version out for the newest.",
        )
