"""Text becomes a folder of tokens: the same bytes every time, however often it is interrupted.

    files ──reader──▶ batches of documents ──library──▶ tokens ──▶ document n into shard n mod N

Reading, encoding and writing go on side by side; the library encodes on all cores. Every few
seconds the shards are flushed, then how far they reach is written to progress.json. A later call
cuts the shards back to that and goes on. Which documents are held out depends on their text alone,
so two copies of one document are both held out or both trained on.
"""

from __future__ import annotations

import array
import copy
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from diloco_cli.data.hf_tokenizer import OpenTokenizer, pieces, smallest_type
from diloco_cli.data.sources import TextSource, documents
from diloco_cli.data.token_folder import (
    HELDOUT,
    HELDOUT_LIST,
    MANIFEST,
    TOKENIZER,
    PreparedSource,
    TokenManifest,
    TokenShard,
    as_lines,
    check_digests,
    file_digest,
)
from diloco_cli.errors import SpecError
from diloco_cli.system.files import keep_bytes, sync_folder
from diloco_cli.system.locks import Busy, FileLock
from diloco_cli.system.outputs import cannot_be_written

PROGRESS = "progress.json"
LOCK = ".lock"
LETTERS, DOCUMENTS = 1 << 22, 8192
"""Of a batch, at most; one long document is a batch of its own."""
BATCHES_AHEAD = 3


@dataclass(frozen=True)
class Preparation:
    """What is to be made; two with equal settings make the same bytes."""

    sources: tuple[TextSource, ...]
    tokenizer: OpenTokenizer
    out: Path
    shards: int = 16
    share: float = 0.01
    """Of the documents, to be held out."""
    field: str = "text"
    separator: int | None = None
    """The tokenizer's, if left out."""
    begin: int | None = None
    letters: int = LETTERS
    flush_every: float = 10.0
    """Seconds."""
    wait: float = 0.0
    """Seconds, for another process that prepares the same."""

    @property
    def end(self) -> int:
        end = self.tokenizer.separator if self.separator is None else self.separator
        if end is None:
            raise SpecError(
                f"{self.tokenizer.path} has no token that is known to end documents.",
                hint="Name one with --separator.",
            )
        return end

    def settings(self) -> dict[str, Any]:
        """What the bytes depend on besides the files."""
        return {
            "tokenizer": self.tokenizer.digest,
            "separator": self.end,
            "begin": self.begin,
            "shards": self.shards,
            "heldout": self.share,
            "field": self.field,
        }


@dataclass
class Reached:
    """How far the files of an unfinished folder reach."""

    settings: dict[str, Any]
    source: int = 0
    document: int = 0
    """Of that source, the next to be read."""
    number: int = 0
    """Documents to train on so far; the next goes into shard `number` mod N."""
    files: dict[str, list[int]] = field(default_factory=dict)
    """Tokens and documents by shard."""
    listed: int = 0
    """Bytes of the list of held-out documents."""
    counts: list[list[int]] = field(default_factory=list)
    """Documents and tokens, all and those held out, by source, as far as they were read."""
    inputs: list[list[Any]] = field(default_factory=list)
    """Name, size and time of the same sources."""
    before: dict[str, Any] = field(default_factory=dict)
    """How far the files reached when the source was begun, should it be another one next time."""

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.files.values())

    def begin(self, source: TextSource) -> None:
        """Takes up the next source, if that was not done."""
        if len(self.inputs) == self.source:
            self.inputs.append(_identity(source))
            self.counts.append([0, 0, 0, 0])
            now = {"number": self.number, "files": self.files, "listed": self.listed}
            self.before = copy.deepcopy(now)

    def go_back(self) -> None:
        """Forgets what was read of the source."""
        self.number, self.listed = self.before["number"], self.before["listed"]
        self.files, self.document = self.before["files"], 0
        del self.inputs[self.source :], self.counts[self.source :]


Report = Callable[[Reached], None]


