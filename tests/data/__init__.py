"""Tests of what regions read.

corpora.py  small corpora: documents, a tokenizer, files of every form
"""
