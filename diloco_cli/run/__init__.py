"""One run on this machine and its folder. In: a spec and what to do; out: processes, or answers.

Start with start.py: it checks and holds the folder, plans the processes and has them supervised.

    ask.py              short calls to a server: made once, answered within seconds or not at all
    doctor/             is this host ready, and is the server the right one?
    find_credential.py  which certificate and token does this command show?
    folder.py           the run folder: finding it, holding it, setting it aside
    goal.py             when to stop before the budget: `--until tokens=N`, `steps=N`, `minutes=N`
    offline.py          what the folder of a stopped run still knows
    restore.py          a server's folder copied back, all of it or nothing
    scaffold.py         the files of a new run, from a template: what `diloco init` writes
    start.py            starts a run here or in the background
    supervise_run.py    starts the server and the workers, restarts what dies, knows how it ended
"""
