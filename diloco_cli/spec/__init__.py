"""The run spec: a YAML file in, a checked `RunSpec` out, every mistake with its place and a hint.
Start with schema.py.

    amendable.py    which keys may change in a run that has begun, and when?
    chaos_rules.py  what can go wrong on purpose, and what cannot: the rules of the `chaos` section
    describe.py     what do the classes themselves say about their options?
    fault_kinds.py  every kind of fault, in one table that simulator and chaos runs read too
    load.py         which run does this file describe, and if none, what is wrong with it?
    overrides.py    what changes when the command line says `--set sync.quorum=2`?
    quantities.py   numbers with their units, as people write them: `7d`, `10Mbit`, `80GB`
    resolved.py     what exactly does this run do? Every key spelled out, written once beside …
    rules.py        which combinations of keys describe a run that cannot work?
    schema.py       the run spec: one file that describes a whole run
    secrets.py      does a spec hold something that must not be written down?
    yaml_source.py  what does a YAML file say, and where does it say it?
"""
