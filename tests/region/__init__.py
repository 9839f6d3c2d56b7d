"""Tests of the public Python API.

linear_loop.py        a training loop in numpy, as somebody else would write it
two_jax_processes.py  JAX arrays on the devices of two processes, read and written by both
"""
