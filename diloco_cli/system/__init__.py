"""What we need of the operating system: durable files, locks, wake-ups, memory, failpoints.

failpoints.py     places where a test may let the server die, stall or fail; nothing …
files.py       durable files; a full disk told from a broken one
keys.py           single keys that somebody presses at a terminal
logs.py           what the processes of a run log: one line to stderr, as text or JSON
malloc.py      glibc malloc: a trainer keeps freed memory, a server returns it
outputs.py        files and folders that somebody named to be written: can they be?
private_files.py  files with secrets in them: who but their owner can read them?
process_end.py    how did a process end? Its exit code in words, the last error of its log
process_handle.py  a handle of a process, which stays with it when its pid is given to another
process_log.py    the log of a process that we start, in two files of a bounded size
locks.py          a lock file that names its holder
threads.py        how does a coroutine wait for work in a thread, which cannot be cancelled?
wakeup.py         wake a waiting thread: from a thread, a signal handler, or a pipe
"""
