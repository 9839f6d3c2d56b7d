"""New versions: merged, published, encoded once, sent many times. Start with next_version.py.

newest.py        immutable versions of every fragment: encoded once, served many times
next_version.py  A closed round becomes the next version
pieces.py        bytes to be sent, in pieces: those in memory at once, the others after the …
send.py          bytes that never change under their etag, sent whole or in ranges
"""
