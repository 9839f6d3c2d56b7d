"""Models compute what their formulas say.

plain_attention.py  causal attention written again in numpy, head by head, in double precision
"""
