"""One region: server's versions and text in, pseudo-gradients out. Start with mailbox.py.

An agent talks to the server, a trainer trains, and files in a mailbox lie between them.

    mailbox.py     the files through which agent and trainer talk, and which outlive both
    agent/         `diloco work`: lease, uploads, downloads, the trainer's process
    trainer/       the training process: inner steps, frames out, newer versions in
    hosts/         a region of several hosts: one that leads, others that follow
    engines/       the framework that computes the steps
    text_codec.py  text ⇄ tokens, and text as it comes
    handover.py    the record by which a new agent recognises a trainer that outlived the last
"""
