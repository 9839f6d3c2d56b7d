"""A server's folder, copied back so that a crash leaves all of it or none.

The journal is copied first: whatever it speaks of is copied after it and is there, because
a server keeps what is merged for some versions more. So even the copy of a running server
is a state that the server once was in.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from diloco_cli.errors import SpecError, StoreError
from diloco_cli.run.folder import RESOLVED, cannot_write
from diloco_cli.system.files import keep_bytes, sync_file, sync_folder

LEFT_OUT = ("lock", "address.json", "cache")
"""What belongs to the process that ran there, not to the run."""


def bring_back(copy: Path, folder: Path) -> None:
    """Copies `server/` and the spec to where a server can be started."""
    home = folder / "server"
    if home.exists():
        raise SpecError(
            f"{home} exists already.",
            hint=f"Move it away if its run is lost: mv {home} {home}.lost",
        )
    spec = (copy / RESOLVED).read_bytes()
    if (folder / RESOLVED).exists() and (folder / RESOLVED).read_bytes() != spec:
        raise SpecError(
            f"{folder / RESOLVED} is the spec of another run.", hint="Choose another --dir."
        )
    draft = folder / ".server.draft"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        _copied(copy / "server", draft)
        keep_bytes(folder / RESOLVED, spec, mode=0o644)
        os.rename(draft, home)
        sync_folder(folder)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise cannot_write(Path(error.filename or folder), error) from None


def _copied(source: Path, draft: Path) -> None:
    draft.mkdir(mode=0o700)
    names = sorted((path.name for path in source.iterdir()), key=lambda name: name != "journal")
    for name in names:
        if name in LEFT_OUT or name.endswith(".draft"):
            continue
        if (source / name).is_dir():
            shutil.copytree(source / name, draft / name, ignore=shutil.ignore_patterns("*.draft"))
        else:
            shutil.copy2(source / name, draft / name)
    if not (draft / "journal").exists():
        raise StoreError(f"{source} has no journal.", hint="Restore from another copy.")
    for path in [*draft.rglob("*"), draft]:
        sync_file(path)
