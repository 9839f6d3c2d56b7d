"""Who may call: certificates and tokens in, a caller with a role out. Start with roles.py.

roles.py      authorisation: the caller's role and region against what a call requires
floods.py     how much one peer may do before it is too much
tokens.py     the list of tokens: look-up, expiry, revocation
authority.py  the run's own certificate authority
issue.py      the folder that `diloco certs` keeps: issue, renew, revoke
"""
