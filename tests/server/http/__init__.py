"""Its calls, without sockets.

requests.py  a server behind its HTTP calls, without sockets
"""
