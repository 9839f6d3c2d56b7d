"""A PyTorch loop over a transformers model, as a region beside one that is trained with JAX.

    diloco run pipelines/own-trainer/pytorch.yaml

The run's model is the built-in decoder. This region trains the same model as transformers has
it, with torch's AdamW: names and axes are mapped to the run's, and everything else is its own.

Under torchrun the model is cut over the processes (FSDP2): `command: [torchrun,
--nproc-per-node=2, pytorch_loop.py]`, and `inner: {batch: 8}`.
"""

import os
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from diloco_cli import Region
from diloco_cli.region.names import transformers_names
from diloco_cli.region.torch_weights import TorchOptimizer, TorchRanks, TorchWeights

SEQUENCE, BATCH = 64, 4


def text() -> np.ndarray:
    """The bytes of Python's own library; put your loader here."""
    import sysconfig
    from pathlib import Path

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def batch(corpus: np.ndarray, number: int) -> torch.Tensor:
    """The batch of one step: the same number gives the same batch, so a restart repeats none."""
    starts = np.random.default_rng([1, number]).integers(0, corpus.size - SEQUENCE - 1, BATCH)
    rows = np.stack([corpus[start : start + SEQUENCE + 1] for start in starts])
    return torch.from_numpy(rows.astype(np.int64))


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def cut(model: Any) -> TorchRanks | None:
    """Deals the parameters out over the processes, if there are several."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    mesh = init_device_mesh(
        "cuda" if torch.cuda.is_available() else "cpu", (torch.distributed.get_world_size(),)
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return TorchRanks()


def main() -> None:
    region = Region.here()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    config, names = transformers_names(region.settings().model, sequence=SEQUENCE)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).train()
    ranks = cut(model)
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1)
    corpus = text()
    with region.join(
        TorchWeights(model, names=names), optimizer=TorchOptimizer(adam), ranks=ranks
    ) as outer:
        number = outer.cursor.get("number", 0)
        while outer.go_on():
            loss = loss_of(model, batch(corpus, number * world + rank))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            adam.zero_grad()
            number += 1
            outer.stepped(tokens=world * BATCH * SEQUENCE, loss=loss, cursor={"number": number})


if __name__ == "__main__":
    main()
