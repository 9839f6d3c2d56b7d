"""Turns records of `diloco chaos` into the tables and pictures of docs/results.

budget.py      whole runs: how far does each go beyond its budget?
curves.py      held-out loss over time, and who reaches a given loss when
eight_sites.py  what do eight real regions send over lines as narrow as were published?
goodput.py     goodput under kills, as a table and as bars: one group for each schedule
hundred_million.py  a run of a hundred million parameters, killed twice
records.py     reads chaos.json files, and says which of them may stand side by side
scavenging.py  two steady regions and six that come and go: is the compute used that is there, …
"""
