"""What is trained: a kind and its options in; tensors, first weights and a loss out. Start with
protocol.py.

    protocol.py        what a model is, and the registry of all kinds
    transformer.py     what transformers have in common: tensors, first weights, cuts and costs
    positions.py       how positions are encoded, and scaled for longer sequences
    decoder.py         the decoder's options: Qwen3, Llama, Qwen2
    tensors.py         tensors of a file, which somebody else trains
    gemma.py           Gemma 4's options
    decoder_flax.py    the transformer's arithmetic in Flax: tokens in, nats out
    experts_flax.py    where tokens go, and what experts make of them
    products_flax.py   products that are rounded, gradients that are not
    attention_flax.py  causal attention, by the program that suits the device
    generate_flax.py   text from a model, one token after another; its loss on text
    hf/                models in the files of the Hugging Face Hub, both ways

Importing this package registers every kind and loads no framework.
"""

from diloco_cli.models import decoder, gemma, tensors
from diloco_cli.models.hf import imported
from diloco_cli.models.protocol import (
    PLAIN,
    Described,
    LossFn,
    LossForm,
    Model,
    Partitioned,
    first_tensors,
    models,
    parameters,
)

__all__ = [
    "PLAIN",
    "Described",
    "LossFn",
    "LossForm",
    "Model",
    "Partitioned",
    "decoder",
    "first_tensors",
    "gemma",
    "imported",
    "models",
    "parameters",
    "tensors",
]
