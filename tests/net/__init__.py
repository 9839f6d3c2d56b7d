"""The client against servers that misbehave.

goaway_server.py    an HTTP/2 server that says goodbye (GOAWAY) in the middle of what it is doing
scripted_server.py  a real HTTP/2 server that says exactly what a test tells it to, and …
transfer/           bodies in parts and ranges
"""