def prepare(what: Preparation, report: Report = lambda _: None) -> TokenManifest:
    """Makes the folder, or what is still missing of it; a finished one is only checked."""
    with _owned(what.out, what.wait):
        settings = what.settings()
        if (what.out / MANIFEST).exists():
            return _finished(what, settings)
        reached = _resumed(what, settings)
        with ExitStack() as files:
            shards = _Shards(what, reached, files)
            for batch in _encoded(what, reached):
                shards.write(batch)
                report(reached)
            shards.flush()
        return _finish(what, reached)


@contextmanager
def _owned(out: Path, wait: float) -> Iterator[None]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / LOCK)
        lock.acquire(wait=wait)
    except Busy as busy:
        raise SpecError(
            f"{out} is being prepared by process {busy.pid}.", hint="Wait for it, or stop it."
        ) from None
    except OSError as error:
        raise cannot_be_written(out, "--out", error) from None
    try:
        yield
    finally:
        lock.release()


def _finished(what: Preparation, settings: Mapping[str, Any]) -> TokenManifest:
    manifest = TokenManifest.read(what.out)
    found = {
        "tokenizer": manifest.tokenizer,
        "separator": manifest.separator,
        "begin": manifest.begin,
        "shards": len(manifest.shards),
        "heldout": manifest.share,
    }
    _same(what.out, found, {key: settings[key] for key in found})
    names = [source.path for source in manifest.sources]
    if names != _names(what.sources):
        raise SpecError(
            f"{what.out} was prepared from other files.", hint="Choose another folder with --out."
        )
    check_digests(what.out, manifest)
    # A call that was killed between its last two steps left it, and nobody would open the folder.
    (what.out / PROGRESS).unlink(missing_ok=True)
    return manifest


