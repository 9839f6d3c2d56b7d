"""`diloco work`: frames from the mailbox go to the server, its news and versions come back; the
trainer is kept running. Start with agent.py.

    agent.py              joins, serves while it holds the lease, leaves
    trainer_supervisor.py starts, restarts and ends the trainer
    join.py               may this folder speak for its region?
    trainer_settings.py   the region's own file with the amendments of the run over it
    spec_correction.py    may a worker come with another spec than its folder's run began with?
    sync_threads.py       the traffic between mailbox and server while one epoch lasts
    link_state.py         is the server in reach, and if so, what does not get through?
    published_weights.py  brings the region's copy of the published weights up to date
    average_fetch.py      when the average of the published weights is fetched, to be measured
    trainer_process.py    the trainer as a process: started by us, or taken over
    command_trainer.py    a training program that is not ours, as a process
    program_guard.py      ends such a program when its worker was killed before it had joined
"""
