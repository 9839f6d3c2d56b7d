"""Who may do what, over TLS, and who may not.

tls_server.py  credentials of every sort, and a server behind TLS in a process of its own
"""
