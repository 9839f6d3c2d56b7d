"""The HTTP API: requests in, answers out; what a request asks for happens in the layers below.

Start with calls.py.

    calls.py         the one table of calls; routes and /openapi.json are made from it
    asgi.py          the ASGI application: finds the call, checks the request, reports errors
    handlers.py      what each call does: read the request, ask the coordinator, answer
    event_stream.py  the run log as server-sent events
    limits.py        how much of the server one region may use at a time
    audit.py         one JSON line for every upload, download and refusal
    health.py        `/healthz` on a port of its own, without credentials
    listener.py      HTTP/2 and HTTP/1.1 on one port, in this process (granian)
    tls_reload.py    one listening port; reloads TLS certificates without a restart
    idle.py          closes connections that are idle or never make an authorised call
"""
