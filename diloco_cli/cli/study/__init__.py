"""Commands that study a run instead of being one: they never join a server. Start with plan.py.

bench.py        bench …: loaded from diloco_cli/bench when it is asked for
chaos.py        chaos
plan.py         plan
simulate.py     simulate
"""
