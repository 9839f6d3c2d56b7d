"""Float32 vectors in, frames out, and back; and the JSON messages beside them.

Start with frame.py. Which codec a frame uses is said in its header; zstd is in chunks.py.

    frame.py          a frame: header, compressed chunks and the SHA-256 that is its identity
    header.py         what a frame says about itself: canonical JSON, checked field by field
    chunks.py         encode, compress and decode chunks, on as many cores as this process may use
    codecs/           how many bits each value gets
    kernels/          the compiled loops under the codecs
    digest.py         the digest of a vector
    buffers.py        large vectors whose memory is reused
    messages.py       routes, HTTP headers and JSON bodies that client and server share
    error_bodies.py   how an answer that is an error looks
"""
