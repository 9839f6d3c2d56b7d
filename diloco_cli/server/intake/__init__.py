"""Contributions on their way in: bytes of a request in, a checked frame on disk and a decision out.

Start with intake.py.

    intake.py         the order of all this; the only file the handlers call
    body.py           the request body: bounded, with an idle timeout
    partial.py        a frame that arrives in parts, in any order
    partial_files.py  keeps those parts across restarts
    examine.py        is the frame what its URL says, and are its numbers sound?
"""
