"""What every test runs under."""

from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # Busy ones are slow, and right.
settings.load_profile("any machine")
