"""Float32 vectors in, bytes out, and back: how many bits each value gets. Start with protocol.py.

    protocol.py  what a codec does, and the registry of all kinds
    plain.py     fp32 and bf16: values as byte planes
    block.py     int8, int4, uniform, sign: one scale per block, a few bits per value
    sparse.py    only the largest values of each block

Importing this package registers every kind.

The bits and errors in the docstrings are those that `diloco bench wire` finds in
pseudo-gradients of the quickstart; the error is a share of the vector's length.
"""

from diloco_cli.wire.codecs import block, plain, sparse
from diloco_cli.wire.codecs.protocol import Body, Codec, Foldable, InPlace, NotFinite, codecs

__all__ = [
    "Body",
    "Codec",
    "Foldable",
    "InPlace",
    "NotFinite",
    "block",
    "codecs",
    "plain",
    "sparse",
]
