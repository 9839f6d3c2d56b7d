"""Published versions: a closed round becomes the next one, clients fetch it as frames.

Accepted contributions and the last version come in; theta, momentum, published weights and a
delta frame go out. Start with next_version.py.

    next_version.py  a closed round becomes the next version, or says who cannot take part
    held.py          where the vectors of the newest versions are: in memory or in files
    newest.py        every fragment's newest version, its delta chain and its whole frame
    export.py        the whole model as one safetensors file
    send.py          immutable bytes as an HTTP answer: etag, ranges, clients that leave
"""
