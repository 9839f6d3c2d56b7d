"""Wide-area links in user space: a real server behind an emulated rate and delay. Start with
proxy.py.

    connection.py  A link put between those who call and one server: the part that runs in the …
    lane.py        bytes of many connections travel one road: a lane of a link, between real …
    proxy.py       A real server behind an imagined link
"""
