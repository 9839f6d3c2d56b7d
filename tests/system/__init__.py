"""What we need of the operating system."""
