"""Cell after cell into one file, going on where the last run stopped."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from diloco_cli.bench.quality.cells import Cell
from diloco_cli.bench.quality.experiment import Budget, CellRecord, name_of, run_cell
from diloco_cli.errors import StoreError
from diloco_cli.system.outputs import cannot_be_written
from diloco_cli.worker.trainer.task import set_up

Say = Callable[[str], None]


def run_cells(
    cells: Sequence[Cell],
    seeds: Sequence[int],
    budget: Budget,
    file: Path,
    say: Say,
    *,
    workers: int = 1,
) -> list[CellRecord]:
    """Adds a line to the file for every cell that is not in it; gives all that were asked for."""
    known = {record["id"]: record for record in read(file)}
    planned = [(cell, seed, name_of(cell, budget, seed)) for seed in seeds for cell in cells]
    # Two names may mean the same run.
    missing = {name: (cell, seed) for cell, seed, name in planned if name not in known}
    say(f"{len(planned)} cells, {len(planned) - len(missing)} of them in {file}")
    began = time.monotonic()
    results = _one_by_one if workers == 1 else _side_by_side
    for number, record in enumerate(results(list(missing.values()), budget, workers), 1):
        known[record["id"]] = record
        append(file, record)
        left = (time.monotonic() - began) / number * (len(missing) - number)
        result = record.get("failed") or f"{record['loss']:.4f}"
        say(
            f"{number} of {len(missing)}: {record['cell']}, seed {record['seed']}: {result}; "
            f"{left / 60:.0f} min left"
        )
    return [{**known[name], "cell": cell.name} for cell, _, name in planned]


def _one_by_one(
    wanted: list[tuple[Cell, int]], budget: Budget, workers: int
) -> Iterator[CellRecord]:
    for cell, seed in wanted:
        yield run_cell(cell, budget, seed)


def _side_by_side(
    wanted: list[tuple[Cell, int]], budget: Budget, workers: int
) -> Iterator[CellRecord]:
    # Processes that begin anew: a fork of one that has JAX's threads would hang.
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_set_up_cell
    )
    try:
        for done in as_completed([pool.submit(run_cell, c, budget, seed) for c, seed in wanted]):
            yield done.result()
    except BaseException:
        # Whoever interrupts does not wait for cells that nobody will hear of.
        for process in multiprocessing.active_children():
            process.kill()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _set_up_cell() -> None:
    """Begins a process that computes cells; it ends with the one that asks for them."""
    set_up(None)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    asking = multiprocessing.parent_process()
    assert asking is not None

    def follow() -> None:
        multiprocessing.connection.wait([asking.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def read(file: Path) -> list[CellRecord]:
    """Reads what was measured; a line that a death cut off is measured again."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror}.") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not {"id", "cell", "seed"} <= record.keys():
                raise ValueError
        except (ValueError, AttributeError):
            if number == len(lines):
                break
            raise StoreError(
                f"{file}, line {number} is no cell.", hint="Delete the line, or name another file."
            ) from None
        records.append(record)
    return records


def append(file: Path, record: CellRecord) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text("utf-8") if file.exists() else ""
        cut = text.rfind("\n") + 1
        with open(file, "a", encoding="utf-8") as out:
            out.truncate(len(text[:cut].encode()))
            out.write(json.dumps(record) + "\n")
    except OSError as error:
        raise cannot_be_written(file, "--file", error) from None
