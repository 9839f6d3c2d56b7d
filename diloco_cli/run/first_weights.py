"""Which weights does a run begin with that does not begin with its own?

    start.weights   FILE   safetensors, as `diloco pull` writes it
                    RUN    the folder of another run, running or not; it is only read
                    DIR    config.json and safetensors, as the Hugging Face Hub has them
                    URL    a running server, asked for its newest weights

Names, shapes and numbers are compared with the model's before they become version 0. The
server reads them at its first start and never again: from then on its own folder has them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from diloco_cli.assemble import RunObjects, load_run, resolve
from diloco_cli.core.fragments import Tensor
from diloco_cli.errors import DilocoError, SpecError, WireError
from diloco_cli.models import models
from diloco_cli.models.hf.imported import Imported
from diloco_cli.models.hf.read import HfWeights, is_hf_folder, read_choice
from diloco_cli.models.transformer import Transformer
from diloco_cli.run.find_credential import for_start
from diloco_cli.run.folder import RESOLVED, is_a_regions
from diloco_cli.run.offline import StoredWeights, read_weights
from diloco_cli.server.recovery.start import FirstWeights
from diloco_cli.spec.schema import RunSpec, StartSpec
from diloco_cli.system.locks import FileLock

FETCHED = ".start.safetensors"
MOST_NAMED = 8
TRIES = 5
"""To read the folder of a run that goes on meanwhile, and may delete what is being read."""

OTHER_MODEL = "Is `model` that of the run these weights come from? Its spec.resolved.yaml says."

Shapes = Mapping[str, tuple[str, Sequence[int]]]
"""The dtype, as safetensors calls it, and the shape of each tensor."""


def check_first_weights(spec: RunSpec, folder: Path, *, fresh: bool = False) -> None:
    """Raises before anything is started when `start` names what this run cannot begin with.

    Only headers are looked at, and nothing at all once the run in this folder has begun.
    """
    begun = (folder / "server" / "fragments").exists() and not fresh
    if begun:
        return
    parts = resolve(spec)
    if spec.start is not None:
        _check(spec.start, parts, folder)
    elif isinstance(parts.model, Imported):
        parts.model.check_files()


def first_weights(spec: RunSpec, parts: RunObjects, folder: Path) -> FirstWeights:
    """Reads and checks the weights that `start` names; `folder` is that of the new run."""
    start = spec.start
    assert start is not None
    if start.is_url:
        return _from_server(start, spec, parts, folder)
    _check(start, parts, folder)
    path = Path(start.weights).expanduser()
    if not path.is_dir():
        return _from_file(path, start.weights, parts)
    if is_hf_folder(path):
        return FirstWeights(_hf_weights(path, parts), start.weights)
    tries = TRIES
    while True:
        try:
            return _from_run(path, start, spec, parts)
        except DilocoError:
            tries -= 1
            if not tries or FileLock(path / "server" / "lock").is_free():
                raise
            time.sleep(0.1)


def _check(start: StartSpec, parts: RunObjects, folder: Path) -> None:
    path = Path(start.weights).expanduser()
    if start.is_url:
        return
    if not path.is_dir():
        if start.momentum == "keep":
            raise SpecError(
                f"start.momentum: is keep, but {start.weights} is a file, and files hold weights "
                "only.",
                hint="Name the folder of the run it came from, or leave start.momentum out.",
            )
        _fit(_header(path, start.weights)[0], start.weights, parts.model.tensors())
        return
    if path.resolve() == folder.resolve():
        raise SpecError(
            f"start.weights: {start.weights} is the folder of this very run.",
            hint="Give the new run another --dir; --fresh sets the old one aside, as "
            f"{folder.name}.old-1.",
        )
    if is_hf_folder(path):
        _hf_weights(path, parts)
        return
    if not (path / RESOLVED).is_file():
        raise SpecError(
            f"start.weights: {start.weights} is a folder without a run: it has no {RESOLVED}.",
            hint="Name a run folder, a safetensors file or the URL of a server.",
        )
    if is_a_regions(path):
        raise SpecError(
            f"start.weights: {start.weights} has only regions; its server runs on another host.",
            hint="Name that server's URL.",
        )
    if not (path / "server" / "journal").exists():
        raise SpecError(f"start.weights: {start.weights} has no weights: its server never ran.")
    model = resolve(load_run(path / RESOLVED).spec).model
    shapes = {tensor.name: ("F32", tensor.shape) for tensor in model.tensors()}
    _fit(shapes, start.weights, parts.model.tensors())


def _hf_weights(path: Path, parts: RunObjects) -> HfWeights:
    if not isinstance(parts.model, Transformer):
        raise SpecError(
            f"start.weights: {path} has weights of a transformer, but the model is none.",
            hint=OTHER_MODEL,
        )
    theirs = models.build(read_choice(path))
    assert isinstance(theirs, Transformer)
    if theirs.shape != parts.model.shape:
        ours, other = (each.shape._asdict() for each in (parts.model, theirs))
        key = next(key for key in ours if ours[key] != other[key])
        raise SpecError(
            f"start.weights: config.json in {path} describes another model: {key} is {other[key]} "
            f"there and {ours[key]} here.",
            hint=f"`model: {{kind: hf, folder: {path}}}` takes the architecture from there, too.",
        )
    return HfWeights(path, parts.model)


def _same_outer(source: str, stored: StoredWeights, spec: RunSpec, parts: RunObjects) -> None:
    """Raises unless the outer optimiser's momentum there means the same here."""
    other = stored.spec
    for key, there, here in (
        ("sync.fragments", other.sync.fragments, spec.sync.fragments),
        ("outer.kind", other.outer["kind"], spec.outer["kind"]),
        ("its layout", stored.metadata["layout"][:12], parts.layout.digest[:12]),
        (
            "the size of its momentum",
            [vector.size for vector in stored.momentum],
            [parts.outer.start(fragment.size).size for fragment in parts.layout.fragments],
        ),
    ):
        if there != here:
            raise SpecError(
                f"start.momentum: is keep, but {key} is {there} in {source} and {here} here, so "
                "it has no meaning here.",
                hint="Make it the same here, or leave start.momentum out to begin it anew.",
            )


