"""Synchronous data parallel, rigid and elastic, as real processes. Start with job.py.

accounts.py     what did the job achieve: which steps count, and which were lost again?
connections.py  who is connected, and what was last received from each?
job.py          one synchronous data-parallel job of all regions, on real processes
member.py       one region: a process that computes gradients and moves by their mean
messages.py     what members and reducer send to each other
reducer.py      gathers gradients, averages them and sends the mean back
"""
