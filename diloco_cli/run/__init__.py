"""One run on this machine and its folder. In: a spec and what to do; out: processes, or answers.

Start with start.py: it checks and holds the folder, plans the processes and has them supervised.

    amend.py            amends a run through its server, or in the folder of a stopped one
    ask.py              short calls to a server: made once, answered within seconds or not at all
    copies.py           copies of a server's folder: made while it runs, and brought back
    doctor/             is this host ready, and is the server the right one?
    edited_spec.py      a spec for a run that has begun: one that it has had, or what to amend
    find_credential.py  which certificate and token does this command show?
    first_weights.py    the weights that a run begins with, where the seed does not make them
    folder.py           the run folder: finding it, holding it, setting it aside
    goal.py             when to stop before the budget: `--until tokens=N`, `steps=N`, `minutes=N`
    model/              a trained model: found, continued, measured, exported
    offline.py          what the folder of a stopped run still knows
    profile.py          asks a region's trainer on this host for a trace of its next steps
    rebuild/            a run whose server's disk is lost goes on from copies and its regions
    scaffold.py         the files of a new run, from a template: what `diloco init` writes
    start.py            starts a run here or in the background
    untrained.py        the folder of a run that has trained nothing takes any spec
    supervise_run.py    starts the server and the workers, restarts what dies, knows how it ended
"""
