"""The client side of the HTTP API: typed calls in, retried HTTP/2 requests out.

Start with client.py.

    client.py       the calls of the API, typed
    options.py      how a client talks to its server: backends, time-outs, retries, parts
    connection.py   calls over HTTP/2 with retries
    backends.py     the two HTTP/2 implementations: httpx's own, and pyreqwest's
    credentials.py  certificates and token that a client shows, and what TLS failures mean
    credential_watch.py  a credential that is renewed while it is in use
    refusal.py      one exception for each thing a client can do about a refusal
    transfer/       large bodies: in parts, resumable, over several connections
"""
