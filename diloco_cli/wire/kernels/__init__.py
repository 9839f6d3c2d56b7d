"""The compiled loops under the codecs. Start with jit.py.

block.py   the loops of the block codecs: one scale for each block, a few bits for each value
jit.py     loops at the speed of the memory: numba kernels, compiled on first use and then kept
planes.py  floats as byte planes: all lowest bytes, then all of the next, up to the highest
sparse.py  the loops of the sparse codec: which values are the largest, where are they, how …
sums.py    sums over decoded values, in an order that no number of threads or lanes changes
warm.py    compiles every kernel and keeps the machine code, so that no run waits for it
"""
