"""What a trainer keeps and what it goes on from: weights and books in, a resume point out. Start
with checkpoint.py.

checkpoint.py         the local checkpoint, and when the next one is due
sharded_checkpoint.py the checkpoints of a region on many devices, each device's part apart
resume.py             what a trainer goes on from when it starts
"""
