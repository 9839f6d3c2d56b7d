"""A deterministic simulation of the server as it is shipped.

`tests/verify/model` plays the protocol with symbols. Here the real server runs (its life in
`serve`, the ASGI application, conductor, intake, commit, journal, store) against a clock,
a disk and a network that are all drawn from one seed.

Any failure replays from its seed: `python -m tests.verify.dst.explore --from SEED --trace`.

audit.py           what must be true, whatever happened: looked at at every start, every answer, …
bugs.py            defects planted on purpose: the simulation is worth something if it finds them
disk.py            a disk with a page cache: what was written is not yet what a power cut leaves
explore.py         plays the server's bad days, as many as there is patience for
host.py            the machine of the server: starts its real life, kills it, cuts its power, …
loop.py            an event loop whose time, order and threads come from a seed
network.py         requests on their way: late, lost, twice, cut off, out of order
run_seed.py        one run from its seed: everything is put together here, and taken apart again
seeded_run.py      what a seed stands for: the run, and everything that goes wrong in it
silent_regions.py  who was silent for so long that a run may be finished without its work
text.py            who read which window of the text, and which windows came into the weights …
trainer.py         a trainer with the real books and real frames, whose training is a few random …
worker.py          a region's worker: joins, reports, sends, fetches, trains, as long as its …
"""
