"""Real processes, as the live tests have them."""

from tests.live.conftest import live

__all__ = ["live"]
