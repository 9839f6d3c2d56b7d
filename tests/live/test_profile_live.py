"""A region that trains is traced, and goes on."""

from __future__ import annotations

import pytest

from tests.cli.harness import diloco

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def test_a_running_region_is_traced_and_trains_on(live, capsys):
    run = live({"name": "left"})
    server = run.serve()
    left = run.work("left")
    run.wait_for(lambda: run.progress("left").training, server, left)
    code, out, err = diloco(capsys, "profile", run.folder, "--region", "left", "--steps", 3)
    assert code == 0, err
    assert out.strip() == str(run.folder / "profiles" / "left")
    assert "traced 3 steps of left" in err
    names = {path.name.split(".", 1)[1] for path in (run.folder / "profiles").rglob("*.*")}
    assert {"xplane.pb", "trace.json.gz"} <= names
    step = run.progress("left").step
    run.wait_for(lambda: run.progress("left").step > step, server, left)
