"""Real processes and sockets, slower than the rest.

processes.py  real servers and workers, as `diloco run` would start them, on one folder
devices/      regions of many devices and of several hosts, in real runs
links/        long bodies over links that break, shaped here or by the kernel
"""
