"""The command `diloco`: arguments in, text and exit codes out. Start with app.py.

Each module has the commands about one thing, loads what they need when they run, and prints
what they return; what they do is in `run/`, `plan/`, `sim/`, `chaos/` and `server/`.

    amend.py        amend
    app.py          global options, and the one place where errors become text and exit codes
    certs.py        certs init, issue, revoke, show
    data.py         data prepare, train-tokenizer
    doctor.py       doctor
    model.py        export, generate, evaluate
    options.py      what no option may say, looked at before a command does anything
    profile.py      profile
    report.py       report, compare
    run.py          run, serve, work, and the trainer that work starts
    spec.py         init, validate, explain
    status.py       status, stop, pull
    store.py        replay, restore
    study/          plan, simulate, chaos, bench: what a run would do, and what it withstands
"""
