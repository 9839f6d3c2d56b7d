"""Gauges for an OpenTelemetry collector, by OTLP over HTTP, each with the time it was measured.

Such a collector knows time and no other axis, so the merged tokens are a gauge beside the others.
The URL, headers and certificates are those of `OTEL_EXPORTER_OTLP_…` where nothing else is said.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from diloco_cli.errors import LinkError
from diloco_cli.observe.sinks.points import REGION_VALUES, RUN, RUN_VALUES, ObservedRun, Point

PATH = "/v1/metrics"
MOST_POINTS = 500
"""In one request."""


class Collector:
    """Gauges `diloco.run.…`, and `diloco.region.…` with the attribute `region`."""

    def __init__(self, run: ObservedRun, url: str | None) -> None:
        asked = url or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or "http://localhost:4318"
        self.where = asked.rstrip("/")
        # What it has to say we say ourselves.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = OTLPMetricExporter(endpoint=f"{self.where}{PATH}" if url else None)
        about = {"service.name": "diloco", "diloco.run": run.name}
        self._resource = Resource(about)

    def write(self, points: Sequence[Point]) -> None:
        for start in range(0, len(points), MOST_POINTS):
            data = self._data(points[start : start + MOST_POINTS])
            if self._exporter.export(data) is not MetricExportResult.SUCCESS:
                raise LinkError(
                    f"The collector at {self.where} does not take the points.",
                    hint="Is it there, and does it listen for OTLP over HTTP (4318 as a rule)?",
                )

    def _data(self, points: Iterable[Point]) -> MetricsData:
        gauges: dict[tuple[str, str], list[NumberDataPoint]] = defaultdict(list)
        for point in points:
            of_run = point.region == RUN
            group, units = ("run", RUN_VALUES) if of_run else ("region", REGION_VALUES)
            about, time = {} if of_run else {"region": point.region}, int(point.time * 1e9)
            for name, value in {"tokens": point.tokens, **point.values}.items():
                unit = "tokens" if name == "tokens" else units[name]
                gauge = gauges[f"diloco.{group}.{name}", unit]
                gauge.append(NumberDataPoint(about, 0, time, float(value)))
        metrics = [Metric(name, "", unit, Gauge(data)) for (name, unit), data in gauges.items()]
        scope = ScopeMetrics(InstrumentationScope("diloco"), metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def close(self) -> None:
        self._exporter.shutdown()
