"""A region of several hosts: the first decides, the others do the same. Start with lead.py.

    host 0                                   every other host
    agent ──▶ trainer, the lead  ◀──────────  follower supervisor ──▶ follower
                      ╰───────── orders ───────────────────────────────╯

The first host runs what a region of one host runs. Its trainer listens for the others, and every
start of it is a new generation: a follower belongs to one generation and ends with it. Whoever
dies, all of them end and begin the next one; nothing durable is on the other hosts.

    which_host.py           which host of its region is this, and where is the first?
    secret.py               what the hosts of a region know and nobody else does
    connection.py           messages between two hosts that know the secret
    listener.py             host 0: who may take part, and whoever may not hears why
    first_host.py           host 0's agent: what its trainer is told, and the others at the end
    lead.py                 host 0's trainer: generations, orders to all followers, their deaths
    other_hosts.py          the other hosts around a training: there first, and gone with it
    follower.py             a process that obeys the lead's orders
    follower_supervisor.py  `diloco work` on the other hosts: starts a follower a generation

Only follower.py loads a framework.
"""
