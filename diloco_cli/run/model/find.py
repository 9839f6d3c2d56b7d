"""Which model is meant by RUN, DIR or FILE?

RUN    a run's spec, folder, name or URL: the weights that its server published
DIR    a folder with config.json and safetensors, as `diloco export` writes it
FILE   safetensors as `diloco pull` writes it; its metadata says which model it is
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from diloco_cli.assemble import load_run
from diloco_cli.errors import LinkError, SpecError, WireError
from diloco_cli.models import Model, models
from diloco_cli.models.hf.read import HfWeights, SafetensorsFile, is_hf_folder, read_choice
from diloco_cli.models.transformer import Transformer
from diloco_cli.run.find_credential import for_calls
from diloco_cli.run.folder import RESOLVED, Target, find, spec_base
from diloco_cli.run.offline import write_first_weights, write_weights
from diloco_cli.spec.schema import RunSpec
from diloco_cli.worker.text_codec import TextCodec, codec_in, codec_of


@dataclass(frozen=True)
class TrainedModel:
    """A model with its weights."""

    name: str
    model: Transformer
    weights: Mapping[str, np.ndarray]
    text: TextCodec | None = None
    """What its tokens mean; None if nothing says."""
    spec: RunSpec | None = None
    """Of the run that it comes from, if its folder is here."""
    folder: Path | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Run, versions and layout, where the weights say so."""

    @property
    def averaged(self) -> bool:
        """Says whether the weights are the average of the last versions, not a version."""
        return self.metadata.get("average") == "true"

    @property
    def outer_steps(self) -> int | None:
        """Of the weights, all fragments together; None where nothing says."""
        versions = self.metadata.get("versions")
        return sum(json.loads(versions)) if versions else None

    def needed_text(self) -> TextCodec:
        if self.text is None:
            raise SpecError(
                f"{self.name} does not say what its tokens mean.",
                hint="Name a run's folder, or a folder with tokenizer.json in it.",
            )
        return self.text


def find_model(
    target: str | None,
    *,
    version: int | None = None,
    ema: bool = False,
    certs: Path | None = None,
) -> TrainedModel:
    """Finds the model and opens its weights; they are read when they are asked for.

    With `ema` they are the average that a run keeps.
    """
    path = Path(target).expanduser() if target is not None else None
    # A run folder may hold an exported one, but is none itself.
    if path is not None and is_hf_folder(path) and not (path / RESOLVED).exists():
        _refuse_version(version, ema, path)
        model = _transformer(models.build(read_choice(path)), str(path))
        return TrainedModel(str(path), model, HfWeights(path, model), codec_in(path))
    if path is not None and path.suffix == ".safetensors":
        _refuse_version(version, ema, path)
        return _in_file(path)
    return _of_run(find(target), version, ema, certs)


def _refuse_version(version: int | None, ema: bool, path: Path) -> None:
    if ema:
        raise SpecError(f"--ema: {path} holds no average.", hint="Name the run, or leave it out.")
    if version is not None:
        raise SpecError(
            f"--version {version}: {path} holds one version only.", hint="Leave --version out."
        )


def _transformer(model: Model, name: str) -> Transformer:
    if not isinstance(model, Transformer):
        raise SpecError(
            f"The model of {name} is of type {type(model).__name__}, whose arithmetic is not ours.",
            hint="`diloco pull` fetches its weights under their own names.",
        )
    return model


def _in_file(path: Path) -> TrainedModel:
    file = SafetensorsFile(path)
    try:
        choice = json.loads(file.metadata["model"])
        tokenizer = json.loads(file.metadata.get("tokenizer", "null"))
    except KeyError:
        raise SpecError(
            f"{path} does not say which model its weights are of.",
            hint="Fetch it with `diloco pull`, or name the folder of the run.",
        ) from None
    except ValueError as error:
        raise WireError(f"The metadata of {path} are damaged: {error}.") from None
    model = _transformer(models.build(choice), str(path))
    text = codec_of({"tokenizer": tokenizer})
    weights = FileWeights(file, model)
    return TrainedModel(str(path), model, weights, text, metadata=file.metadata)


class FileWeights(Mapping[str, np.ndarray]):
    """The tensors of a file under our names, each read when it is asked for."""

    def __init__(self, file: SafetensorsFile, model: Model) -> None:
        wanted = {tensor.name: tensor.shape for tensor in model.tensors()}
        found = {name: file.shape(name) for name in file.header}
        if differing := sorted(set(wanted.items()) ^ set(found.items())):
            raise WireError(
                f"{file.path} does not fit the model in its own metadata: "
                f"{differing[0][0]} {list(differing[0][1])}.",
                hint="Fetch it again.",
            )
        self._file, self._names = file, list(wanted)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._file.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _of_run(run: Target, version: int | None, ema: bool, certs: Path | None) -> TrainedModel:
    spec = load_run(run.folder / RESOLVED).spec if run.folder else None
    with tempfile.TemporaryDirectory(prefix="diloco-") as place:
        # Mapped, a file stays readable after it is deleted.
        path = Path(place) / "weights.safetensors"
        metadata = fetch_weights(run, path, version=version, ema=ema, certs=certs)
        file = SafetensorsFile(path)
        choice: dict[str, Any] = spec.model if spec else json.loads(metadata["model"])
        model = _transformer(models.build(choice), str(run))
        weights = FileWeights(file, model)
    if spec is not None:
        with contextlib.chdir(spec_base(run.folder) if run.folder else "."):
            text = codec_of(spec.data)
    else:
        text = codec_of({"tokenizer": json.loads(metadata.get("tokenizer", "null"))})
    return TrainedModel(str(run), model, weights, text, spec, run.folder, metadata)


def fetch_weights(
    run: Target,
    out: Path,
    *,
    version: int | None = None,
    ema: bool = False,
    certs: Path | None = None,
) -> dict[str, str]:
    """Writes a run's published weights: from its server, or from the folder if that is gone.

    With `ema` it is their average over the last rounds, which the run may keep.
    """
    if ema and version is not None:
        raise SpecError(
            "--ema and --version do not go together: only the newest average is kept.",
            hint="Leave one of them out.",
        )
    try:
        return _published_weights(run, out, version, ema, certs)
    except SpecError:
        if version != 0 or run.folder is None or load_run(run.folder / RESOLVED).spec.start:
            raise
        return write_first_weights(run.folder, out)


def _published_weights(
    run: Target, out: Path, version: int | None, ema: bool, certs: Path | None
) -> dict[str, str]:
    if run.url:
        from diloco_cli.net.client import Client
        from diloco_cli.net.options import Options, Retry

        try:
            options = Options(retry=Retry(tries=2), credentials=for_calls(run, certs))
            with Client(run.url, options) as client:
                return client.weights(out, version=version, ema=ema)
        except LinkError:
            if run.folder is None:
                raise
    assert run.folder is not None
    return write_weights(run.folder, out, version=version, ema=ema)
