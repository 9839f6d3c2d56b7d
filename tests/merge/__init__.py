"""Many contributions become the next version, to the bit."""
