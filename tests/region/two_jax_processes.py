"""One tree of JAX arrays on the devices of two processes: the first leads, the other follows.

    python -m tests.region.two_jax_processes

Prints as JSON what the leading one found; the other has obeyed, or they would wait for ever.
"""

from __future__ import annotations

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco_cli.core.fragments import Piece
from diloco_cli.errors import SpecError
from diloco_cli.launch.ports import free_addresses
from diloco_cli.region.jax_weights import JaxOptimizer, JaxRanks, JaxWeights
from diloco_cli.region.names import Transposed
from diloco_cli.region.ranks import FollowingOuter, LeadingWeights
from diloco_cli.region.region import Region
from diloco_cli.testing import check
from diloco_cli.worker.engines.many_hosts import join_processes

LONG = bytes(range(256)) * 20


class Loop:
    """What both processes do; every program is started by both of them."""

    def __init__(self) -> None:
        mesh = Mesh(np.array(jax.devices()), ("fsdp",))

        def placed(values: np.ndarray, *axes: str | None) -> jax.Array:
            sharding = NamedSharding(mesh, PartitionSpec(*axes))
            return jax.make_array_from_callback(values.shape, sharding, lambda at: values[at])

        first = np.arange(24, dtype=np.float32).reshape(4, 6) / 7
        params = {
            "rows": placed(first, "fsdp"),
            "columns": placed(first, None, "fsdp"),
            "bias": placed(np.ones(3, np.float32)),
        }
        names = {"r": "rows", "c": Transposed("columns"), "b": "bias"}
        self.weights, adam = JaxWeights(params, names=names), optax.adamw(1e-2)
        init = jax.jit(adam.init)
        self.optimizer = JaxOptimizer(init(params), lambda: init(self.weights.params))

        @jax.jit
        def step(params, state):
            slope = jax.grad(lambda p: sum(jnp.sum(each**2) for each in p.values()))(params)
            updates, state = adam.update(slope, state, params)
            return optax.apply_updates(params, updates), state

        self._step = step

    def step(self) -> float:
        found = self._step(self.weights.params, self.optimizer.state)
        self.weights.params, self.optimizer.state = found
        return 0.0


def lead(loop: Loop, ranks: JaxRanks) -> dict:
    lead = LeadingWeights(ranks, loop.weights, loop.optimizer)
    lead.joined({"long": LONG.decode("latin-1")}, 0, False)
    # A step is what the other process does when it is told to evaluate.
    check(lead, step=lambda: lead.evaluate(loop.step) and None, optimizer=lead)
    lead.write(Piece("c", 1, 3, (2, 4), 0), np.full((2, 4), 9, np.float32))
    whole = {
        each.name: lead.read(Piece(each.name, 0, each.rows, each.shape, 0)).tolist()
        for each in lead.tensors()
    }
    lead.decided(False)
    kept = loop.weights.params["columns"].sharding.spec
    return {"whole": whole, "spec": list(kept), "spread": loop.weights.spread}


def refusal(loop: Loop) -> str:
    try:
        with Region("run.yaml", "paris", "runs/none").join(loop.weights):
            return "joined"
    except SpecError as error:
        return str(error)


def main(address: str, host: int) -> None:
    join_processes(address, hosts=2, host=host)
    loop, ranks = Loop(), JaxRanks()
    if ranks.leads:
        print(json.dumps({**lead(loop, ranks), "refusal": refusal(loop)}))
    else:
        follower = FollowingOuter(ranks, loop.weights, loop.optimizer, loop.step)
        assert follower.cursor["long"].encode("latin-1") == LONG
        follower.end()
    jax.distributed.shutdown()  # Each waits for the other.


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1], 1)
    else:
        address = free_addresses(1)[0]
        command = [sys.executable, "-m", "tests.region.two_jax_processes", address]
        other = subprocess.Popen(command)
        try:
            main(address, 0)
            raise SystemExit(other.wait())
        finally:
            other.kill()
            other.wait()
