"""The server, in this process, its clock turned by hand.

harness.py       a small run to try a server with: three regions, two fragments, a clock turned …
lying.py         a region that says what it likes about its work, beside two that do not
small_server.py  a server of the small run, as a process: python -m tests.server.small_server …
http/            its calls, without sockets
intake/          contributions on their way in
recovery/        starts after any death
rounds/          rounds, leases, amendments, the end
store/           the journal, payloads and versions on the disk
versions/        the next version, and how it leaves
"""
