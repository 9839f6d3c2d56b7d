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
    region/      Your own training loop as a region of a run
    registry.py  named choices: `kind: int8` in the spec becomes a frozen dataclass
    run/         One run on this machine and its folder
    server/      The aggregation server
    sim/         A run on a virtual clock, decided by the live core
    spec/        The run spec
    system/      What we need of the operating system
    testing.py   is an adapter of weights fit for a run?
    validation.py  pydantic's errors in our words
    wire/        Arrays become bytes and back
    worker/      One region
"""

_HOMES = {"Region": "diloco_cli.region", "read_run": "diloco_cli.observe.run_record"}


def __getattr__(name):
    # Whoever wants only the command should not wait for what a training loop needs. An old
    # Python reads this file before it is told that it is too old; types are in __init__.pyi.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError("module %r has no attribute %r" % (__name__, name))  # noqa: UP031
