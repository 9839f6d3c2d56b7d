"""The run's state and its rounds: answers regions, carries out what `core` decides. Start with
coordinator.py.

    conductor.py     moves the rounds: calls what is due, closes what is ready, merges, ends, …
    coordinator.py   answers the regions: who may speak, what is accepted, what is new
    leases.py        who is there: leases and what regions last said
    state.py         the state of a run, in one place: what is durable, what is only remembered
    token_totals.py  what do the journal and the reports add up to?
"""
