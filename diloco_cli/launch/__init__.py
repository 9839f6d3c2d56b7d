"""Starting processes and keeping them running. Start with subprocesses.py.

subprocesses.py  starts processes on this machine and lets none outlive its parent
supervise.py     keeps a process running, and knows when to stop trying
"""
