"""Writes down what is trained, for `model: {kind: tensors, file: …}`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from diloco_cli.core.fragments import Piece
from diloco_cli.errors import SpecError
from diloco_cli.models.tensors import EMBEDDINGS
from diloco_cli.system.files import keep_files
from diloco_cli.worker.engines.rows_engine import Weights


def describe(weights: Weights, file: str | Path) -> Path:
    """Writes names, shapes and values of weights; the run begins with these."""
    path, arrays = Path(file), {}
    tensors = weights.tensors()
    for tensor in tensors:
        whole = Piece(tensor.name, 0, tensor.rows, tuple(tensor.shape), 0)
        arrays[tensor.name] = np.ascontiguousarray(weights.read(whole), np.float32).reshape(
            tensor.shape
        )
    notes = {EMBEDDINGS: json.dumps(sorted(each.name for each in tensors if each.embedding))}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        keep_files({path: lambda draft: save_file(arrays, draft, metadata=notes)})
    except OSError as error:
        raise SpecError(
            f"{path} cannot be written: {error.strerror}.", hint="Choose another file."
        ) from None
    return path
