"""A run on a virtual clock, decided by the live core.

In: a `Scenario` (sites, links, sizes, faults). Out: a `SimulationOutcome`. Nothing here touches
files other than fault schedules, sockets, processes or the clock. Read simulator.py first.

    clock.py        the queue of events, and a clock that jumps from one to the next
    faults.py       fault schedules: drawn from a law, read from and written to a file
    measured.py     what things cost that a simulation cannot measure itself
    network.py      a link: when does a byte come out of it? The live emulator asks it too
    outcome.py      what is counted: goodput by three definitions, and what it cost
    overlap.py      how fast a link must be so that data-parallel training hardly waits for it
    region.py       a simulated region: steps, frames and versions without any numbers in them
    scenario.py     what is to be simulated: who trains how fast, over which links, what goes wrong
    server.py       the simulated server: the same rounds, the same pace, no bytes
    simulator.py    the events of a run, and what each of them causes
    sweep.py        many simulations: every combination of the values that are varied
    synchronous.py  what one synchronous job, rigid or elastic, makes of the same faults
    world.py        a run spec and what no spec says become a scenario
"""
