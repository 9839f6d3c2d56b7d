"""The training process: text and newer versions in, frames out. Start with loop.py.

loop.py               train, post when called, adopt what arrived
task.py               what one region has to do: its model, its text, its step
weights_and_books.py  weights, anchors and books, which only ever move together
mail.py               a thread that reads images and writes frames; what came in lately
checkpoint.py         the local checkpoint, and when the next one is due
resume.py             what a trainer goes on from when it starts
progress.py           what a trainer reports of itself: pace, loss, startup times
evaluation.py         the held-out loss of the published weights
pacing.py             when may the next inner step begin?
parent_watch.py       which agent it answers to, and how long it goes on without one
"""
