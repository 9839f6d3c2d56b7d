"""Held-out loss of many ways to synchronise, with real steps on a virtual clock. Start with
experiment.py.

    cells.py       which ways to synchronise are compared, and what is hoped for
    command.py     `diloco bench quality`: which cells, into which file, and what they show
    experiment.py  what loss does a way to synchronise reach at equal tokens?
    learner.py     A region of a rehearsal that really trains, on a virtual clock
    runner.py      cell after cell into one file, going on where the last run stopped
    setting.py     what people may say about the model and the budget of all cells
    table.py       cells become a table: means over seeds, how far the seeds are apart, and the …
    training.py    A rehearsal with real weights: what loss does a run reach?
"""
