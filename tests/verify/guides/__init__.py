"""The guides for several hosts, followed to the letter: each host a network namespace; needs root.

hosts.py   hosts of their own: network, names, home folder, SSH
follow.py  gives every command of the guides on the host it is meant for: python -m …
"""
