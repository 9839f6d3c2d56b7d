"""Who may do what: roles, tokens, certificates.

authority.py  A private certificate authority for one run: who may open a connection at all
issue.py      the folder of certificates and tokens on the server's host: made, added to, …
roles.py      may they? The caller's role and region against what a call asks for
tokens.py     who is asking? Tokens by their hashes, looked up anew whenever the file changes
"""