def _resumed(what: Preparation, settings: dict[str, Any]) -> Reached:
    path = what.out / PROGRESS
    if not path.exists():
        others = sorted(each.name for each in what.out.iterdir() if each.name != LOCK)
        if others and not all(_is_ours(name) for name in others):
            raise SpecError(
                f"--out: {what.out} holds other files, {others[0]} for one.",
                hint="Choose an empty folder.",
            )
        files = {name: [0, 0] for name in [*_shard_names(what.shards), HELDOUT]}
        return Reached(settings, files=files)
    try:
        reached = Reached(**json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise SpecError(
            f"{path} cannot be read: {error}.", hint="Remove the folder and begin anew."
        ) from None
    _same(what.out, reached.settings, settings)
    here = [_identity(source) for source in what.sources[: reached.source + 1]]
    for before, now in zip(reached.inputs[: reached.source], [*here, None], strict=False):
        if before != now:
            raise SpecError(
                f"{what.out} was begun with another {before[0]}, all of which is in it already.",
                hint="Give the same files again, or choose another folder with --out.",
            )
    # A file that could not be read to its end has probably been mended.
    begun = reached.inputs[reached.source :]
    if begun and begun != here[reached.source :]:
        reached.go_back()
    return reached


def _identity(source: TextSource) -> list[Any]:
    stat = source.path.stat()
    return [str(source.path), stat.st_size, stat.st_mtime_ns]


def _is_ours(name: str) -> bool:
    stem, _, ending = name.partition(".")
    return name.startswith(".") or (ending in ("bin", "idx", "jsonl", "json") and bool(stem))


def _same(out: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    for key, value in here.items():
        if there.get(key) != value:
            raise SpecError(
                f"{out} was begun with {key} {there.get(key)}, not with {value}.",
                hint="Give the same again, or choose another folder with --out.",
            )


def _shard_names(count: int) -> list[str]:
    return [f"{number:05d}" for number in range(count)]


def _names(sources: Sequence[TextSource]) -> list[str]:
    folder = os.path.commonpath([source.path.parent for source in sources])
    return [os.path.relpath(source.path, folder) for source in sources]


@dataclass
class _Batch:
    source: int
    document: int
    """Of that source, the first in this batch."""
    texts: list[str]
    apart: list[bool]
    """Held out."""
    encoded: list[Any] = field(default_factory=list)
    """The library's, for every piece of every text."""
    cuts: list[int] = field(default_factory=list)
    """Pieces of each text."""
    last: bool = False
    """The source ends with it."""


def _batches(what: Preparation, reached: Reached) -> Iterator[_Batch]:
    """Documents of one source at a time, from where the files end."""
    for number in range(reached.source, len(what.sources)):
        first = reached.document if number == reached.source else 0
        batch, letters = _Batch(number, first, [], []), 0
        for text in documents(what.sources[number], what.field, first):
            batch.texts.append(text)
            batch.apart.append(is_held_out(text, what.share))
            letters += len(text)
            if letters >= what.letters or len(batch.texts) >= DOCUMENTS:
                yield batch
                after = batch.document + len(batch.texts)
                batch, letters = _Batch(number, after, [], []), 0
        batch.last = True
        yield batch


def is_held_out(text: str, share: float) -> bool:
    """Whether a document is, where that share of all documents is to be."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "replace")) < int(share * 2**64)


def _gathered(batches: Iterator[_Batch], letters: int) -> Iterator[list[_Batch]]:
    """Small sources together, so that the library has enough to share out."""
    group: list[_Batch] = []
    size = 0
    for batch in batches:
        group.append(batch)
        size += sum(map(len, batch.texts)) + 64
        if size >= letters or len(group) >= DOCUMENTS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encoded(what: Preparation, reached: Reached) -> Iterator[_Batch]:
    """Batches with their tokens; the next are read and encoded while one is written."""
    # The reader is ahead of the writer: it must not see how far that has come.
    start = Reached(reached.settings, reached.source, reached.document)
    groups = _ahead(_gathered(_batches(what, start), what.letters))
    library = what.tokenizer.library

    def encode(group: list[_Batch]) -> list[_Batch]:
        flat: list[str] = []
        for batch in group:
            cut = [pieces(text) for text in batch.texts]
            batch.cuts = [len(each) for each in cut]
            flat += [piece for each in cut for piece in each]
        found = iter(library.encode_batch_fast(flat, add_special_tokens=False))
        for batch in group:
            batch.encoded = [next(found) for _ in range(sum(batch.cuts))]
        return group

    with ThreadPoolExecutor(1) as pool:
        running: Future[list[_Batch]] | None = None
        for group in groups:
            before, running = running, pool.submit(encode, group)
            if before:
                yield from before.result()
        if running:
            yield from running.result()


def _ahead(groups: Iterator[list[_Batch]]) -> Iterator[list[_Batch]]:
    """Reads in another thread, a few batches ahead."""
    waiting: queue.Queue[list[_Batch] | BaseException | None] = queue.Queue(BATCHES_AHEAD)
    ended = threading.Event()

    def put(item: list[_Batch] | BaseException | None) -> None:
        while not ended.is_set():
            try:
                return waiting.put(item, timeout=0.2)
            except queue.Full:
                continue

    def read() -> None:
        try:
            for group in groups:
                put(group)
                if ended.is_set():
                    return
            put(None)
        except BaseException as error:  # Raised where the batches are asked for.
            put(error)

    threading.Thread(target=read, name="reader", daemon=True).start()
    try:
        while (item := waiting.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        ended.set()


class _Shards:
    """The files that are written, and how far they reach."""

    def __init__(self, what: Preparation, reached: Reached, files: ExitStack) -> None:
        self.what, self.reached = what, reached
        dtype = smallest_type(what.tokenizer.vocabulary)
        self.code = "H" if dtype.itemsize == 2 else "I"
        self.begin = [] if what.begin is None else [what.begin]
        self.end = [what.end]
        self.names = _shard_names(what.shards)
        self.tokens: dict[str, BinaryIO] = {}
        self.ends: dict[str, BinaryIO] = {}
        for name, (tokens, count) in reached.files.items():
            path = what.out / name
            self.tokens[name] = files.enter_context(_cut(path, ".bin", tokens * dtype.itemsize))
            self.ends[name] = files.enter_context(_cut(path, ".idx", count * 8))
        self.list = files.enter_context(_cut(what.out / HELDOUT_LIST, "", reached.listed))
        self.paths = _names(what.sources)
        self.flushed = time.monotonic()
        if not (what.out / PROGRESS).exists():
            keep_bytes(what.out / TOKENIZER, what.tokenizer.path.read_bytes(), mode=0o644)
            self.flush()

    def write(self, batch: _Batch) -> None:
        reached, encoded = self.reached, iter(batch.encoded)
        reached.begin(self.what.sources[batch.source])
        parts: dict[str, tuple[list[bytes], list[int]]] = {}
        listed: list[dict[str, Any]] = []
        counts = reached.counts[batch.source]
        for place, (cut, apart) in enumerate(zip(batch.cuts, batch.apart, strict=True)):
            numbers = array.array(self.code, self.begin)
            for _ in range(cut):
                numbers.extend(array.array(self.code, next(encoded).ids))
            numbers.extend(self.end)
            name = HELDOUT if apart else self.names[reached.number % len(self.names)]
            reached.number += not apart
            data, ends = parts.setdefault(name, ([], []))
            data.append(numbers.tobytes())
            reached.files[name][0] += len(numbers)
            reached.files[name][1] += 1
            ends.append(reached.files[name][0])
            counts[0] += 1
            counts[1] += len(numbers)
            if apart:
                counts[2] += 1
                counts[3] += len(numbers)
                where = {"source": self.paths[batch.source], "document": batch.document + place}
                listed.append({**where, "tokens": len(numbers)})
        for name, (data, ends) in parts.items():
            self.tokens[name].write(b"".join(data))
            self.ends[name].write(np.array(ends, "<u8").tobytes())
        reached.listed += self.list.write(as_lines(listed))
        done = batch.document + len(batch.texts)
        reached.source, reached.document = (
            (batch.source + 1, 0) if batch.last else (batch.source, done)
        )
        if time.monotonic() - self.flushed >= self.what.flush_every:
            self.flush()

    def flush(self) -> None:
        """Makes durable what is written, then says how far that is."""
        for file in (*self.tokens.values(), *self.ends.values(), self.list):
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.what.out)
        said = json.dumps(asdict(self.reached)).encode()
        keep_bytes(self.what.out / PROGRESS, said, mode=0o644)
        self.flushed = time.monotonic()


def _cut(path: Path, ending: str, size: int) -> BinaryIO:
    """Opens a file for more, without what an interrupted call wrote after its last flush."""
    path = path.with_name(path.name + ending)
    file = path.open("ab")
    if (found := file.tell()) < size:
        file.close()
        raise SpecError(
            f"{path} has {found:,} bytes, {PROGRESS} says {size:,}.",
            hint="The folder is damaged: remove it and begin anew.",
        )
    file.truncate(size)
    return file


def _finish(what: Preparation, reached: Reached) -> TokenManifest:
    if not reached.number:
        raise SpecError(
            f"There is no document to train on; {reached.files[HELDOUT][1]} are held out.",
            hint="Give more text, or lower --heldout.",
        )

    def shard(name: str) -> TokenShard:
        tokens, count = reached.files[name]
        digests = (file_digest(what.out / f"{name}{ending}") for ending in (".bin", ".idx"))
        return TokenShard(name, tokens, count, *digests)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        *shards, apart = pool.map(shard, [*_shard_names(what.shards), HELDOUT])
    names = zip(_names(what.sources), reached.counts, strict=True)
    manifest = TokenManifest(
        tokenizer=what.tokenizer.digest,
        vocabulary=what.tokenizer.vocabulary,
        separator=what.end,
        begin=what.begin,
        dtype=smallest_type(what.tokenizer.vocabulary).str,
        share=what.share,
        shards=tuple(shards),
        heldout=apart,
        sources=tuple(PreparedSource(name, *counts) for name, counts in names),
    )
    manifest.write(what.out)
    (what.out / PROGRESS).unlink()
    return manifest
