"""The client side of the HTTP API: typed calls in, retried requests out. Start with client.py.

backends.py     pyreqwest's HTTP/2 as a transport of httpx, with its edges filed off
carriers.py     what puts requests on the line: httpx's own HTTP/2, or pyreqwest's
client.py       everything one may ask a server, as typed calls
connection.py   bytes to the server and back over HTTP/2, whatever the link does meanwhile
credentials.py  who we are to a server, and whether it is the server we mean
refusal.py      what a server's "no" means on this side: one exception for each thing one …
transfer/       Large bodies to and from the server
"""
