"""Asks a region's trainer on this host for a trace of its next inner steps.

The trainer is asked through its mailbox and goes on training meanwhile. Only a process on the
region's own host can see what its devices do, so the region has to be at work in this folder.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from diloco_cli.errors import LinkError, RunFailed, SpecError, StoreError
from diloco_cli.run.folder import RESOLVED, Target
from diloco_cli.spec.load import load_spec
from diloco_cli.system.locks import Busy, FileLock
from diloco_cli.validation import nearest
from diloco_cli.worker.mailbox import Mailbox, ProfileAnswer, ProfileRequest

LOOK_SECONDS = 0.1


def profile(
    run: Target, region: str, steps: int, *, out: Path | None = None, wait: float
) -> tuple[Path, ProfileAnswer]:
    """Has `steps` inner steps traced; gives the folder of the trace and what is in it."""
    mailbox = _mailbox(run, region)
    assert run.folder is not None
    folder = (out or run.folder / "profiles" / region).resolve()
    request = ProfileRequest(uuid.uuid4().hex, steps, str(folder))
    with _alone(mailbox, region):
        if (trainer := mailbox.trainer_lock_holder()) is None:
            raise _not_training(run, region)
        try:
            mailbox.ask_for_profile(request)
            answer = _await(mailbox, request, trainer, region, wait)
        except OSError as error:
            raise StoreError(
                f"{mailbox.folder} cannot be written: {error.strerror}.",
                hint="Ask as the user whom the region runs as, and see that its disk has room.",
            ) from None
        finally:
            with contextlib.suppress(OSError):
                mailbox.withdraw_profile()
    if answer.error:
        raise RunFailed(
            f"Region {region} could not write its trace to {folder}: {answer.error}.",
            hint="Choose a folder that the region's user may write to with --out.",
        )
    return folder, answer


def _mailbox(run: Target, region: str) -> Mailbox:
    """The region's mailbox on this host, or why there is none."""
    if run.folder is None:
        raise SpecError(
            f"{run} is a server; a trace is made where the region trains.",
            hint=f"On the host of {region}, name its run folder: `diloco profile FOLDER --region "
            f"{region}`.",
        )
    folder = run.folder / "regions" / region
    if folder.is_dir():
        return Mailbox(folder)
    listed = [each.name for each in load_spec(run.folder / RESOLVED).spec.regions]
    here = sorted(path.name for path in run.folder.glob("regions/*") if path.is_dir())
    if region in listed:
        raise SpecError(
            f"Region {region} does not train from {run.folder}; "
            + (f"the regions here are {', '.join(here)}." if here else "no region does."),
            hint=f"Ask on the host of {region}, with the run folder it has there.",
        )
    known = sorted({*listed, *here})
    raise SpecError(
        f"There is no region {region!r} in {run}.", hint=nearest(region, known, "Its regions are")
    )


@contextlib.contextmanager
def _alone(mailbox: Mailbox, region: str) -> Iterator[None]:
    lock = FileLock(mailbox.folder / "profile.lock")
    try:
        lock.acquire()
    except Busy as busy:
        raise SpecError(
            f"Region {region} is being traced for process {busy.pid}.", hint="Wait for its end."
        ) from None
    except OSError as error:
        raise StoreError(
            f"{lock.path} cannot be written: {error.strerror}.",
            hint="Ask as the user whom the region runs as.",
        ) from None
    try:
        yield
    finally:
        lock.release()


def _await(
    mailbox: Mailbox, request: ProfileRequest, trainer: int, region: str, wait: float
) -> ProfileAnswer:
    deadline = time.monotonic() + wait
    while True:
        answer = mailbox.profile_answer()
        if answer and answer.id == request.id:
            return answer
        if mailbox.trainer_lock_holder() != trainer:
            raise RunFailed(
                f"The trainer of {region} ended before its trace was written.",
                hint="Ask again once the region trains.",
            )
        if time.monotonic() > deadline:
            progress = mailbox.progress()
            raise RunFailed(
                f"Region {region} has not made {request.steps} steps within {wait:g} s; "
                f"it is {progress.why if progress else 'starting'}.",
                hint="Ask for fewer with --steps, or wait longer with --wait.",
            )
        time.sleep(LOOK_SECONDS)


def _not_training(run: Target, region: str) -> LinkError:
    return LinkError(
        f"Region {region} is not running: no trainer works in {run}.",
        hint=f"`diloco status {run}` says what the run does; `diloco run` starts it again.",
    )
