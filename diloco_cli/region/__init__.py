"""Your own training loop as a region of a run: `from diloco_cli import Region`. Start with
region.py.

    region.py         joins a region; what a loop asks before and says after each of its steps
    names.py          names and axes of a framework's tensors on the wire
    ranks.py          one loop in several processes: the first joins, the others follow
    numpy_weights.py  weights in numpy arrays
    torch_weights.py  weights and optimiser of a PyTorch module, whole or cut into DTensors
    jax_weights.py    weights in a tree of JAX arrays, on one device or many, of one process or more
    describe.py       writes down what is trained, for `model: {kind: tensors}`

What is exported here, the adapters and `diloco_cli.testing.check` are the public Python API and
follow semantic versioning. Only the adapters import a framework, each its own.
"""

from diloco_cli.core.fragments import Piece, Tensor
from diloco_cli.region.names import Names, Transposed
from diloco_cli.region.numpy_weights import NumpyWeights
from diloco_cli.region.region import Outer, Region
from diloco_cli.worker.engines.rows_engine import OptimizerState, Weights

__all__ = [
    "Names",
    "NumpyWeights",
    "OptimizerState",
    "Outer",
    "Piece",
    "Region",
    "Tensor",
    "Transposed",
    "Weights",
]
