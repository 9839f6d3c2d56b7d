"""One region: an agent that talks to the server, a trainer that trains, a mailbox of files between
them.

    agent/       `diloco work`
    engines/     The framework that computes a region's steps; the only place, with models, …
    handover.py  A trainer that outlived its agent, in the hands of the next one
    mailbox.py   the files through which a region's agent and its trainer talk, and which …
    trainer/     The training process
"""
