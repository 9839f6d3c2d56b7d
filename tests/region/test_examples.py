"""The examples of training loops: their specs are sound, and their weights are fit for a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from diloco_cli import Region
from diloco_cli.assemble import load_run, resolve
from diloco_cli.testing import check
from diloco_cli.worker.engines.rows_engine import check_tensors
from tests import ROOT

FOLDER = ROOT / "pipelines" / "own-trainer"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fits(weights, yaml: str, tmp_path: Path) -> None:
    """Describes the weights and asks whether the run's spec is sound with them."""
    file = Region.describe(weights, tmp_path / "init.safetensors")
    spec = load_run(FOLDER / yaml, [f"model.file={file}"]).spec
    check_tensors(weights.tensors(), resolve(spec).model.tensors())
    for region in spec.regions:
        assert region.trainer and region.trainer.command
        assert (FOLDER / region.trainer.command[1]).exists()


def test_a_plain_jax_loop(tmp_path):
    from diloco_cli.region.jax_weights import JaxWeights

    loop = example("jax_loop")
    weights = JaxWeights(loop.first(), embeddings=["embed"])
    fits(weights, "jax.yaml", tmp_path)
    tokens = loop.batch(np.arange(4096).astype(np.uint8), 1, 0)
    assert tokens.shape == (loop.BATCH, loop.BEFORE + 1)
    assert float(loop.loss_of(weights.params, tokens)) == pytest.approx(np.log(256), rel=0.05)


def test_digits(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    from diloco_cli.region.torch_weights import TorchOptimizer, TorchWeights

    loop = example("digits")
    model, (pixels, digits) = loop.network(), loop.images("training")
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        adam.zero_grad()
        loop.loss_of(model, pixels[:16], digits[:16]).backward()
        adam.step()

    check(TorchWeights(model), step=step, optimizer=TorchOptimizer(adam))
    fits(TorchWeights(model), "digits.yaml", tmp_path)
    assert len(digits) + len(loop.images("heldout")[1]) == 1797


def test_transformers_beside_jax_and_its_trainer(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from transformers import AutoConfig, AutoModelForCausalLM

    from diloco_cli.region.names import transformers_names
    from diloco_cli.region.torch_weights import TorchWeights

    spec = load_run(FOLDER / "pytorch.yaml").spec
    model = resolve(spec).model
    config, names = transformers_names(spec.model, sequence=64)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    weights = TorchWeights(theirs, names=names)
    check_tensors(weights.tensors(), model.tensors())
    check(weights)
    tokens = example("pytorch_loop").batch(np.arange(4096).astype(np.uint8), 0)
    assert torch.isfinite(example("pytorch_loop").loss_of(theirs, tokens))

    loop = example("hf_trainer")
    fits(TorchWeights(loop.network()), "hf-trainer.yaml", tmp_path)
    window = next(iter(loop.Windows(3)))
    assert window["input_ids"].shape == (loop.SEQUENCE,)
