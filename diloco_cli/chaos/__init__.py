"""Faults inflicted on a real run, and what they cost.

In: a run spec with a `chaos` section. Out: chaos.json, the record of what was inflicted and what
it cost. Read run.py first.

    emulator/   links of a given rate and delay between real processes
    inflict.py  inflicts a fault schedule: signals to processes, changes to links
    report.py   what the faults cost: one document for every method
    run.py      a run on this machine while a fault schedule is inflicted on it
"""
