"""The compiled loops under the codecs: arrays in, arrays filled in place. Start with jit.py.

jit.py     what a kernel is: one signature, compiled on first use, kept on disk
bits.py    what kernels share: the bits of floats, and bf16 scales in a body
planes.py  fp32 and bf16 as byte planes
block.py   int8, int4, uniform, sign: encode, decode, add, fold many bodies at once
sparse.py  pick the largest values of each block, write and read their places
sums.py    sums over decoded values, in an order that no number of threads changes
"""
