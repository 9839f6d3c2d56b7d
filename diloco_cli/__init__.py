"""Pretraining one model across datacenters: regions, an aggregation server, and the command
`diloco`.

    __main__.py  where `diloco` and `python -m diloco_cli` start
    assemble.py  the composition root: a run spec becomes live objects
    bench/       Benchmarks, baselines and experiments; nothing of the product imports this but …
    chaos/       Faults inflicted on a real run, and what they cost
    cli/         The command `diloco`
    core/        Decisions about rounds and unmerged work
    data/        What a region reads
    errors.py    every failure a user can see, with what to do about it
    launch/      Starting processes and keeping them running
    merge/       Contributions of one round in, the next version of a fragment out
    models/      What is trained
    net/         The client side of the HTTP API
    observe/     What people and programs see of a run
    plan/        What a run needs and what to expect of it, before it starts
    registry.py  named choices: `kind: int8` in the spec becomes a frozen dataclass
    run/         One run on this machine and its folder
    server/      The aggregation server
    sim/         A run on a virtual clock, decided by the live core
    spec/        The run spec
    system/      What we need of the operating system
    validation.py  pydantic's errors in our words
    wire/        Arrays become bytes and back
    worker/      One region
"""
