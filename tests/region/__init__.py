"""Tests of the public Python API.

linear_loop.py  a training loop in numpy, as somebody else would write it
"""
