"""The training process: inner steps, pseudo-gradients out, newer versions in. Start with loop.py.

checkpoint.py         where was I? A region's local checkpoint, in one file
inbox.py              what came in since the trainer last looked?
loop.py               the loop: train, post when called, adopt what arrived
mail.py               what a trainer does beside training: a thread that reads and writes …
meter.py              how fast and how well does it train? Moving averages, fed by the trainer
pacing.py             when may the next inner step begin?
parent_watch.py       whom does a trainer answer to, and for how long does it go on alone?
progress.py           what a trainer says about itself: to the agent in every report, to …
resume.py             where does a trainer stand when it starts?
saving.py             when is a checkpoint due?
startup.py            how long does a trainer take from its first instruction to its first …
task.py               what one region has to do: its model, its text, its step
weights_and_books.py  A region's weights, anchors and books, which only ever move together
"""
