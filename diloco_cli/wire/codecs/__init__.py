"""How many bits a number gets: float32 vectors in, bytes out, and back. Start with plain.py.

block.py   few bits a number: one scale per block, one small whole number per value
plain.py   how many bits does a number get?
sign.py    one bit a number: which way, and for the whole block how far on average
sparse.py  only the largest values travel: the rest waits, and grows, in the region's held work
"""

from diloco_cli.wire.codecs import block, plain, sign, sparse

__all__ = ["block", "plain", "sign", "sparse"]
