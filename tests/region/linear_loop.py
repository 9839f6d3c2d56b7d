"""A linear model trained with numpy, by a loop of its own; its command line says what goes wrong.

python -m tests.region.linear_loop [once=FOLDER] [exit|hang|rubbish|shape|narrow|wild]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from diloco_cli import Region
from diloco_cli.region import NumpyWeights

TRUE = np.random.default_rng(7).normal(size=(6, 3)).astype(np.float32)
BATCH = 16


def first() -> dict[str, np.ndarray]:
    return {"w": np.zeros((6, 3), np.float32), "b": np.zeros(3, np.float32)}


class Momentum:
    """Gradient descent with momentum."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays
        self.reset()

    def step(self, slopes: dict[str, np.ndarray]) -> None:
        for name, slope in slopes.items():
            self.speed[name] = 0.5 * self.speed[name] + slope
            self.arrays[name] -= 0.02 * self.speed[name]

    def save(self) -> dict[str, np.ndarray]:
        return {name: speed.copy() for name, speed in self.speed.items()}

    def load(self, saved) -> None:
        self.speed = {name: np.array(speed) for name, speed in saved.items()}

    def reset(self) -> None:
        self.speed = {name: np.zeros_like(array) for name, array in self.arrays.items()}


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(number).normal(size=(BATCH, 6)).astype(np.float32)
    return inputs, inputs @ TRUE + 1.0


def loss_and_slopes(arrays, inputs, wanted):
    wrong = inputs @ arrays["w"] + arrays["b"] - wanted
    slopes = {"w": inputs.T @ wrong / BATCH, "b": wrong.mean(axis=0)}
    return float((wrong**2).mean()), slopes


def heldout(arrays) -> float:
    return loss_and_slopes(arrays, *batch(10**9))[0]


def main(*words: str) -> None:
    arrays = first()
    options = dict(word.split("=") for word in words if "=" in word)
    fault = next((word for word in words if "=" not in word), "")
    if (once := options.get("once")) and fault:
        mark = Path(once) / "happened"
        fault = "" if mark.exists() else fault
        mark.touch()
    print("a line that says progress and posted, on standard output", flush=True)
    if fault == "shape":
        arrays["w"] = arrays["w"].T.copy()
    if fault == "narrow":
        arrays["w"] = arrays["w"].astype(np.float16)
    if fault == "exit":
        sys.exit(7)
    optimizer = Momentum(arrays)
    with Region.here().join(
        NumpyWeights(arrays), optimizer=optimizer, evaluate=lambda: heldout(arrays)
    ) as outer:
        at = outer.cursor.get("at", 0)
        while outer.go_on():
            loss, slopes = loss_and_slopes(arrays, *batch(at))
            optimizer.step(slopes)
            at += 1
            if fault == "hang" and at == 8:
                time.sleep(600)
            if fault == "rubbish" and at == 8:
                arrays["w"][2, 1] = np.nan
            if fault == "wild":
                arrays["w"] += 1e4
            outer.stepped(tokens=BATCH, loss=loss, cursor={"at": at})
            time.sleep(float(options.get("sleep", 0.002)))


if __name__ == "__main__":
    main(*sys.argv[1:])
