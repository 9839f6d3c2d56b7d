"""Bodies in parts and ranges."""
