"""What is trained: a kind and its options in; tensors, first weights and a loss out. Start with
protocol.py.

    protocol.py      what a model is, and the registry of all kinds
    decoder.py       the decoder-only transformer: its options, its tensors, its first weights
    decoder_flax.py  the decoder's arithmetic in Flax: tokens in, nats out

Importing this package registers every kind and loads no framework.
"""

from diloco_cli.models import decoder
from diloco_cli.models.protocol import Described, LossFn, Model, models, parameters

__all__ = ["Described", "LossFn", "Model", "decoder", "models", "parameters"]
