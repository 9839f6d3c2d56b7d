"""Turns records of `diloco chaos` into the tables and pictures of docs/results.

absences.py    what does an absence cost, and is a region that comes back better left out?
budget.py      whole runs: how far does each go beyond its budget?
curves.py      held-out loss over time, and who reaches a given loss when
downstream.py  which of four continuations of held-out code is the real one?
experts.py     a mixture of experts and a dense model, four regions beside data parallel
goodput.py     goodput under kills, as a table and as bars: one group for each schedule
hundred_million.py  a run of a hundred million parameters, killed twice
ladder.py      how does the gap to data parallel move with the size of the model?
late_loss.py   how long until a late loss, on narrow lines and under kills?
live_rehearsed.py  does a live run reach the loss that its rehearsal foretells?
public_harness.py  the downstream score by lm-eval, on exported weights, offline
records.py     reads chaos.json files, and says which of them may stand side by side
scavenging.py  two steady regions and six that come and go: is the compute used that is there, …
"""
