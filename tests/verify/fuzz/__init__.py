"""Bytes that nobody means, by the million: what a peer may send is refused or means itself.

targets.py     what must hold for any bytes at all
seeds.py       honest bytes to begin with
shapes.py      hypothesis: how honest bytes become others
engines.py      both engines, as long as one likes: `make fuzz`
test_fuzz.py   the same for some seconds, in `make test`
"""
