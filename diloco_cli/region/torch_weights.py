"""Weights and optimiser of a PyTorch module, whole or cut into DTensors (FSDP2).

    weights = TorchWeights(model)
    optimizer = TorchOptimizer(torch.optim.AdamW(model.parameters()))

Parameters that are trained take part; buffers and frozen parameters stay the region's own. Where
a parameter is a DTensor, reading and writing are done by all processes together: see ranks.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from diloco_cli.core.fragments import Piece, Tensor
from diloco_cli.errors import SpecError
from diloco_cli.region.names import Names, sources
from diloco_cli.region.numpy_weights import refuse_narrow

HEADER_BYTES = 512


class TorchWeights:
    """The trained parameters of a module; written in place, so that graphs and optimiser see it."""

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        names: Names | None = None,
        embeddings: Collection[str] | None = None,
        master: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """`names` maps names on the wire to those of the parameters, which are used without it.

        `embeddings` are tensors, by their names on the wire, whose rows are used one by one; left
        out, those of the module's `nn.Embedding`s. `master` are float32 copies, by the names of
        their parameters, that the optimiser moves where parameters are narrower: these are then
        what is read, and both are written.
        """
        own = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self._parameters, self._master = own, dict(master or {})
        for name, parameter in own.items():
            refuse_narrow(name, str(self._master.get(name, parameter).dtype))
        found = sources(own, names, embeddings or ())
        if embeddings is None:
            rows = _embedding_names(module, own)
            named = {wire for wire, source in found.items() if source.name in rows}
            found = sources(own, names, named)
        self._sources = found

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(
            Tensor(
                wire,
                tuple(reversed(shape) if source.transposed else shape),
                source.embedding,
            )
            for wire, source in self._sources.items()
            for shape in [tuple(self._parameters[source.name].shape)]
        )

    @torch.no_grad()
    def read(self, piece: Piece) -> np.ndarray:
        source = self._sources[piece.tensor]
        held = self._master.get(source.name, self._parameters[source.name])
        rows = _rows(_whole(held), piece, source.transposed)
        return np.array(rows.to("cpu", torch.float32).numpy(), copy=True, order="C")

    @torch.no_grad()
    def write(self, piece: Piece, rows: np.ndarray) -> None:
        source = self._sources[piece.tensor]
        new = torch.from_numpy(np.array(rows, np.float32, copy=True))
        for held in (self._master.get(source.name), self._parameters[source.name]):
            if held is None:
                continue
            if isinstance(held, DTensor):
                whole = held.full_tensor()
                _rows(whole, piece, source.transposed).copy_(new)
                # Every process has the whole tensor, so none has to send it.
                cut = distribute_tensor(
                    whole, held.device_mesh, held.placements, src_data_rank=None
                )
                held.to_local().copy_(cut.to_local())
            else:
                _rows(held.detach(), piece, source.transposed).copy_(new)


class TorchOptimizer:
    """What a `torch.optim.Optimizer` remembers of its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @torch.no_grad()
    def save(self) -> dict[str, np.ndarray]:
        return {
            f"{number}/{key}": _array(value)
            for number, state in self._optimizer.state_dict()["state"].items()
            for key, value in state.items()
            if value is not None
        }

    @torch.no_grad()
    def load(self, saved: Mapping[str, np.ndarray]) -> None:
        parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
        state: dict[int, dict[str, Any]] = {}
        for name, values in saved.items():
            number, _, key = name.partition("/")
            value = torch.from_numpy(np.array(values, copy=True))
            like = parameters[int(number)]
            if isinstance(like, DTensor) and value.shape == like.shape:
                value = distribute_tensor(
                    value.to(like.device), like.device_mesh, like.placements, src_data_rank=None
                )
            state.setdefault(int(number), {})[key] = value
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def reset(self) -> None:
        self._optimizer.state.clear()


class TorchRanks:
    """The processes of one region under torchrun or the like; the first of them leads.

    Orders travel through a group of their own, on the CPU, so that they hold up no device.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise SpecError(
                "TorchRanks needs torch.distributed, which is not initialised.",
                hint="Call torch.distributed.init_process_group() first, or leave ranks= out.",
            )
        self._group = cast(Any, dist.new_group(backend="gloo"))
        self.leads = dist.get_rank() == 0

    def share(self, data: bytes) -> bytes:
        """Gives every process what the leading one has; `data` of the others is not looked at."""
        header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        if self.leads:
            head = len(data).to_bytes(8, "little") + data[: HEADER_BYTES - 8]
            header[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        dist.broadcast(header, src=0, group=self._group)
        found = header.numpy().tobytes()
        size = int.from_bytes(found[:8], "little")
        if size <= HEADER_BYTES - 8:
            return found[8 : 8 + size]
        rest = torch.zeros(size - HEADER_BYTES + 8, dtype=torch.uint8)
        if self.leads:
            rest = torch.frombuffer(bytearray(data[HEADER_BYTES - 8 :]), dtype=torch.uint8)
        dist.broadcast(rest, src=0, group=self._group)
        return found[8:] + rest.numpy().tobytes()


def _embedding_names(module: torch.nn.Module, known: Mapping[str, torch.nn.Parameter]) -> set[str]:
    tables = {id(each.weight) for each in module.modules() if isinstance(each, torch.nn.Embedding)}
    return {name for name, parameter in known.items() if id(parameter) in tables}


def _whole(values: torch.Tensor) -> torch.Tensor:
    return values.full_tensor() if isinstance(values, DTensor) else values.detach()


def _rows(values: torch.Tensor, piece: Piece, transposed: bool) -> torch.Tensor:
    """A view of a piece's rows; axes that are the other way round are turned."""
    turned = values.permute(*reversed(range(values.ndim))) if transposed else values
    return turned[piece.start : piece.stop] if piece.shape else turned


def _array(value: Any) -> np.ndarray:
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    whole = _whole(value).cpu()
    # numpy has no bfloat16; float32 holds every value of it.
    wide = whole.float() if whole.dtype in (torch.bfloat16, torch.float16) else whole
    return np.array(cast(Any, wide).numpy(), copy=True)
