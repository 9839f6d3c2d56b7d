"""The framework that computes a region's inner steps: tokens in, weights and losses out. Start
with protocol.py.

    protocol.py      what a trainer asks of an engine; float32 numpy at the border
    jax_engine.py    the engine in JAX: one jitted, donated step
    rows_engine.py   the engine over weights that somebody else trains
    placement.py     where weights and optimiser lie: in which arrays, on which devices
    devices.py       the devices of a region: its mesh, and what they are capable of
    accelerators.py  which devices we know: how fast they are, how much fits into them
    optimizers.py    inner optimisers and learning-rate schedules
    learning_rate.py the rate of every step, also across changes of the settings
    exchange.py      how vectors meet the weights without holding up the training
    orbax_folder.py  sharded checkpoints, written beside the training
    many_hosts.py    one engine that leads, others that follow, where a region has several hosts
    host_speed.py    how fast one host of several is, by itself
    text_sampler.py  a few words that published weights write, for people who watch
    device_codec.py  quantising on the device, so that packed codes cross to the host, not floats

Apart from models/*_flax.py, only this folder imports a framework.
"""

from diloco_cli.worker.engines.protocol import (
    CompiledStep,
    Engine,
    EngineSnapshot,
    HeldWork,
    Orders,
    StepCost,
    StepFacts,
    TrainingEngine,
    Vector,
    mixed,
)

__all__ = [
    "CompiledStep",
    "Engine",
    "EngineSnapshot",
    "HeldWork",
    "Orders",
    "StepCost",
    "StepFacts",
    "TrainingEngine",
    "Vector",
    "mixed",
]
