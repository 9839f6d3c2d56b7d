"""A contribution on its way in: bytes, a checked frame on disk, a decision. Start with intake.py.

body.py           bodies as they come in: bounded, never silent for long, in batches worth …
examine.py        what is wrong with a contribution: its address, what it claims, its numbers
intake.py         takes a contribution in: from the wire to the disk, looked at on the way
partial.py        frames that arrive in parts, in any order, over several connections, with …
partial_files.py  half-received frames that outlive the server
"""
