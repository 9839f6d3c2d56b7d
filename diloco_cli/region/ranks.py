"""One region whose loop runs in several processes: the first joins, the others follow.

    with region.join(weights, optimizer=optimizer, ranks=TorchRanks()) as outer:
        while outer.go_on():        # the same answer in every process
            …
            outer.stepped(tokens=…) # tokens of all of them together; only the first one's count

Whatever is done to the weights between two steps is done in every process in the same order, so
it may be collective. The orders come from the first one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol, SupportsFloat

import numpy as np

from diloco_cli.core.fragments import Piece
from diloco_cli.worker.engines.rows_engine import OptimizerState, Weights


class Ranks(Protocol):
    """The processes of one region."""

    leads: bool
    """Whether this is the one that joins."""

    def share(self, data: bytes) -> bytes:
        """Gives every process what the leading one has; all of them call it."""
        ...


def _order(word: str, **about: Any) -> bytes:
    return json.dumps({"order": word, **about}).encode()


class LeadingWeights:
    """The leading process's weights and optimiser: others are told before anything is done."""

    def __init__(self, ranks: Ranks, weights: Weights, optimizer: OptimizerState | None) -> None:
        self._ranks, self._weights, self._optimizer = ranks, weights, optimizer
        self._shapes = weights.tensors()

    def tensors(self) -> Any:
        return self._shapes

    def read(self, piece: Piece) -> np.ndarray:
        self._ranks.share(_order("read", piece=asdict(piece)))
        return self._weights.read(piece)

    def write(self, piece: Piece, rows: np.ndarray) -> None:
        self._ranks.share(_order("write", piece=asdict(piece)))
        self._ranks.share(np.ascontiguousarray(rows, np.float32).tobytes())
        self._weights.write(piece, rows)

    # The optimiser

    def save(self) -> dict[str, np.ndarray]:
        assert self._optimizer is not None
        self._ranks.share(_order("save"))
        return self._optimizer.save()

    def load(self, saved: Mapping[str, np.ndarray]) -> None:
        assert self._optimizer is not None
        about = {name: [str(each.dtype), list(each.shape)] for name, each in saved.items()}
        self._ranks.share(_order("load", arrays=about))
        for values in saved.values():
            self._ranks.share(np.ascontiguousarray(values).tobytes())
        self._optimizer.load(saved)

    def reset(self) -> None:
        assert self._optimizer is not None
        self._ranks.share(_order("reset"))
        self._optimizer.reset()

    # The loop

    def evaluate(self, measure: Callable[[], SupportsFloat]) -> SupportsFloat:
        self._ranks.share(_order("evaluate"))
        return measure()

    def joined(self, cursor: Mapping[str, Any], step: int, resumed: bool) -> None:
        self._ranks.share(_order("joined", cursor=dict(cursor), step=step, resumed=resumed))

    def decided(self, go_on: bool) -> None:
        self._ranks.share(_order("go_on", answer=go_on))


class FollowingOuter:
    """What a loop asks in a process that follows; the same methods as `Outer`."""

    def __init__(
        self,
        ranks: Ranks,
        weights: Weights,
        optimizer: OptimizerState | None,
        evaluate: Callable[[], SupportsFloat] | None,
    ) -> None:
        self._ranks, self._weights = ranks, weights
        self._optimizer, self._evaluate = optimizer, evaluate
        self.over = False
        joined = self._obey_until("joined")
        self.cursor: dict[str, Any] = joined["cursor"]
        self.step: int = joined["step"]
        self.resumed: bool = joined["resumed"]

    def go_on(self) -> bool:
        if not self.over:
            self.over = not self._obey_until("go_on")["answer"]
        return not self.over

    def end(self) -> None:
        """The loop was left: what the leading process still does is done with it."""
        while self.go_on():
            pass

    def stepped(
        self,
        *,
        tokens: float,
        loss: SupportsFloat | None = None,
        cursor: Mapping[str, Any] | None = None,
        learning_rate: SupportsFloat | None = None,
        gradient_norm: SupportsFloat | None = None,
    ) -> None:
        """The leading process counts the step of all."""
        self.step += 1

    def _obey_until(self, word: str) -> dict[str, Any]:
        while True:
            order = json.loads(self._ranks.share(b""))
            if order["order"] == word:
                return order
            self._obey(order)

    def _obey(self, order: dict[str, Any]) -> None:
        word, optimizer = order["order"], self._optimizer
        if word in ("read", "write"):
            about = order["piece"]
            piece = Piece(**{**about, "shape": tuple(about["shape"])})
            if word == "read":
                self._weights.read(piece)
            else:
                rows = np.frombuffer(self._ranks.share(b""), np.float32).reshape(piece.shape)
                self._weights.write(piece, rows)
        elif word == "evaluate" and self._evaluate:
            self._evaluate()
        elif optimizer is not None and word == "save":
            optimizer.save()
        elif optimizer is not None and word == "reset":
            optimizer.reset()
        elif optimizer is not None and word == "load":
            optimizer.load(
                {
                    name: np.frombuffer(self._ranks.share(b""), dtype).reshape(shape)
                    for name, (dtype, shape) in order["arrays"].items()
                }
            )