def _from_run(path: Path, start: StartSpec, spec: RunSpec, parts: RunObjects) -> FirstWeights:
    keep = start.momentum == "keep"
    stored = read_weights(path, momentum=keep)
    if keep:
        _same_outer(start.weights, stored, spec, parts)
    vectors = {f"the momentum of fragment {n}": each for n, each in enumerate(stored.momentum)}
    _finite({**stored.params, **vectors}, start.weights)
    source = _source(start.weights, stored.metadata)
    return FirstWeights(stored.params, source, stored.momentum if keep else None)


def _from_file(path: Path, name: str, parts: RunObjects) -> FirstWeights:
    shapes, metadata = _header(path, name)
    _fit(shapes, name, parts.model.tensors())
    try:
        params = TensorFile(path)
        _finite(params, name)
    except OSError as error:
        raise _not_whole(name, error) from error
    return FirstWeights(params, _source(name, metadata))


class TensorFile(Mapping[str, np.ndarray]):
    """The float32 tensors of a safetensors file, each read when it is asked for.

    It stays open, so it may be deleted meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self._file = FileIO(path)
        length = int.from_bytes(self._file.read(8), "little")
        self._header: dict[str, Any] = json.loads(self._file.read(length))
        self._header.pop("__metadata__", None)
        self._start = 8 + length

    def __getitem__(self, name: str) -> np.ndarray:
        about = self._header[name]
        values = np.empty(about["shape"], "<f4")
        offset, left = (
            self._start + about["data_offsets"][0],
            values.reshape(-1).view(np.uint8).data,
        )
        while left:
            count = os.preadv(self._file.fileno(), [left], offset)
            if not count:
                raise OSError(f"it ends within {name}")
            offset, left = offset + count, left[count:]
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._header)

    def __len__(self) -> int:
        return len(self._header)

    def __del__(self) -> None:
        self._file.close()


def _source(name: str, metadata: Mapping[str, str]) -> str:
    run, versions = metadata.get("run"), metadata.get("versions")
    return f"{name} (run {run}, versions {versions})" if run else name


def _from_server(start: StartSpec, spec: RunSpec, parts: RunObjects, folder: Path) -> FirstWeights:
    from diloco_cli.net.client import Client
    from diloco_cli.net.options import Options, Retry

    fetched = folder / FETCHED
    options = Options(retry=Retry(tries=2), credentials=for_start(spec))
    try:
        with Client(start.weights.rstrip("/"), options) as client:
            client.weights(fetched)
        return _from_file(fetched, start.weights, parts)
    finally:
        fetched.unlink(missing_ok=True)


def _header(path: Path, name: str) -> tuple[Shapes, dict[str, str]]:
    try:
        path.open("rb").close()
    except FileNotFoundError:
        raise SpecError(
            f"start.weights: there is no {name} in {Path.cwd()}.",
            hint="Name a safetensors file (`diloco pull RUN --out FILE` writes one), the folder "
            "of a run, or the URL of a server.",
        ) from None
    except OSError as error:
        raise SpecError(
            f"start.weights: {name} cannot be read: {error.strerror}.",
            hint="Look at its permissions.",
        ) from None
    try:
        with safe_open(path, framework="numpy") as file:
            names = file.keys()
            slices: dict[str, Any] = {each: file.get_slice(each) for each in names}
            shapes = {each: (it.get_dtype(), it.get_shape()) for each, it in slices.items()}
            return shapes, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise _not_whole(name, error) from error


def _not_whole(name: str, error: Exception) -> WireError:
    return WireError(
        f"start.weights: {name} is not a whole safetensors file: {error}.",
        hint="Fetch it again: `diloco pull RUN --out FILE`.",
    )


def _fit(shapes: Shapes, name: str, tensors: Sequence[Tensor]) -> None:
    """Raises with every tensor that is missing, too many, or other than the model's."""
    if not (wrong := list(_misfits(shapes, tensors))):
        return
    just_dtypes = all(" dtype " in line for line in wrong)
    hint = "Write them as float32, as `diloco pull` does." if just_dtypes else OTHER_MODEL
    more = [f"and {len(wrong) - MOST_NAMED} more"] if len(wrong) > MOST_NAMED else []
    lines = "".join(f"\n  {line}" for line in [*wrong[:MOST_NAMED], *more])
    raise SpecError(f"start.weights: {name} does not fit the model:{lines}", hint=hint)


def _misfits(shapes: Shapes, tensors: Sequence[Tensor]) -> Iterator[str]:
    for tensor in tensors:
        if tensor.name not in shapes:
            yield f"{tensor.name} {list(tensor.shape)} is missing"
            continue
        dtype, shape = shapes[tensor.name]
        if list(shape) != list(tensor.shape):
            yield f"{tensor.name} has the shape {list(shape)}, the model's {list(tensor.shape)}"
        elif dtype != "F32":
            yield f"{tensor.name} has the dtype {dtype}, a run is begun with F32"
    for name in sorted(set(shapes) - {tensor.name for tensor in tensors}):
        yield f"{name} {list(shapes[name][1])} is no tensor of the model"


def _finite(vectors: Mapping[str, np.ndarray], source: str) -> None:
    """Raises with the first number that is none."""
    for name, values in vectors.items():
        if np.isfinite(values).all():
            continue
        place = np.argwhere(~np.isfinite(values))[0]
        where = ", ".join(map(str, place))
        raise SpecError(
            f"start.weights: {name}[{where}] in {source} is {values[tuple(place)]}.",
            hint="Begin with weights from before it happened: `diloco pull RUN --version N`.",
        )
