"""The framework that computes a region's inner steps: tokens in, weights and losses out. Start
with protocol.py.

    protocol.py      what a trainer asks of an engine; float32 numpy at the border
    jax_engine.py    the engine in JAX: one jitted, donated step
    optimizers.py    inner optimisers and learning-rate schedules
    device_codec.py  quantising on the device, so that packed codes cross to the host, not floats

Apart from models/*_flax.py, only this folder imports a framework.
"""

from diloco_cli.worker.engines.protocol import CompiledStep, Engine, EngineSnapshot

__all__ = ["CompiledStep", "Engine", "EngineSnapshot"]
