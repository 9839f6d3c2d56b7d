"""Compiled loops against plain numpy."""
