"""One table per region and one of the run, for spreadsheets and programs."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from diloco_cli.observe.sinks.points import REGION_VALUES, RUN, RUN_VALUES, Point
from diloco_cli.system.outputs import writing


class CsvFiles:
    """`run.csv` and `regions/NAME.csv`, written anew each time; a number not known is empty."""

    def __init__(self, folder: Path) -> None:
        self.where, self._folder = str(folder), folder
        self._tables: dict[str, tuple[TextIO, Any]] = {}

    def write(self, points: Sequence[Point]) -> None:
        with writing(self._folder, "--out"):
            for point in points:
                self._table(point.region).writerow(
                    {"tokens": point.tokens, "time": round(point.time, 3), **point.values}
                )
            for file, _ in self._tables.values():
                file.flush()

    def _table(self, region: str) -> Any:
        if region not in self._tables:
            name = "run.csv" if region == RUN else f"regions/{region}.csv"
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("w", encoding="utf-8", newline="")
            columns = RUN_VALUES if region == RUN else REGION_VALUES
            table = csv.DictWriter(file, ["tokens", "time", *columns])
            table.writeheader()
            self._tables[region] = file, table
        return self._tables[region][1]

    def close(self) -> None:
        with writing(self._folder, "--out"):
            for file, _ in self._tables.values():
                file.close()
