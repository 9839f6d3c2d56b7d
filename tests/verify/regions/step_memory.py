"""What does one inner step need of each device? python -m tests.verify.regions.step_memory

Compiles the step of a model over forced host devices, as a region with a mesh does, and
reads XLA's own account of it. Nothing is allocated, so that a model far larger than this
machine can be asked about. The CPU's compiler knows no reduce-scatter and widens bfloat16;
with `--topology v5e:2x4` and the package libtpu that of a TPU is asked instead, which needs
no TPU.

    arguments    weights, optimiser and batch of a device
    temporaries  gradients, activations and weights while they are put together

Ends with 1 when the last two forms, those meant for large models, miss their goal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

GOAL = 2.5e9
"""Bytes of temporaries a device, in float32."""

FORMS: dict[str, dict[str, Any]] = {
    "as small models are trained": {},
    "remat": {"remat": "block"},
    "remat, loss in 8 parts": {"remat": "block", "loss_chunks": 8},
    "remat, loss in 8 parts, bfloat16": {
        "remat": "block",
        "loss_chunks": 8,
        "compute": "bfloat16",
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="1b")
    parser.add_argument("--layers", type=int, help="instead of the size's own")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--each", type=int, default=1, help="sequences a device")
    parser.add_argument("--fsdp", type=int, default=8)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--topology", help="compile for TPUs, such as v5e:2x4 or v5p:2x2x2")
    parser.add_argument("--form", action="append", choices=FORMS, help="this one only")
    parser.add_argument("--json", help="file to write the figures to")
    asked = parser.parse_args()
    devices = asked.fsdp * asked.tensor
    # Before JAX is imported, which reads it once.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    # A compiler without a TPU need not look for one.
    os.environ.update({"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"})
    found = []
    for name in asked.form or FORMS:
        found.append({"form": name, **figures(asked, FORMS[name])})
        print(line(found[-1]), flush=True)
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(found, file, indent=1)
    goals = {"remat, loss in 8 parts": GOAL, "remat, loss in 8 parts, bfloat16": GOAL}
    missed = [one["form"] for one in found if one["temporaries"] > goals.get(one["form"], 1e99)]
    for form in missed:
        print(f"missed: {form} needs more than {GOAL / 1e9} GB of temporaries", file=sys.stderr)
    return 1 if missed else 0


def figures(asked: argparse.Namespace, form: dict[str, Any]) -> dict[str, Any]:
    from diloco_cli.models.decoder import Decoder
    from diloco_cli.models.protocol import parameters
    from diloco_cli.plan.devices import named_device, needs_of
    from diloco_cli.spec.schema import InnerSpec, RegionSpec
    from diloco_cli.worker.engines.devices import open_mesh
    from diloco_cli.worker.engines.jax_engine import make_step
    from diloco_cli.worker.engines.learning_rate import RatePlan

    model = Decoder(asked.size, layers=asked.layers, vocabulary=asked.vocabulary)
    mesh = {"fsdp": asked.fsdp, "tensor": asked.tensor}
    inner = InnerSpec(batch=asked.each * asked.fsdp, sequence=asked.sequence, **form)
    region = RegionSpec.model_validate({"name": "here", "mesh": mesh})
    devices = _topology(asked) if asked.topology else open_mesh(region)
    step = make_step(model, inner, RatePlan.of(inner, 1000), mesh=devices)
    began = time.monotonic()
    memory = step.compile(inner).memory_analysis()
    device = named_device(asked.topology.partition(":")[0]) if asked.topology else None
    reckoned = needs_of(model, inner, region.devices_by_axis, device=device)
    return {
        "parameters": parameters(model),
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "reckoned": reckoned.gradients + reckoned.working,
        "seconds": round(time.monotonic() - began, 1),
    }


def _topology(asked: argparse.Namespace) -> Any:
    """A mesh of TPUs that need not be there."""
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    devices = topologies.get_topology_desc(asked.topology, platform="tpu").devices
    shape = (1, asked.fsdp, asked.tensor)
    kinds = (AxisType.Auto,) * 3
    return Mesh(np.array(devices).reshape(shape), ("data", "fsdp", "tensor"), axis_types=kinds)


def line(one: dict[str, Any]) -> str:
    return (
        f"{one['form']}: {one['parameters'] / 1e9:.2f} B parameters, "
        f"{one['arguments'] / 1e9:.2f} GB of arguments and {one['temporaries'] / 1e9:.2f} GB of "
        f"temporaries a device ({one['reckoned'] / 1e9:.2f} by `diloco plan`), compiled in "
        f"{one['seconds']} s"
    )


if __name__ == "__main__":
    raise SystemExit(main())
