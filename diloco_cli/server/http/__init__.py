"""HTTP in, HTTP out: the table of calls, checks before each, handlers behind. Start with calls.py.

asgi.py          the ASGI application: routes, the checks before them, words for whatever …
audit.py         who took what, who brought what, who was turned away: one JSON line each
calls.py         the calls of the API, each described once: the table makes the routes and …
event_stream.py  the run log as server-sent events
handlers.py      what each call does: read the request, ask the coordinator, write the answer
idle.py          connections that only take up room: who never says anything useful, and …
limits.py        how much of the server one region may take at a time, and how slowly
listener.py      HTTP/2 and HTTP/1.1 on one port, in this process
tls_reload.py    the door of the server: one port, TLS on it, and new locks while it is open
"""
