"""A run on a virtual clock, decided by the live core: scenario in, outcome out. Start with
simulator.py.

    clock.py        what happens next? A heap of moments, and a clock that jumps from one to …
    faults.py       what goes wrong, when, and for how long?
    measured.py     what do things cost that a rehearsal cannot measure itself?
    network.py      what is a link, and when does a byte come out of it?
    outcome.py      what came of it: goodput by three definitions, and what it cost
    overlap.py      how fast must a link be so that training hardly waits for it? Layer by …
    region.py       A region as time sees it: steps, frames and versions without any numbers in …
    scenario.py     what is to be rehearsed: who trains how fast, over which links, and what …
    server.py       the server as time sees it: the same rounds, the same pace, no bytes
    simulator.py    what would happen? Discrete events on a virtual clock, decided by the live core
    sweep.py        many rehearsals at once: every combination of the values that are varied
    synchronous.py  what would one synchronous job make of the same faults? The two usual answers
    world.py        A run spec becomes a scenario, once somebody has said what no spec says
"""
