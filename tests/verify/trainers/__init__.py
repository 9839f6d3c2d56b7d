"""Training loops, of others too: killed again and again, timed, and compared with one region.

kills.py       one run with a JAX region, a PyTorch region and one of two processes, killed often
torch_text.py  the PyTorch region's loop, on the run's own text
metrics_cost.py  an inner step that says its learning rate and gradient norm, and one that does not
run_cost.py      a whole run that is watched, and the same run that is not
overhead.py    a PyTorch loop with `Region` against the same loop alone
digits.py      four regions on a quarter of the images each against one on all of them
"""
