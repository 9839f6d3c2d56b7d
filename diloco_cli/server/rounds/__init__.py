"""The run's state and its rounds.

In come requests of regions and the moments that pass; out go answers, journal records and new
versions. What to do is decided in `core`; here it is carried out. Start with coordinator.py.

    amendments.py    what becomes of an amendment that somebody asks for?
    budget.py        how far the regions may train, and what they speak for of the budget
    claims.py        what counts of an accepted contribution is put on record
    coordinator.py   answers the regions and moves the rounds, as the core decides
    divergence.py    which regions throw their work away, and is there any use in going on?
    lanes.py         who reads which text now, and what have they said about their lanes?
    leases.py        which regions are there, and what they last reported
    membership.py    lets regions join and retires them
    publish.py       merges closed rounds and publishes what comes out
    state.py         the state of a run, in one place: what is durable, what is only remembered
    token_totals.py  what do the journal and the reports add up to?
"""
