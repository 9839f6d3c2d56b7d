"""A region of several hosts: who may take part, and that all of them compute as one.

two_processes.py  one model on the devices of two processes, led by this one; what came out, as JSON
"""
