"""`diloco work`: frames from the mailbox go to the server, its news and versions come back; the
trainer is kept running. Start with agent.py.

    agent.py              joins, starts and restarts the trainer, leaves
    join.py               may this folder speak for its region?
    sync_threads.py       the traffic between mailbox and server while one epoch lasts
    published_weights.py  brings the region's copy of the published weights up to date
    trainer_process.py    the trainer as a process: started by us, or taken over
"""
