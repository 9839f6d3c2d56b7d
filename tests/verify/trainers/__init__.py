"""Training loops of others: killed again and again, timed, and compared with one region.

kills.py       one run with a JAX region, a PyTorch region and one of two processes, killed often
torch_text.py  the PyTorch region's loop, on the run's own text
overhead.py    a PyTorch loop with `Region` against the same loop alone
digits.py      four regions on a quarter of the images each against one on all of them
"""
