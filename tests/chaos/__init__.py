"""Faults that are inflicted, and what is reported of them.

emulator/  an emulated link does what its words say
"""
