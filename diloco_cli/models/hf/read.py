"""A folder as the Hugging Face Hub has it: config.json, safetensors, perhaps an index.

Headers are checked when the folder is opened; numbers are read through a memory map when a
tensor is asked for, and become float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from diloco_cli.core.fragments import Tensor
from diloco_cli.errors import SpecError, WireError
from diloco_cli.models.hf.families import Choice, Place, choice_of, places_of, scalar_name
from diloco_cli.models.transformer import Transformer

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
PREFIXES = ("model.", "model.language_model.")
"""What tensors' names begin with: in a text model, and in one that sees as well."""
MOST_NAMED = 8
TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""What numbers may be written in; BF16 is the upper half of F32."""


def is_hf_folder(path: Path) -> bool:
    return (path / CONFIG).is_file()


def read_config(folder: Path) -> dict[str, Any]:
    """Reads config.json; raises SpecError if there is none."""
    return _json(folder / CONFIG, "Name the folder that holds config.json and the safetensors.")


def read_choice(folder: Path) -> Choice:
    """The model that a folder's config.json describes, as a choice in a spec."""
    try:
        choice = choice_of(read_config(folder))
        return choice | _scalars(folder, choice["layers"]) if choice["kind"] == "gemma4" else choice
    except SpecError as error:
        if str(folder) in error.message:
            raise
        message = error.message.replace(CONFIG, str(folder / CONFIG), 1)
        raise SpecError(message, hint=error.hint) from None


def _scalars(folder: Path, layers: int) -> Choice:
    """What the layers of Gemma are multiplied by, where that is not 1; lies among the weights."""
    if not any((folder / name).is_file() for name in (INDEX, SINGLE)):
        return {}
    files = [SafetensorsFile(folder / name) for name in _files(folder)]
    where = {name: file for file in files for name in file.header if name.endswith("layer_scalar")}
    found = [1.0] * layers
    for layer in range(layers):
        for prefix in PREFIXES:
            name = scalar_name(layer, prefix)
            if name in where:
                found[layer] = float(where[name].read(name).reshape(-1)[0])
    return {"scalars": tuple(found)} if set(found) != {1.0} else {}


class SafetensorsFile:
    """One safetensors file, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # The library checks that the header is sound and that everything is there.
            with safe_open(path, framework="numpy") as file:
                self.metadata: dict[str, str] = file.metadata() or {}
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(length))
            self._bytes = np.memmap(path, np.uint8, mode="r", offset=8 + length)
        except FileNotFoundError:
            raise SpecError(f"There is no {path}.") from None
        except (OSError, ValueError, SafetensorError) as error:
            raise WireError(
                f"{path} is not a whole safetensors file: {error}.", hint="Fetch it again."
            ) from error
        header.pop("__metadata__", None)
        self.header = header

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.header[name]["shape"])

    def read(self, name: str) -> np.ndarray:
        """Gives a tensor in float32."""
        about = self.header[name]
        if about["dtype"] not in TYPES:
            raise SpecError(
                f"{name} in {self.path} has the dtype {about['dtype']}; known are "
                f"{', '.join(TYPES)}.",
                hint="Convert them to bfloat16 or float32; quantised weights cannot be trained.",
            )
        start, stop = about["data_offsets"]
        values = self._bytes[start:stop].view(TYPES[about["dtype"]]).reshape(about["shape"])
        if about["dtype"] == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)


class HfWeights(Mapping[str, np.ndarray]):
    """The tensors of a folder under our names, each read when it is asked for."""

    def __init__(self, folder: Path, model: Transformer) -> None:
        """Raises when a tensor is missing or has another shape; reads headers only."""
        self.folder, self._model = folder, model
        self._tensors = {tensor.name: tensor for tensor in model.tensors()}
        self._files = {name: SafetensorsFile(folder / name) for name in _files(folder)}
        self._where = {name: file for file in self._files.values() for name in file.header}
        # Where a model sees as well, its text decoder has a name of its own.
        inner = any(name.startswith(PREFIXES[1]) for name in self._where)
        self._prefix = PREFIXES[1] if inner else PREFIXES[0]
        if wrong := list(self._misfits()):
            more = [f"and {len(wrong) - MOST_NAMED} more"] if len(wrong) > MOST_NAMED else []
            lines = "".join(f"\n  {line}" for line in [*wrong[:MOST_NAMED], *more])
            raise SpecError(
                f"The weights in {folder} do not fit its config.json:{lines}",
                hint="Take config.json and weights from the same place.",
            )

    def _place(self, name: str) -> Place:
        return places_of(self._model.shape, name, self._prefix)

    def _misfits(self) -> Iterator[str]:
        for tensor in self._tensors.values():
            place = self._place(tensor.name)
            for name in place.names:
                if name not in self._where:
                    yield f"{name} is missing"
                    continue
                found = self._where[name].shape(name)
                if found != (wanted := _theirs(tensor, place)):
                    yield f"{name} has the shape {list(found)}, wanted is {list(wanted)}"
        if not self._model.shape.tied:
            return
        # Some write the tied output a second time; if it is another one, it is not tied.
        if "lm_head.weight" in self._where and not self._output_is_embedding:
            yield (
                "lm_head.weight differs from the embedding, but config.json says "
                "tie_word_embeddings: true"
            )

    @cached_property
    def _output_is_embedding(self) -> bool:
        embed = self._place("embed").name
        return np.array_equal(
            self._where["lm_head.weight"].read("lm_head.weight"), self._where[embed].read(embed)
        )

    def __getitem__(self, name: str) -> np.ndarray:
        place = self._place(name)
        parts = [self._part(each, place) for each in place.names]
        return np.stack(parts) if place.rows else np.ascontiguousarray(parts[0])

    def _part(self, name: str, place: Place) -> np.ndarray:
        values = self._where[name].read(name)
        if not np.isfinite(values).all():
            raise SpecError(f"{name} in {self.folder} holds a number that is not finite.")
        return values.T if place.transposed else values

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _theirs(tensor: Tensor, place: Place) -> tuple[int, ...]:
    shape = tensor.shape[1:] if place.rows else tensor.shape
    return shape[::-1] if place.transposed else shape


def _files(folder: Path) -> list[str]:
    """The names of the safetensors files that make up the weights."""
    if (folder / INDEX).is_file():
        names = _json(folder / INDEX, "Fetch it again.").get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(each, str) for each in names.values()):
            raise WireError(f"{folder / INDEX} has no weight_map.", hint="Fetch it again.")
        files = sorted(set(names.values()))
        if strange := [name for name in files if Path(name).name != name]:
            raise WireError(f"{folder / INDEX} names a file outside its folder: {strange[0]}.")
        if missing := [name for name in files if not (folder / name).is_file()]:
            raise SpecError(
                f"{folder / INDEX} names {missing[0]}, which is not there.",
                hint="Fetch the missing files.",
            )
        return files
    if (folder / SINGLE).is_file():
        return [SINGLE]
    raise SpecError(
        f"{folder} has no weights: neither {SINGLE} nor {INDEX}.",
        hint="Weights in other formats (pytorch_model.bin) have to be saved as safetensors first.",
    )


def _json(path: Path, hint: str) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise SpecError(f"There is no {path}.", hint=hint) from None
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise SpecError(f"{path} is not JSON: {error}.", hint="Fetch it again.") from None
    if not isinstance(document, dict):
        raise SpecError(f"{path} is not a JSON object.", hint="Fetch it again.")
    return document
