"""Decisions about rounds and unmerged work: no I/O, no clock, no randomness. Start with rounds.py.

fragments.py      which parameters travel together?
guard.py          is this pseudo-gradient fit to merge?
ledger.py         what has the server decided so far?
pace.py           which fragment is called when, and how long may a round wait for the slow?
rounds.py         may this contribution enter, and may this round close?
unmerged_work.py  what does a region still owe, and what becomes of it when news arrives?
"""
