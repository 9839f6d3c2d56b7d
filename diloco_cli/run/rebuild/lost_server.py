"""A server's folder for a run whose own is lost: from its regions, from an older copy, or both.

    regions' images ─┐
    copy's versions ─┴─newest of each fragment──▶ NEW/server, a run that names the old one

Nothing is changed but the new folder, and that is there as a whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diloco_cli.assemble import build_terms, load_run, resolve, settings_of, spelled_out
from diloco_cli.core.journal_records import TermsAmended
from diloco_cli.core.ledger import Ledger
from diloco_cli.core.rebuild import (
    FoundVersion,
    NewestVersion,
    OtherWeights,
    first_number,
    newest_runs,
    newest_version,
    rebuilt_ledger,
)
from diloco_cli.errors import SpecError, StoreError
from diloco_cli.run.folder import RESOLVED, cannot_write, refuse_served
from diloco_cli.run.rebuild.region_folders import RegionFolder, find_regions, find_spec
from diloco_cli.server.recovery.rebuild import CopiedRun, read_copy, write_rebuilt
from diloco_cli.server.rounds.token_totals import RunTotals
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store.state_format import StoredState
from diloco_cli.server.terms import TermsHistory
from diloco_cli.system.files import keep_bytes, sync_file, sync_folder

COPY = "the copy"


@dataclass(frozen=True)
class RebuiltFragment:
    """What one fragment goes on from."""

    version: int
    digest: str
    holders: tuple[str, ...]
    momentum: str
    """`kept` or `fresh`."""


@dataclass(frozen=True)
class Rebuild:
    """A rebuild that can be made."""

    settings: ServerSettings
    spec: Path
    run: str
    """The run that is lost."""
    regions: tuple[RegionFolder, ...]
    copy: CopiedRun | None
    chosen: tuple[NewestVersion, ...]

    @property
    def fragments(self) -> tuple[RebuiltFragment, ...]:
        return tuple(
            RebuiltFragment(
                each.found.version,
                each.found.published,
                each.holders,
                "kept" if COPY in each.holders else "fresh",
            )
            for each in self.chosen
        )

    @property
    def remarks(self) -> list[str]:
        """What people should know before they go on from it."""
        said = [f"{region.name}: {why}" for region in self.regions for why in region.remarks]
        for number, fragment in enumerate(self.fragments):
            if len(fragment.holders) == 1 and fragment.holders != (COPY,):
                said.append(
                    f"version {fragment.version} of fragment {number} is held by "
                    f"{fragment.holders[0]} alone, so nothing confirms it"
                )
        names = {name for each in self.chosen for name in each.found.merged}
        missing = sorted(names - {region.name for region in self.regions})
        if missing and self.regions:
            said.append(
                f"without the folder{'s' * (len(missing) > 1)} of {', '.join(missing)}: what "
                "they alone have seen is not considered, and some of their text is read again"
            )
        return said

    @property
    def unconfirmed(self) -> bool:
        """Something rests on the word of one region."""
        return any(len(it.holders) == 1 and it.holders != (COPY,) for it in self.fragments)

    def write(self, folder: Path) -> str:
        """Makes FOLDER/server; gives the id of the new run."""
        home, draft = folder / "server", folder / ".server.draft"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(draft, ignore_errors=True)
            run = self._write(draft)
            for path in [*draft.rglob("*"), draft]:
                sync_file(path)
            if not (folder / RESOLVED).exists():
                keep_bytes(folder / RESOLVED, self.spec.read_bytes(), mode=0o644)
            if home.exists():
                os.rename(home, _aside(home))
            os.rename(draft, home)
            sync_folder(folder)
        except OSError as error:
            raise cannot_write(Path(error.filename or folder), error) from None
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return run

    def _write(self, draft: Path) -> str:
        copy, settings = self.copy, self.settings
        history = TermsHistory(settings, build_terms)
        ledger = copy.ledger if copy else Ledger.empty(len(settings.sizes))
        before = (*ledger.continues, copy.run) if copy else ()
        heard = [when for region in self.regions if (when := region.heard())]
        served = copy.ledger.allowance.time if copy and not heard else max(heard, default=None)
        ledger = rebuilt_ledger(
            ledger,
            [each.found for each in self.chosen],
            {region.name: region.found for region in self.regions},
            _amendments(self.regions, ledger.amendments),
            served=served or time.time(),
        )
        known = [number for region in self.regions for number in region.numbers]
        was = [*before]
        for region in self.regions:
            was += [*region.identity.was, region.identity.run]
        return write_rebuilt(
            settings,
            draft,
            ledger,
            copy.totals if copy else RunTotals(history),
            self._state,
            was=tuple(dict.fromkeys(run for run in was if run)),
            sources=tuple(", ".join(each.holders) for each in self.chosen),
            base=first_number([*known, copy.last if copy else 0]),
        )

    def _state(self, fragment: int) -> StoredState:
        chosen, size = self.chosen[fragment], self.settings.sizes[fragment]
        if self.copy and COPY in chosen.holders:
            return self.copy.state(fragment)
        holder = next(region for region in self.regions if region.name in chosen.holders)
        image = holder.mailbox.image(fragment)
        if image is None or image.published != chosen.found.published:
            raise StoreError(
                f"{holder.name} went on while its folder was read.",
                hint="Is the server running after all? Otherwise repeat the command.",
            )
        weights = np.ascontiguousarray(image.weights, np.float32)
        return StoredState(weights, self.settings.outer.start(size), weights)


def plan_rebuild(
    folders: Sequence[Path], copy: Path | None, folder: Path, *, spec: Path | None = None
) -> Rebuild:
    """Looks at what there is and says what a run would go on from; changes nothing."""
    in_place = copy is not None and copy.resolve() == folder.resolve()
    if (folder / "server").exists() and not in_place:
        raise SpecError(
            f"{folder / 'server'} exists already.",
            hint=f"Move it away if its run is lost: mv {folder / 'server'} "
            f"{folder / 'server.lost'}",
        )
    if in_place:
        refuse_served(folder)
    regions = find_regions(folders)
    at = spec or (copy / RESOLVED if copy else find_spec(folders))
    if at is None:
        raise SpecError(
            f"No {RESOLVED} lies beside the region folders.",
            hint="Give the run's spec with --spec FILE: that of any region's host will do.",
        )
    loaded = spelled_out(load_run(at).spec)
    settings = settings_of(loaded, resolve(loaded))
    _refuse_other_spec(folder, settings)
    copied = read_copy(settings, copy / "server", build_terms) if copy else None
    run = _run_of(regions, copied, settings)
    chosen = tuple(
        _choose(number, regions, copied, run, size) for number, size in enumerate(settings.sizes)
    )
    return Rebuild(settings, at, run, tuple(regions), copied, chosen)


def _refuse_other_spec(folder: Path, settings: ServerSettings) -> None:
    """Raises if a spec is there that a server of this run could not be started with."""
    there = folder / RESOLVED
    if not there.exists():
        return
    loaded = spelled_out(load_run(there).spec)
    if settings_of(loaded, resolve(loaded)).spec_digest != settings.spec_digest:
        raise SpecError(
            f"{there} is the spec of another run, {loaded.name}.", hint="Choose another --dir."
        )


def _run_of(
    regions: Sequence[RegionFolder], copy: CopiedRun | None, settings: ServerSettings
) -> str:
    """The run to go on from: the one that none of the others continues."""
    found: dict[str, set[str]] = {}
    for region in regions:
        for number, size in enumerate(settings.sizes):
            if held := region.version(number, size):
                found.setdefault(held[1], set())
        found.setdefault(region.identity.run, set()).update(region.identity.was)
    if copy:
        found.setdefault(copy.run, set()).update(copy.ledger.continues)
    runs = newest_runs({run: was for run, was in found.items() if run})
    if len(runs) > 1:
        raise SpecError(
            f"These are of different runs, {' and '.join(runs)}, of which none continues another.",
            hint="Give the folders of one run.",
        )
    return runs[0] if runs else ""


def _choose(
    number: int,
    regions: Sequence[RegionFolder],
    copy: CopiedRun | None,
    run: str,
    size: int,
) -> NewestVersion:
    held = [found for region in regions if (found := region.version(number, size))]
    found = [version for version, of in held if of == run]
    if copy and copy.run == run:
        slot = copy.ledger.slots[number]
        digest = copy.published(number)
        found.append(FoundVersion(COPY, slot.version, digest, slot.merged, slot.applied))
    chosen = newest_version(found)
    if chosen is None:
        raise StoreError(
            f"Nobody holds fragment {number} of run {run}: {len(regions)} region folders were "
            "looked at.",
            hint="Give the folders of more regions, or a copy of the server's with --and.",
        )
    if isinstance(chosen, OtherWeights):
        lines = "\n".join(
            f"  {digest[:12]}: {_place(holder, regions)}"
            for digest, holders in chosen.holders.items()
            for holder in holders
        )
        raise StoreError(
            f"There are two versions {chosen.version} of fragment {number}:\n{lines}",
            hint="Each is from another history, as when a server was set back and went on. "
            "Decide which one goes on and give the folders of that one only: the other regions "
            "go over to it by themselves, and count what is lost.",
        )
    return chosen


def _place(holder: str, regions: Sequence[RegionFolder]) -> str:
    """Whose version it is, and how fresh: what people need to decide between two."""
    for region in regions:
        if region.name == holder:
            heard = region.heard()
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(heard)) if heard else "never"
            return f"{holder} in {region.mailbox.folder}, which last had news at {at}"
    return holder


def _amendments(
    regions: Sequence[RegionFolder], known: Sequence[TermsAmended]
) -> Sequence[TermsAmended]:
    """The longest list of amendments; the shorter ones must be how it begins."""
    lists: Mapping[str, Sequence[TermsAmended]] = {
        COPY: known,
        **{region.name: region.amendments for region in regions},
    }
    longest = max(lists, key=lambda name: len(lists[name]))
    for name, amendments in lists.items():
        ours = [each.id for each in amendments]
        if ours != [each.id for each in lists[longest][: len(ours)]]:
            raise StoreError(
                f"{name} and {longest} have heard of different amendments.",
                hint="They are of different histories; leave one of them out.",
            )
    return lists[longest]


def _aside(home: Path) -> Path:
    number = 1
    while (aside := home.with_name(f"{home.name}.lost-{number}")).exists():
        number += 1
    return aside
