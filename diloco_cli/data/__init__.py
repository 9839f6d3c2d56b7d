"""What a region reads: datasets, tokenizers, and an order that survives a restart.

text.py  what a region reads: datasets, tokenizers, and an order that survives a restart
"""
