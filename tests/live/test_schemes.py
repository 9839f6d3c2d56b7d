"""A URL that begins with the wrong scheme: the answer says which one is right."""

from __future__ import annotations

import pytest

from diloco_cli.bench.support.one_fragment_server import stage
from diloco_cli.errors import LinkError
from diloco_cli.run.ask import ShortCalls

pytestmark = pytest.mark.live


@pytest.mark.parametrize(
    ("tls", "scheme", "other"), [(True, "https", "http"), (False, "http", "https")]
)
def test_who_asks_with_the_wrong_scheme_is_told_the_right_one(tls, scheme, other):
    asking = ShortCalls()
    with stage(1000, tls=tls) as running:
        right = running.url
        assert right.startswith(f"{scheme}://")
        with pytest.raises(LinkError) as refused:
            asking.status(right.replace(scheme, other, 1))
    asking.close()
    assert f"{right}," in (refused.value.hint or "") or f"{right}?" in (refused.value.hint or "")
