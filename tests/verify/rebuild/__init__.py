"""A model of servers that are lost or set back, rebuilt, and of regions that realign.

Every inner step is a token of its own, so the model knows exactly which work each frame holds.
The ledger, admission, the books and the choice of what to go on from are the real ones; servers,
folders and the network are made up here. Start with world.py.

    explore.py  many seeds, by hand: python -m tests.verify.rebuild.explore --seeds 3000
    kills.py    real processes, killed at every step: python -m tests.verify.rebuild.kills
    loss.py     what it costs the model: the same run undisturbed and rebuilt
    region.py   one region: its durable files, and a trainer that dies between any two of them
    rules.py    rules that can be switched off, to see that the model notices
    server.py   one run's server, rebuilt from what folders and a copy hold
    world.py    one seeded run: faults, late copies, checks
"""
