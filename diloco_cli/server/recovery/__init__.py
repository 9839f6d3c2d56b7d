"""From a folder to a server that continues where the last one stopped, and the proof that it may.

fold.py    what does a journal amount to?
start.py   from a folder to a server that stands where the last one stood
verify.py  is the outer state what the journal says? Make it again and compare every bit
"""
