"""The command `diloco`: arguments in, text and exit codes out. Start with app.py.

Each module has the commands about one thing, loads what they need when they run, and prints
what they return; what they do is in `run/`, `plan/`, `sim/`, `chaos/` and `server/`.

    app.py          global options, and the one place where errors become text and exit codes
    bench.py        bench …: loaded from diloco_cli/bench when it is asked for
    certs.py        certs init, issue, revoke, show
    chaos.py        chaos
    doctor.py       doctor
    plan.py         plan
    reference.py    no command: writes docs/reference from the code (`make docs`)
    run.py          run, serve, work, and the trainer that work starts
    simulate.py     simulate
    spec.py         init, validate, explain
    status.py       status, stop, pull
    store.py        replay, restore
"""
