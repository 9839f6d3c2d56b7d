"""Our models are theirs: logits, generations and files, against transformers and torch."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from diloco_cli.assemble import load_run
from diloco_cli.data import datasets
from diloco_cli.models import decoder_flax, models
from diloco_cli.models.generate_flax import generate
from diloco_cli.models.hf.read import HfWeights, read_choice
from diloco_cli.models.hf.write import write_model
from diloco_cli.models.transformer import Transformer
from diloco_cli.worker.engines.jax_engine import use_compile_cache
from tests.cli.harness import diloco, trained

with warnings.catch_warnings():  # What they say while they are imported is not ours to mend.
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

use_compile_cache()
torch.set_num_threads(1)

CLOSE = 1e-5
"""Of the largest logit: how sums are rounded differs from one kind of processor to another."""
SEQUENCE = 96
SMALL: dict[str, Any] = dict(
    kind="decoder", layers=2, width=32, heads=4, kv_heads=2, ffn=48, vocabulary=96
)
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original": 32, "low": 1.0, "high": 4.0}
YARN = {"kind": "yarn", "factor": 4.0, "original": 32}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": SMALL,
    "qwen3, wide heads, untied, yarn": {**SMALL, "head": 16, "tied": False, "rope": YARN},
    "llama": {**SMALL, "qk_norm": False, "tied": False, "eps": 1e-5, "rope": LLAMA3},
    "qwen2": {**SMALL, "qk_norm": False, "bias": "qkv", "rope_theta": 1e6},
    "qwen3 moe": {**SMALL, "experts": 4, "active": 2, "ffn": 16},
    "gemma4": {
        **{"kind": "gemma4", "size": "tiny", "width": 32, "ffn": 48, "vocabulary": 96},
        **{"layers": 3, "pattern": "ssf", "window": 7, "softcap": 3.0, "head": 8, "full_head": 16},
        "scalars": (1.25, 0.5, 1.5),
    },
    "gemma4, values of their own": {
        **{"kind": "gemma4", "size": "tiny", "width": 32, "ffn": 48, "vocabulary": 96},
        **{"layers": 2, "pattern": "sf", "window": 64, "value_is_key": False, "full_turned": 0.5},
    },
}
FAMILY = {
    "qwen3": "Qwen3",
    "qwen3 moe": "Qwen3Moe",
    "llama": "Llama",
    "qwen2": "Qwen2",
    "gemma4": "Gemma4",
}


def shaken(model: Transformer) -> dict[str, np.ndarray]:
    """First weights in which no norm is 1 and no bias 0, so that each shows in the logits."""
    source, weights = np.random.default_rng(7), model.init(3)
    for name, values in weights.items():
        noise = source.standard_normal(values.shape, np.float32)
        weights[name] = values + np.float32(0.3 if values.ndim == 1 else 0.1) * noise
    return weights


def ours(model: Transformer, weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    forward = jax.jit(lambda params, tokens: decoder_flax.merge(model.shape, params)(tokens))
    return np.asarray(forward(weights, tokens)).reshape(*tokens.shape, -1)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_generations_are_theirs_and_files_go_both_ways(name: str, tmp_path: Path):
    model = models.build(MODELS[name])
    assert isinstance(model, Transformer)
    weights = shaken(model)
    write_model(tmp_path, model, weights, sequence=SEQUENCE, shard=8_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(theirs).__name__ == FAMILY[name.partition(",")[0]] + "ForCausalLM"

    tokens = np.random.default_rng(1).integers(0, model.shape.vocabulary, (2, 70), dtype=np.int32)
    with torch.no_grad():
        wanted = theirs.eval()(torch.from_numpy(tokens).long()).logits.numpy()
    assert np.abs(ours(model, weights, tokens) - wanted).max() <= CLOSE * np.abs(wanted).max()
    assert wanted.std() > 0.1

    prompt = tokens[0, :5].tolist()
    with torch.no_grad():
        told = theirs.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)
    found = list(generate(model.shape, weights, prompt, tokens=64))
    assert found == told[0, 5:].tolist()

    # And back, from the files that they write.
    theirs.save_pretrained(tmp_path / "again", max_shard_size="10KB")
    again = models.build(read_choice(tmp_path / "again"))
    assert isinstance(again, Transformer) and again.shape == model.shape
    read = HfWeights(tmp_path / "again", again)
    assert read.keys() == weights.keys()
    for each, values in weights.items():
        np.testing.assert_array_equal(read[each], values, err_msg=each)


def test_an_exported_run_has_the_loss_that_it_has_here(tmp_path: Path, capsys):
    """And its tokenizer gives every byte its own number."""
    folder = trained(tmp_path, [0, 1])
    assert diloco(capsys, "export", folder, "--out", tmp_path / "hf")[0] == 0
    said = json.loads(diloco(capsys, "evaluate", folder, "--format", "json")[1])
    spec = load_run(folder / "spec.resolved.yaml").spec
    inner = spec.inner_of("left")
    stream = datasets.build(spec.data).open(spec.seed, inner.batch, inner.sequence)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    losses = []
    for batch in stream.heldout(spec.evaluate.batches):
        tokens = torch.from_numpy(batch).long()
        with torch.no_grad():
            losses.append(float(theirs(tokens, labels=tokens).loss))
    assert np.mean(losses) == pytest.approx(said["loss"], abs=5e-5)

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "def naïve(x):\n\treturn  x  # 魚 \x00"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
