"""Rounds, leases, amendments, the end."""
