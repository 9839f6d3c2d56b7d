"""How much of the tokenizers library's speed is left for `diloco data prepare`, and how much of a
step is a batch?

The corpus is Python's own library. Both sides encode the same documents on all
cores, in turns; the library has them in memory and throws the tokens away. The median pair counts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from diloco_cli.bench.figure import Figure
from diloco_cli.data.hf_tokenizer import OpenTokenizer, open_tokenizer, train_tokenizer
from diloco_cli.data.prepare import LETTERS, Preparation, prepare
from diloco_cli.data.sources import TextSource, documents
from diloco_cli.data.text import PythonSource
from diloco_cli.run.scaffold import pipeline
from diloco_cli.spec.load import parse_spec
from diloco_cli.system.files import keep_bytes

PREPARE_GOAL, BATCH_GOAL = 0.8, 0.01
TRAINED_ON = 200
"""Files that the tokenizer is trained on; it need not be a good one."""
BATCHES = 500


def data_figures(
    *, tries: int, vocabulary: int, say: Callable[[str], None] = lambda _: None
) -> list[Figure]:
    """Measures preparation and batches."""
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        folder = Path(name)
        sources = tuple(map(TextSource.of, PythonSource().find()))
        texts = [text for source in sources for text in documents(source)]
        say(f"training a tokenizer on {TRAINED_ON} of {len(texts)} files")
        made = train_tokenizer(texts[:TRAINED_ON], vocabulary)
        keep_bytes(folder / "tokenizer.json", made.to_str().encode(), durable=False)
        tokenizer = open_tokenizer(folder / "tokenizer.json")
        ours, library = list[Speed](), list[Speed]()
        for number in range(tries):
            ours.append(_prepare_speed(sources, tokenizer, folder / str(number)))
            library.append(_library_speed(texts, tokenizer))
            say(f"prepare {ours[-1].wall:,.0f}, library {library[-1].wall:,.0f} tokens/s")
        pairs = list(zip(ours, library, strict=True))
        batch, step = _batch_and_step(folder / "0", vocabulary, say)
        return [
            _figure("data prepare", "tokens/s", [(one.wall, other.wall) for one, other in pairs]),
            _figure(
                "data prepare, by CPU time",
                "tokens/CPU-s",
                [(one.cpu, other.cpu) for one, other in pairs],
            ),
            Figure(
                "a batch of the quickstart's size, beside its step",
                batch * 1e6,
                "µs",
                step * 1e6,
                BATCH_GOAL,
                lower=True,
            ),
        ]


class Speed(NamedTuple):
    """Tokens a second, by the clock and by the time of all cores."""

    wall: float
    cpu: float


class _Watch:
    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def speed(self, tokens: int) -> Speed:
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        return Speed(tokens / wall, tokens / cpu)


def _figure(name: str, unit: str, pairs: list[tuple[float, float]]) -> Figure:
    """The median pair of ours and theirs."""
    ranked = sorted(pairs, key=lambda pair: pair[0] / pair[1])
    details = {"ratios": [round(ours / theirs, 3) for ours, theirs in pairs]}
    value, limit = ranked[len(ranked) // 2]
    return Figure(name, value, unit, limit, PREPARE_GOAL, details=details)


def _prepare_speed(sources: tuple[TextSource, ...], tokenizer: OpenTokenizer, out: Path) -> Speed:
    watch = _Watch()
    manifest = prepare(Preparation(sources, tokenizer, out))
    return watch.speed(manifest.tokens + manifest.heldout.tokens)


def _library_speed(texts: list[str], tokenizer: OpenTokenizer) -> Speed:
    """Of batches as large as ours, one separator for each document counted in."""
    groups: list[list[str]] = [[]]
    size = 0
    for text in texts:
        if size >= LETTERS:
            groups.append([])
            size = 0
        groups[-1].append(text)
        size += len(text)
    watch, tokens = _Watch(), len(texts)
    for group in groups:
        encoded = tokenizer.library.encode_batch_fast(group, add_special_tokens=False)
        tokens += sum(map(len, encoded))
    return watch.speed(tokens)


def _batch_and_step(
    folder: Path, vocabulary: int, say: Callable[[str], None]
) -> tuple[float, float]:
    """Seconds that one batch takes, and one step of the quickstart on it."""
    from diloco_cli.worker.trainer.task import prepare as prepare_task
    from diloco_cli.worker.trainer.task import set_up

    set_up(None)
    data = f"data={{kind: tokens, folder: '{folder}', mask: documents}}"
    changes = [data, f"model.vocabulary={vocabulary}"]
    spec = parse_spec(pipeline("quickstart"), "quickstart", changes).spec
    task = prepare_task(spec, spec.regions[0].name)
    cursor, taken = task.stream.start(), []
    for _ in range(BATCHES):
        began = time.perf_counter()
        _, cursor = task.stream.batch(cursor)
        taken.append(time.perf_counter() - began)
    say(f"a batch takes {statistics.median(taken) * 1e6:.0f} µs; compiling the step")
    engine, steps = task.step.engine(), []
    engine.load(task.model.init(0), None)
    for _ in range(8):
        tokens, cursor = task.stream.batch(cursor)
        began = time.perf_counter()
        engine.step(tokens)
        engine.wait()
        steps.append(time.perf_counter() - began)
    return statistics.median(taken), statistics.median(steps[2:])
