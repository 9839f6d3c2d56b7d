"""Every codec."""
