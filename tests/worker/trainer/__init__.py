"""The trainer, its agent and server played by the test.

harness.py  a trainer on a stage: the test plays its agent and its server, file by file
"""
