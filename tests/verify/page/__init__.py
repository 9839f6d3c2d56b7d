"""The page of a run of a million outer steps, and the pictures in the documentation.

long_history.py  how soon the page of a very long run opens, what is sent, what the server holds
pictures.py      takes the pictures of page and report anew: docs/pictures
"""
