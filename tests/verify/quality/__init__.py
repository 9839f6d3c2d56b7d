"""What the ways to train reach: long tables on a virtual clock that go on where they stopped.

Live is `live_rehearsed.py` alone.

absences.py        what does an absence cost, and is a region that comes back better left out?
downstream.py      which of four continuations of held-out code is the real one?
experts.py         a mixture of experts and a dense model, four regions beside data parallel
ladder.py          how does the gap to data parallel move with the size of the model?
late_loss.py       how long until a late loss, on narrow lines and under kills?
levers.py          what closes the gap of eight regions? One setting at a time
live_rehearsed.py  does a live run reach the loss that its rehearsal foretells?
public_harness.py  the downstream score by lm-eval, on exported weights, offline
"""
