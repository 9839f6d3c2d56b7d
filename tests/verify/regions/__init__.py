"""A region on many devices: what its step needs of each, and whether it stays the same step.

step_memory.py  what does one inner step need of each device? python -m …
"""
