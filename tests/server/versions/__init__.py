"""The next version, and how it leaves."""
