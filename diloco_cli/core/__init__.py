"""Decisions about rounds and unmerged work: no I/O, no clock, no randomness.

In come journal records, reports and receipts; out come answers, actions and the next state.
Start with conductor.py.

    conductor.py        what happens to the rounds now? One tick for server, simulator and model
    fragments.py        which parameters travel together?
    guard.py            is this pseudo-gradient fit to merge?
    journal_records.py  what does the server write into its journal?
    ledger.py           what has the server decided so far?
    pace.py             which fragment is called when, and how long may a round wait for the slow?
    rounds.py           may this contribution enter, and may this round close?
    unmerged_work.py    what does a region still owe, and what becomes of it when news arrives?
"""
