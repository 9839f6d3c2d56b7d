"""What a run needs and what to expect of it, before it starts. Start with plan.py.

advice.py   what should change in a spec, why, and at what price?
devices.py  what does a region need of each device, does it fit, and what makes it?
needs.py    what does a run need: memory, bytes, line rates, cores? In closed form, nothing …
plan.py     will it do? What a run needs, what to expect of it, what holds it up, what to change
"""
