"""What does a new run start from?

    FOLDER/run.yaml          a pipeline with your regions, its comments kept
    FOLDER/start-server.sh   for the host that aggregates
    FOLDER/start-REGION.sh   for each host that trains; needs a URL and its certificates
    FOLDER/.gitignore

Everything is composed and checked before the first file is written, and no file that
exists is touched. What a region's host needs of it, with a credential, is handed out as one file:

    NAME/run.yaml, NAME/start-REGION.sh, NAME/certs/regions/REGION/
"""

from __future__ import annotations

import io
import os
import re
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from diloco_cli.errors import SpecError
from diloco_cli.spec.schema import is_a_name
from diloco_cli.spec.yaml_source import scalar
from diloco_cli.validation import nearest

TEMPLATES = resources.files("diloco_cli") / "run" / "templates"
PORT = 7350
IGNORED = "# What runs leave behind, and secrets.\nruns/\ncerts/\n*.tar\n*.safetensors\n"

HEADER = """\
# A run spec, started from the template TEMPLATE. Edit freely; `diloco validate run.yaml` checks it,
# `diloco explain` lists what else can be chosen, and every key is in docs/reference/spec.md.
"""
START = """\
# start: {weights: runs/OLD}     # begin with another run's weights, a file's or a server's (URL)
"""
SERVER = """\
# A port that stays the same, so that region hosts can be given one URL. It listens on its own
# host only; with `diloco certs init --host NAME`, start-server.sh opens it to others, over TLS.
server: {listen: 127.0.0.1:PORT, store: {kind: folder}}
"""

_REGIONS = re.compile(r"^regions:\n(?:[ #-].*\n)+", re.MULTILINE)
_SEED = re.compile(r"^seed:.*\n", re.MULTILINE)
_SERVER = re.compile(r"^server:.*\n", re.MULTILINE)


@dataclass(frozen=True)
class PlannedFile:
    """A file that is not written yet."""

    path: Path
    text: str
    executable: bool = False


def templates() -> list[str]:
    """Lists the pipelines a run can start from."""
    files = (TEMPLATES / "pipelines").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def pipeline(name: str) -> str:
    """Gives the text of one of them."""
    return (TEMPLATES / "pipelines" / f"{name}.yaml").read_text("utf-8")


def compose(folder: Path, template: str, regions: Sequence[str]) -> list[PlannedFile]:
    """Drafts every file of a new run, or says why that run could not work."""
    from diloco_cli.assemble import faults
    from diloco_cli.spec.load import parse_spec

    text = _spec_text(folder, template, regions)
    spec = parse_spec(text, str(folder / "run.yaml"), also=faults).spec
    names = [region.name for region in spec.regions]
    if "server" in names:
        raise SpecError(
            "A region cannot be called 'server': start-server.sh starts the server.",
            hint="Choose another name.",
        )
    return [
        PlannedFile(folder / "run.yaml", text),
        PlannedFile(folder / "start-server.sh", _script("start-server.sh"), executable=True),
        *(PlannedFile(folder / f"start-{name}.sh", region_script(name), True) for name in names),
        PlannedFile(folder / ".gitignore", IGNORED),
    ]


def write(drafts: Sequence[PlannedFile]) -> list[Path]:
    """Writes the files; if one of them exists, none. An own .gitignore is left as it is."""
    there = [draft.path for draft in drafts if draft.path.exists()]
    if taken := [path for path in there if path.name != ".gitignore"]:
        raise SpecError(
            f"There already are {', '.join(map(str, taken))}.",
            hint="Nothing was written. Choose another folder, or move these away.",
        )
    written = []
    try:
        for draft in drafts:
            if draft.path in there:
                continue
            draft.path.parent.mkdir(parents=True, exist_ok=True)
            with open(draft.path, "x", encoding="utf-8") as file:
                file.write(draft.text)
            draft.path.chmod(0o755 if draft.executable else 0o644)
            written.append(draft.path)
    except OSError as error:
        raise SpecError(
            f"{error.filename} cannot be written: {error.strerror}.",
            hint="Choose a folder that can be written, with space on its disk.",
        ) from None
    return written


def _spec_text(folder: Path, template: str, regions: Sequence[str]) -> str:
    if template not in templates():
        raise SpecError(
            f"There is no template called {template!r}.",
            hint=nearest(template, templates(), "Templates"),
        )
    text = HEADER.replace("TEMPLATE", template) + pipeline(template).partition("\n")[2]
    name = folder.resolve().name
    if is_a_name(name):
        text = re.sub(r"^name: .*$", f"name: {_quoted(name)}", text, count=1, flags=re.MULTILINE)
    if regions:
        for region in regions:
            if not is_a_name(region):
                raise SpecError(
                    f"{region!r} cannot be the name of a region.",
                    hint="Names are small letters, digits, - and _, as in --regions paris,tokyo-2",
                )
        lines = "".join(f"  - {{name: {_quoted(region)}}}\n" for region in regions)
        text = _REGIONS.sub(lambda _: f"regions:\n{lines}", text, count=1)
    text = _SEED.sub(lambda found: found[0] + START, text, count=1)
    server = SERVER.replace("PORT", str(PORT))
    return _SERVER.sub(lambda _: server, text, count=1)


def _quoted(name: str) -> str:
    return name if isinstance(scalar(name), str) else f'"{name}"'


def region_script(region: str) -> str:
    """Gives the text of start-REGION.sh."""
    return _script("start-region.sh").replace("REGION", region)


def _script(name: str) -> str:
    return (TEMPLATES / name).read_text("utf-8").replace("PORT", str(PORT))


# For one region's host

SECRETS = ("ca.pem", "client.pem", "client.key", "token")


def write_handout(out: Path, *, run: str, region: str, spec: Path, credential: Path) -> None:
    """Packs what a region's host needs, and nothing else, into a file that only its owner can read.

    No key of the authority is in it, and nobody else's credential.
    """
    from diloco_cli.run.folder import PROJECT
    from diloco_cli.system.outputs import cannot_be_written

    script = spec.parent / f"start-{region}.sh"
    files = {
        PROJECT: (spec.read_bytes(), 0o644),
        script.name: (
            script.read_bytes() if script.is_file() else region_script(region).encode(),
            0o755,
        ),
        **{
            f"certs/regions/{region}/{name}": ((credential / name).read_bytes(), 0o600)
            for name in SECRETS
        },
    }
    folders = ("", "certs", "certs/regions", f"certs/regions/{region}")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in folders:
            archive.addfile(_entry(f"{run}/{name}".rstrip("/"), 0, 0o700, tarfile.DIRTYPE))
        for name, (content, mode) in files.items():
            entry = _entry(f"{run}/{name}", len(content), mode, tarfile.REGTYPE)
            archive.addfile(entry, io.BytesIO(content))
    try:
        handle = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise SpecError(f"{out} exists already.", hint="Move it away, or choose another.") from None
    except OSError as error:
        raise cannot_be_written(out, "--bundle", error) from None
    with os.fdopen(handle, "wb") as file:
        file.write(packed.getvalue())


def _entry(name: str, size: int, mode: int, kind: bytes) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.type, entry.mtime = size, mode, kind, int(time.time())
    return entry
