"""The aggregation server: contributions in, durable decisions and new versions out. Start with
lifecycle.py.

    access/          Who may do what
    build_status.py  how is the run? The document that `GET /v1/status` answers, and the …
    history.py       keeps the history of the run: two samples a second, on disk every minute
    http/            HTTP in, HTTP out
    intake/          A contribution on its way in
    lifecycle.py     the server's life: open, listen, serve, say goodbye
    recovery/        From a folder to a server that continues where the last one stopped, and …
    refusals.py      every "no" of the server: a code for programs, a sentence and a hint for …
    rounds/          The run's state and its rounds
    settings.py      what a server is made of, apart from its folder: the spec and the parts it …
    store/           Where the server keeps what must not be lost
    terms.py         the settings of every terms that a run has had, by number
    versions/        New versions
"""
