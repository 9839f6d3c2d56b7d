"""A simulated run decides as a live one."""
