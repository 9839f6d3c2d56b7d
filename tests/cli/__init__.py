"""Commands as people type them.

harness.py  a tiny run for the commands: its spec, its folder after some rounds, and how it is …
"""
