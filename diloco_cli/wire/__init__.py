"""Arrays become bytes and back: codecs, frames, and the JSON messages beside them. Start with
frame.py.

    buffers.py   large vectors whose memory is used again
    chunks.py    chunks of a frame, each on its own, on as many cores as this process may use
    codecs/      How many bits a number gets
    digest.py    what a vector is called: a digest of every bit of it
    frame.py     numbers in an envelope that describes and proves itself
    header.py    what a frame says about itself: canonical JSON, checked field by field
    kernels/     The compiled loops under the codecs
    messages.py  what the two sides say to each other besides frames: routes, headers, JSON bodies
"""
