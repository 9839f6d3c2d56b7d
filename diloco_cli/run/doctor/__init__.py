"""Is this host ready, and is the server the right one?

before_start.py  what `run`, `serve` and `work` look at before they start anything
text.py    is the text there, and is it what it is taken for?
host.py    is this host ready? What can be seen here, without asking anybody
probe.py   how good is the way to a server that runs? Measured without taking part in its run
server.py  can the server be reached from here, and is it the right one?
"""
