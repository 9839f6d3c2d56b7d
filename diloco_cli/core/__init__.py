"""Decisions about rounds and unmerged work: no I/O, no clock, no randomness.

In come journal records, reports and receipts; out come answers, actions and the next state.
Start with conductor.py.

    budget.py           how far may each region train, and when is the budget used up?
    claims.py           how much of what a region claims counts?
    conductor.py        what happens to the rounds now? One tick for server, simulator and model
    fragments.py        which parameters travel together?
    guard.py            is this pseudo-gradient fit to merge?
    journal_records.py  what does the server write into its journal?
    lanes.py            which region reads which lane of the text, and from where?
    ledger.py           what has the server decided so far?
    members.py          who is a member of the run, who speaks for it, and who may join?
    pace.py             which fragment is called when, and how long may a round wait for the slow?
    rebuild.py          what does a run go on from when its server's journal is lost?
    rounds.py           may this contribution enter, and may this round close?
    terms.py            which settings hold after the n-th amendment, and may it be made?
    unmerged_work.py    what does a region still owe, and what becomes of it when news arrives?
"""
