"""A hundred frames or so whose headers say anything; `make lies` sends a hundred thousand."""

import pytest

from tests.verify.poison.lying_frames import tell_lies


@pytest.mark.parametrize(("http", "frames"), [(False, 80), (True, 20)])
def test_nobody_else_notices_a_liar(http, frames):
    *_, answers = tell_lies(frames, batch=8, http=http)
    assert answers.total() >= frames and {"Accept", "damaged"} <= answers.keys()
