"""Every adapter passes the conformance check, and the check notices one that is unfit."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from diloco_cli.core.fragments import Piece, cut, gather
from diloco_cli.errors import SpecError
from diloco_cli.region import NumpyWeights, Transposed
from diloco_cli.testing import check
from tests import ROOT
from tests.region.linear_loop import Momentum, batch, first, loss_and_slopes

torch = pytest.importorskip("torch")

WHOLE = Piece("w", 0, 6, (6, 3), 0)


def whole(weights: Any) -> dict[str, np.ndarray]:
    return {
        tensor.name: weights.read(Piece(tensor.name, 0, tensor.rows, tensor.shape, 0))
        for tensor in weights.tensors()
    }


def test_numpy():
    arrays = first()
    optimizer = Momentum(arrays)
    before = {name: values.copy() for name, values in arrays.items()}

    def step() -> None:
        optimizer.step(loss_and_slopes(arrays, *batch(0))[1])

    check(NumpyWeights(arrays, embeddings={"w"}), step=step, optimizer=optimizer)
    assert all((arrays[name] == before[name]).all() for name in before)


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 6)
        self.fc = torch.nn.Linear(6, 3)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, tokens):
        return self.fc(self.table(tokens)) * self.scale


NAMES = {"embed": "table.weight", "w": Transposed("fc.weight"), "b": "fc.bias", "s": "scale"}


def torch_step(net, optimizer):
    def step() -> None:
        optimizer.zero_grad()
        net(torch.arange(10)).square().sum().backward()
        optimizer.step()

    return step


def test_torch():
    from diloco_cli.region.torch_weights import TorchOptimizer, TorchWeights

    net = _Net()
    adam = torch.optim.AdamW(net.parameters(), lr=1e-3)
    weights = TorchWeights(net, names=NAMES)
    shapes = {tensor.name: (tensor.shape, tensor.embedding) for tensor in weights.tensors()}
    assert shapes["embed"] == ((10, 6), True) and shapes["w"] == ((6, 3), False)
    assert shapes["s"] == ((), False) and "frozen" not in shapes
    check(weights, step=torch_step(net, adam), optimizer=TorchOptimizer(adam))
    np.testing.assert_array_equal(weights.read(WHOLE), net.fc.weight.detach().numpy().T)


def test_torch_narrow_weights_need_their_master_copies():
    from diloco_cli.region.torch_weights import TorchWeights

    net = _Net().to(torch.bfloat16)
    with pytest.raises(SpecError, match=r"scale is torch\.bfloat16") as refused:
        TorchWeights(net)
    assert "master=" in (refused.value.hint or "")
    master = {n: p.detach().float() for n, p in net.named_parameters() if p.requires_grad}
    for values in master.values():
        values.requires_grad_(True)
    adam = torch.optim.AdamW(master.values(), lr=1e-3)

    def step() -> None:
        net.zero_grad()
        net(torch.arange(10)).float().square().sum().backward()
        for name, parameter in net.named_parameters():
            if name in master and parameter.grad is not None:
                master[name].grad = parameter.grad.float()
        adam.step()
        with torch.no_grad():
            for name, values in master.items():
                net.get_parameter(name).copy_(values)

    check(TorchWeights(net, master=master), step=step)

    class Half(TorchWeights):
        """Forgets the copies that the optimiser moves."""

        def write(self, piece, rows):
            kept = {name: values.detach().clone() for name, values in master.items()}
            super().write(piece, rows)
            with torch.no_grad():
                for name, values in kept.items():
                    master[name].copy_(values)

        def read(self, piece):
            self._master = {}
            return super().read(piece)

    for values in master.values():
        values.requires_grad_(True)
    with pytest.raises(SpecError, match=r"was written and .* is read"):
        check(Half(net, master=master), step=step)


def test_jax_trees_and_modules():
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from diloco_cli.region.jax_weights import JaxOptimizer, JaxWeights

    params = {"layers": [{"w": jnp.ones((6, 3))}], "b": jnp.zeros(3)}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    params["layers"][0]["w"] = jax.device_put(params["layers"][0]["w"], rows)
    weights = JaxWeights(params, names={"w": "layers.0.w", "b": "b"})
    adam = optax.adamw(1e-3)
    optimizer = JaxOptimizer(adam.init(params), lambda: adam.init(weights.params))

    def step() -> None:
        slope = jax.grad(lambda p: (p["layers"][0]["w"].sum() + p["b"].sum()) ** 2)(weights.params)
        updates, optimizer.state = adam.update(slope, optimizer.state, weights.params)
        weights.params = optax.apply_updates(weights.params, updates)

    check(weights, step=step, optimizer=optimizer)
    assert weights.params["layers"][0]["w"].sharding == rows

    model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    module = JaxWeights.of_nnx(model, names={"w": Transposed("kernel"), "b": "bias"})
    check(module)
    assert {tensor.name: tensor.shape for tensor in module.tensors()} == {"w": (3, 6), "b": (3,)}
    module.write(Piece("b", 0, 3, (3,), 0), np.arange(3, dtype=np.float32))
    np.testing.assert_array_equal(np.asarray(nnx.state(model)["bias"]), [0, 1, 2])
    with pytest.raises(SpecError, match="b is bfloat16"):
        JaxWeights({"b": jnp.zeros(3, jnp.bfloat16)})


def test_jax_arrays_of_two_processes():
    """`check` passes in the leading process while the other follows its orders."""
    command = [sys.executable, "-m", "tests.region.two_jax_processes"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(next(each for each in ended.stdout.splitlines() if each.startswith("{")))
    first = np.arange(24, dtype=np.float32).reshape(4, 6) / 7
    turned = first.T.copy()
    turned[1:3] = 9
    np.testing.assert_array_equal(np.array(found["whole"]["r"], np.float32), first)
    np.testing.assert_array_equal(np.array(found["whole"]["c"], np.float32), turned)
    assert found["spec"] == [None, "fsdp"] and found["spread"]
    assert "lie on devices of several processes" in found["refusal"]
    assert "ranks=JaxRanks()" in found["refusal"]


def test_frameworks_meet_in_one_layout():
    import jax.numpy as jnp

    from diloco_cli.region.jax_weights import JaxWeights
    from diloco_cli.region.torch_weights import TorchWeights

    net = torch.nn.Linear(6, 3)
    theirs = TorchWeights(net, names={"w": Transposed("weight"), "b": "bias"})
    ours = JaxWeights({"w": jnp.zeros((6, 3)), "b": jnp.zeros(3)})
    layout = cut(theirs.tensors(), 2)
    assert layout.digest == cut(ours.tensors(), 2).digest
    for fragment in layout.fragments:
        for piece in fragment.pieces:
            ours.write(piece, theirs.read(piece))
    for fragment in layout.fragments:
        vector = gather(whole(ours), fragment)
        np.testing.assert_array_equal(vector, gather(whole(theirs), fragment))
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    made = x @ np.asarray(ours.params["w"]) + np.asarray(ours.params["b"])
    np.testing.assert_allclose(made, net(torch.from_numpy(x)).detach().numpy(), atol=1e-6)


class _Unfit(NumpyWeights):
    def __init__(self, how: str) -> None:
        self.how, self.copy = how, first()
        super().__init__(first())

    def read(self, piece):
        rows = super().read(piece)
        if self.how == "view" and piece.tensor == "w":
            return self._arrays["w"][piece.start : piece.stop]
        return rows.astype(np.float16).astype(np.float32) if self.how == "narrow" else rows

    def write(self, piece, rows):
        if self.how == "everything" and piece.tensor == "w":
            self._arrays["w"][...] = rows[0]
        super().write(piece, rows)

    def step(self) -> None:
        """Moves a copy of its own, which no write has reached."""
        for name, values in self._arrays.items():
            values[...] = self.copy[name] + 1e-3


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("narrow", r"Rows 0:6 of w: .* was written and .* is read"),
        ("everything", "Rows 1:5 of w: writing them has changed other rows"),
        ("view", "Rows 0:6 of w: what was read has changed with a later write"),
        ("copies", "w: a step after a write went on from what was there before it"),
    ],
)
def test_the_check_notices(how, message):
    weights = _Unfit(how)
    with pytest.raises(SpecError, match=message):
        check(weights, step=weights.step)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"w": "nothing"}, "w is mapped to 'nothing', which these weights do not have"),
        ({"w": "w", "v": "w"}, "w and v are both mapped to 'w'"),
        ({"w": "w"}, "'b' has no name on the wire"),
    ],
)
def test_names_that_do_not_fit_are_refused(names, message):
    with pytest.raises(SpecError, match=message):
        NumpyWeights(first(), names=names)
