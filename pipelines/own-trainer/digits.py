"""A small vision model on scikit-learn's digits, in PyTorch: nothing here is about text.

    cd pipelines/own-trainer; python digits.py --describe build/digits.safetensors
    diloco run digits.yaml
    python digits.py --accuracy WEIGHTS      # of `diloco pull`

An image is 64 pixels, so it counts as 64 tokens. Each region has its own quarter of the images,
given by its number on the command line; a fifth of all images is held out.
"""

import sys
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

from diloco_cli import Region
from diloco_cli.region.torch_weights import TorchOptimizer, TorchWeights

PIXELS, BATCH = 64, 16


def network(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 10),
    )


def images(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`training` or `heldout` images with their digits, in an order that is always the same."""
    found: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    chosen = order[360:] if part == "training" else order[:360]
    pixels = torch.from_numpy(found.images[chosen].astype(np.float32) / 16.0)
    return pixels[:, None], torch.from_numpy(found.target[chosen].astype(np.int64))


def accuracy(model: torch.nn.Module) -> float:
    pixels, digits = images("heldout")
    with torch.no_grad():
        return float((model(pixels).argmax(1) == digits).float().mean())


def loss_of(model: torch.nn.Module, pixels: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(pixels), digits)


def heldout_loss(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return float(loss_of(model, *images("heldout")))


def main(number: int, count: int) -> None:
    torch.set_num_threads(1)  # So small a network is fastest on one core.
    model = network()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pixels, digits = (values[number::count] for values in images("training"))
    with Region.here().join(
        TorchWeights(model), optimizer=TorchOptimizer(adam), evaluate=lambda: heldout_loss(model)
    ) as outer:
        step = outer.cursor.get("step", 0)
        while outer.go_on():
            chosen = np.random.default_rng([number, step]).integers(0, len(digits), BATCH)
            loss = loss_of(model, pixels[chosen], digits[chosen])
            adam.zero_grad()
            loss.backward()
            adam.step()
            step += 1
            outer.stepped(tokens=BATCH * PIXELS, loss=loss, cursor={"step": step})


def measure(file: str) -> float:
    from safetensors.torch import load_file

    model = network()
    model.load_state_dict(load_file(file))
    return accuracy(model)


if __name__ == "__main__":
    if "--describe" in sys.argv:
        print(Region.describe(TorchWeights(network()), sys.argv[-1]))
    elif "--accuracy" in sys.argv:
        print(f"accuracy {measure(sys.argv[-1]):.4f}")
    else:
        main(*map(int, sys.argv[1].split("/")))
