"""Trainers on a stage: started on real files, driven step by step."""

from __future__ import annotations

import json

import pytest

from tests.worker.trainer.harness import Stage, tiny_spec


@pytest.fixture(scope="session")
def tasks(tmp_path_factory):
    """Tasks by their `sync`, so that each step is compiled once."""
    from diloco_cli.worker.engines.jax_engine import use_compile_cache
    from diloco_cli.worker.trainer.task import prepare

    use_compile_cache()
    folder = tmp_path_factory.mktemp("text")
    known = {}

    def task(**sync):
        key = json.dumps(sync, sort_keys=True)
        if key not in known:
            known[key] = prepare(tiny_spec(folder, **sync), "paris")
        return known[key]

    return task


@pytest.fixture
def play(tmp_path, tasks, monkeypatch):
    """Sets a stage and starts a trainer on it, which saves nothing for a while by itself."""
    monkeypatch.setattr("diloco_cli.worker.trainer.checkpoints.checkpoint.SHORTEST", 20.0)

    def begin(**sync):
        task = tasks(**sync)
        stage = Stage(tmp_path, task.spec)
        return stage, stage.trainer(task)

    return begin
