"""An emulated link does what its words say.

far_server.py   the far side of a link: a server on loopback whose manners a test chooses
link_client.py  the near side of a link: how tests call a server through it
"""
