"""The framework under a trainer.

eight_devices.py  one model on many meshes, in a process with eight devices; what came out, as JSON
"""
