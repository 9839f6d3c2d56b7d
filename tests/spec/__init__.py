"""Run specs: what is read, and what is said about mistakes.

short_spec.py  a short spec that loads, and what is said about changes to it
"""
