"""One run on this machine, and its folder."""
