"""Recovery: a restarted server continues where the last one stopped; a replay proves it may.

A server folder comes in; a coordinator goes out (start.py), or the digest of the outer state
(verify.py). Start with start.py.

    start.py      restart: fold the journal, load or recompute each newest version, clean up
    verify.py     offline check of a folder: recompute its versions and compare every bit
    rebuild.py    a new run that goes on from what is left of one whose server's disk is lost
    fold.py       the state that a journal's records add up to
    recompute.py  one version from its predecessor and the contributions on record
"""
