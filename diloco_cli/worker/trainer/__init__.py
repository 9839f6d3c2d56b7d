"""The training process: text and newer versions in, frames out. Start with loop.py.

loop.py               post when called, adopt what arrived, between two inner steps
built_in_trainer.py   the process of our own trainer, which makes the inner steps
task.py               what one region has to do: its model, its text, its step
weights_and_books.py  weights, anchors and books, which only ever move together
lanes.py              which lanes it reads, and which it hands over
mail.py               a thread that reads images and writes frames; what came in lately
checkpoints/          the local checkpoint, and what a trainer goes on from
divergence.py         does it throw its work away again and again?
progress.py           what a trainer reports of itself: pace, loss, startup times
step_profiler.py      a trace of some steps, for whoever asks
evaluation.py         the held-out loss of the published weights
schedule_place.py     where in the learning-rate schedule is the run?
pacing.py             when may the next inner step begin?
parent_watch.py       which agent it answers to, and how long it goes on without one
"""
