"""Where the server keeps what must not be lost. Start with on_disk.py.

archive.py         what is on the server's disk, for whoever only reads: the server, and a …
draft.py           A payload on its way in
durable.py         the server's disk: durable files, and what to say when they cannot be made
group_commit.py    nothing is said before it is on the disk, and many wait for one flush
journal.py         what the server decided, in order, for ever
journal_format.py  the journal's bytes: frames in a chain, and what is wrong when they do …
on_disk.py         where the server keeps what must not be lost
run_identity.py    whose folder is this: one server at a time, one run for ever
"""
