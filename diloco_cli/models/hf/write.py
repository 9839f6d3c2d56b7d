"""A folder as the Hugging Face Hub has it, from a model and its weights.

config.json, generation_config.json
model-00001-of-00003.safetensors, …, model.safetensors.index.json      above one shard
model.safetensors                                                      else
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from diloco_cli.errors import SpecError
from diloco_cli.models.hf.families import config_of, places_of, scalar_name
from diloco_cli.models.hf.read import CONFIG, INDEX, SINGLE
from diloco_cli.models.protocol import Model
from diloco_cli.models.transformer import Shape, Transformer

DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
SHARD = 5_000_000_000
"""Bytes of a file at most, unless one tensor has more."""


def write_model(
    out: Path,
    model: Model,
    weights: Mapping[str, np.ndarray],
    *,
    sequence: int,
    dtype: str = "float32",
    shard: int = SHARD,
) -> list[str]:
    """Writes config and weights into a folder that exists; gives the names of its files."""
    config = {**config_of(model, sequence=sequence), "dtype": dtype, "torch_dtype": dtype}
    assert isinstance(model, Transformer)
    _write_json(out / CONFIG, config)
    _write_json(out / "generation_config.json", {"_from_model_config": True, "use_cache": True})
    shards = list(_shards(model, np.dtype(DTYPES[dtype]).itemsize, shard))
    names = [
        SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    where: dict[str, str] = {}
    for name, tensors in zip(names, shards, strict=True):
        theirs = dict(_renamed(model, {each: weights[each] for each in tensors}, dtype))
        if name == names[-1] and model.shape.post_norms:
            theirs |= _scalars(model.shape, dtype)
        # What from_pretrained wants to see before it reads a file.
        save_file(theirs, out / name, metadata={"format": "pt"})
        (out / name).chmod(0o644)
        where |= dict.fromkeys(theirs, name)
    if len(shards) > 1:
        size = sum(tensor.size for tensor in model.tensors()) * np.dtype(DTYPES[dtype]).itemsize
        _write_json(out / INDEX, {"metadata": {"total_size": size}, "weight_map": where})
    written = [CONFIG, "generation_config.json", *names]
    return [*written, INDEX] if len(shards) > 1 else written


def checked_dtype(name: str) -> str:
    if name not in DTYPES:
        raise SpecError(f"--dtype {name}: known are {', '.join(DTYPES)}.")
    return name


def _shards(model: Transformer, width: int, most: int) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for tensor in model.tensors():
        if shard and size + tensor.size * width > most:
            yield shard
            shard, size = [], 0
        shard.append(tensor.name)
        size += tensor.size * width
    yield shard


def _renamed(
    model: Transformer, weights: Mapping[str, np.ndarray], dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    for name, values in weights.items():
        place = places_of(model.shape, name)
        for theirs, part in zip(place.names, values if place.rows else [values], strict=True):
            turned = part.T if place.transposed else part
            yield theirs, np.ascontiguousarray(turned.astype(DTYPES[dtype]))


def _scalars(shape: Shape, dtype: str) -> dict[str, np.ndarray]:
    values = shape.scalars or (1.0,) * shape.layers
    return {
        scalar_name(layer): np.array([value], DTYPES[dtype]) for layer, value in enumerate(values)
    }


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", "utf-8")
