"""Long bodies over links that break, shaped here or by the kernel.

network_namespace.py  a second network namespace behind a veth that the kernel shapes with tbf; …
"""
