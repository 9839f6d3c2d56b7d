"""What we need of the operating system: durable files, locks, wake-ups, memory, failpoints.

failpoints.py     places where a test may let the server die, stall or fail; nothing …
files.py          files that are there after a power cut, or not there at all
logs.py           what the processes of a run log: one line to stderr, as text or JSON
malloc.py         memory that is needed again in a moment stays in the process
process_end.py    how did a process end? Its exit code in words, the last error of its log
server_memory.py  memory that is no longer needed goes back to the system
locks.py          a lock file that names its holder
wakeup.py         wake a waiting thread: from a thread, a signal handler, or a pipe
"""
