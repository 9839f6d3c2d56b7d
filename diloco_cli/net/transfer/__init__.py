"""Large bodies to and from the server: in parts, resumable, over several connections. Start with
bodies.py.

    bodies.py      bodies to and from the server, each in the way its size and the link call for
    download.py    A download that survives its connections: what has arrived is never fetched …
    throughput.py  how fast is this link, and what follows from it?
    upload.py      an upload that survives its connections: in parts, over several of them, …
"""
