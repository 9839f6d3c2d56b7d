"""Processes that are started, watched and stopped."""
