"""A plain JAX loop as a region: parameters in a dict, optax, one jitted step.

    cd pipelines/own-trainer; python jax_loop.py --describe build/jax-loop.safetensors
    diloco run jax.yaml

Nothing of the run's file says what is computed: it is a small network that learns the next byte
from the four before it. `--describe` writes its first weights once, for everybody.
"""

import sys
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_cli import Region
from diloco_cli.region.jax_weights import JaxOptimizer, JaxWeights

BEFORE, WIDTH, BATCH = 4, 32, 256


def first(seed: int = 0) -> dict:
    """The first weights."""
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "embed": 0.1 * jax.random.normal(keys[0], (256, WIDTH)),
        "hidden": {
            "w": 0.1 * jax.random.normal(keys[1], (BEFORE * WIDTH, 64)),
            "b": jnp.zeros(64),
        },
        "output": {"w": 0.1 * jax.random.normal(keys[2], (64, 256)), "b": jnp.zeros(256)},
    }


def loss_of(params: dict, tokens: jax.Array | np.ndarray) -> jax.Array:
    seen = params["embed"][tokens[:, :BEFORE]].reshape(len(tokens), -1)
    hidden = jax.nn.relu(seen @ params["hidden"]["w"] + params["hidden"]["b"])
    logits = hidden @ params["output"]["w"] + params["output"]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, BEFORE]).mean()


def corpus() -> np.ndarray:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def batch(text: np.ndarray, seed: int, number: int) -> np.ndarray:
    starts = np.random.default_rng([seed, number]).integers(0, text.size - BEFORE - 1, BATCH)
    return np.stack([text[start : start + BEFORE + 1] for start in starts]).astype(np.int32)


def main(seed: int) -> None:
    tx = optax.adamw(3e-3)

    @jax.jit
    def step(params: dict, state: optax.OptState, tokens: jax.Array):
        loss, slope = jax.value_and_grad(loss_of)(params, tokens)
        updates, state = tx.update(slope, state, params)
        return optax.apply_updates(params, updates), state, loss

    text, held = corpus(), batch(corpus(), 999, 0)
    weights = JaxWeights(first(), embeddings=["embed"])
    optimizer = JaxOptimizer(tx.init(weights.params), lambda: tx.init(weights.params))
    with Region.here().join(
        weights, optimizer=optimizer, evaluate=lambda: loss_of(weights.params, held)
    ) as outer:
        number = outer.cursor.get("number", 0)
        while outer.go_on():
            tokens = batch(text, seed, number)
            weights.params, optimizer.state, loss = step(weights.params, optimizer.state, tokens)
            number += 1
            outer.stepped(tokens=BATCH, loss=loss, cursor={"number": number})


if __name__ == "__main__":
    if "--describe" in sys.argv:
        print(Region.describe(JaxWeights(first(), embeddings=["embed"]), sys.argv[-1]))
    else:
        main(seed=int(sys.argv[1]))
