"""Is this host ready, and is the server the right one?

host.py    is this host ready? What can be seen here, without asking anybody
probe.py   how good is the way to a server that runs? Measured without taking part in its run
server.py  can the server be reached from here, and is it the right one?
"""
