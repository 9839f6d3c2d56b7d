"""Large bodies to and from the server: frames and weights in, resumable requests out.

Start with bodies.py.

    bodies.py      whether a body travels in one piece or in parts, and the connections for it
    upload.py      an upload in parts that resumes with the bytes the server lacks
    download.py    a download in ranges that resumes at the byte where it broke off
    throughput.py  the measured rate, and what follows: part size, connections, time-outs
    throttle.py    the rate limit for uploads
"""
