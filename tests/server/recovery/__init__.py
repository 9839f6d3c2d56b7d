"""Starts after any death."""
