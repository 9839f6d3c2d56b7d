"""One Weights & Biases run of all regions; where it goes is for WANDB_MODE and the like to say."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco_cli.errors import LinkError
from diloco_cli.observe.sinks.points import RUN, ObservedRun, Point
from diloco_cli.system.outputs import writing

wandb: Any = importlib.import_module("wandb")  # Checks of types need not have it.
X = "tokens"


class WandbRun:
    """Values are named `run/…` and `REGION/…`; their x-axis is the merged tokens."""

    def __init__(self, run: ObservedRun, folder: Path) -> None:
        with writing(folder, "--out"):
            folder.mkdir(parents=True, exist_ok=True)
        # Where a server listens and who may talk to it is nobody else's business.
        config = {key: value for key, value in run.settings.items() if key != "server"}
        try:
            self._run = wandb.init(
                dir=str(folder), name=run.name, config=config, settings=wandb.Settings(silent=True)
            )
        except wandb.Error as error:
            raise LinkError(
                f"Weights & Biases does not take the run: {error}",
                hint="Log in with `wandb login`, or set WANDB_MODE=offline.",
            ) from None
        self._run.define_metric(X)
        self._run.define_metric("*", step_metric=X)
        self.where = self._run.url or str(self._run.dir)

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            group = "run" if point.region == RUN else f"regions/{point.region}"
            named = {f"{group}/{name}": value for name, value in point.values.items()}
            self._run.log({X: point.tokens, "time": point.time, **named})

    def close(self) -> None:
        self._run.finish()
