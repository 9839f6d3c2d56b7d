import pytest

from tests.observe.page.browser import started
from tests.verify.page.long_history import LIMITS, measure

pytestmark = pytest.mark.live


def test_the_page_of_a_million_outer_steps_is_small_in_bytes_and_memory(tmp_path):
    with started() as browser:
        figures = measure(tmp_path, browser)
    print(figures)
    assert figures["bytes"] < LIMITS["bytes"] and figures["memory"] < LIMITS["memory"]
