"""Contributions on their way in."""
