"""Decisions, without clock, disk or network."""
