"""Synchronous data parallel, rigid and elastic, as real processes. Start with job.py.

accounts.py  what a data-parallel job achieved: which steps count, and which were lost again
hub.py       the middle of a data-parallel job: it gathers gradients, averages them, sends …
job.py       the baselines: one synchronous data-parallel job of all regions, on real processes
lobby.py     who is there: the connections of a data-parallel job, and what was last heard …
member.py    one region of a data-parallel job: a process that computes gradients and moves …
messages.py  what the members of a data-parallel job and their hub say to each other
seat.py      one member as its hub sees it: a connection with a thread for each direction
"""
