"""Runs that are broken on purpose: does `status`, or the end of a log, name the cause?

runs.py   one function for each way to break a run: python -m tests.verify.broken.runs
"""
