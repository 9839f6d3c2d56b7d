"""A deterministic simulation of the server as it is shipped.

`tests/model` plays the protocol with symbols. Here the real server runs (its life in
`serve`, the ASGI application, conductor, intake, commit, journal, store) against a clock,
a disk and a network that are all drawn from one seed:

    loop      virtual time; which callback, which thread comes next
    disk      page cache and platter: what a power cut leaves, EIO, no room
    network   delay, loss, duplicates, broken uploads, lost replies
    worker    a region with the real books and frames, its restarts and its rivals
    audit     what must hold whatever happens
    bugs      defects planted on purpose: each must be found

Any failure replays from its seed: `python -m tests.verify.dst.explore --from SEED --trace`.
"""
