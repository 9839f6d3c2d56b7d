"""The journal, payloads and versions on the disk."""
