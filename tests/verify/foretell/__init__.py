"""How well do simulation and plan predict what was measured?

chaos.py  how well does a simulation predict a chaos run? `python -m tests.verify.foretell.chaos …
plan.py   how well does `diloco plan` foretell a run?
run.py    how well does the simulator foretell a run that was made?
"""
