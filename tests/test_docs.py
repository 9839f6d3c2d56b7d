"""The pages say what the code does, and the pipelines people start from are sound."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import get_origin

import pytest
import yaml
from pydantic import BaseModel

from diloco_cli import assemble, errors
from diloco_cli.observe.status import Summary
from diloco_cli.run import scaffold
from diloco_cli.spec import describe
from diloco_cli.spec.schema import RunSpec
from tests import ROOT
from tests import reference_pages as reference
from tests.site_pages import contents, on_page_markdown

PAGES = ROOT / "docs" / "reference"
PIPELINES = sorted((ROOT / "pipelines").glob("*.yaml"))


@pytest.mark.parametrize("name, said", reference.pages().items(), ids=lambda value: value[:20])
def test_a_reference_page_is_what_the_code_says(name: str, said: str):
    page = PAGES / name
    assert page.exists() and page.read_text() == said, "run `make docs`"


def sections(section: type[BaseModel], path: str = "") -> list[tuple[str, type[BaseModel]]]:
    found = [(path, section)]
    for name, field in section.model_fields.items():
        if inner := reference._inner(field.annotation):
            listed = "[]" if get_origin(field.annotation) is tuple else ""
            found += sections(inner, f"{path}.{name}{listed}".strip("."))
    return found


@pytest.mark.parametrize("path, section", sections(RunSpec), ids=lambda value: str(value))
def test_every_key_of_the_spec_is_documented(path: str, section: type[BaseModel]):
    page = (PAGES / "spec.md").read_text()
    for key in describe.keys_of(section):
        assert key.doc, f"{path}.{key.name} says nothing about itself"
        assert f"`{path}.{key.name}`".replace("`.", "`") in page


def test_every_exit_code_is_documented_with_its_meaning():
    codes = {
        error.exit_code
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.DilocoError)
    }
    page = (PAGES / "exit-codes.md").read_text()
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert documented == codes | {0, 129, 130, 143}


def test_the_keys_of_a_summary_that_the_reference_explains_are_there():
    page = (PAGES / "run-folder.md").read_text().partition("## summary.json")[2]
    rows = [re.findall(r"`([\w.]+)`", line.split("|")[1]) for line in page.splitlines()[4:] if line]
    assert ["goodput"] in rows and len(rows) > 4
    for first, *others in rows:
        section, _, key = first.rpartition(".")
        owner = type(getattr(Summary(state="finished"), section)) if section else Summary
        assert {key, *(other.strip(".") for other in others)} <= owner.model_fields.keys()


@pytest.mark.parametrize("seam", assemble.SEAMS)
def test_every_kind_says_what_it_is(seam: str):
    for kind in describe.kinds_of(assemble.SEAMS[seam]):
        # A dataclass without a docstring gets one from Python: its signature.
        silent = not kind.doc or re.match(r"\w+\(", kind.doc)
        assert not silent, f"{seam} {kind.name} says nothing about itself"
        for option in kind.options:
            assert option.doc, f"{seam} {kind.name}.{option.name} says nothing about itself"


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.stem)
def test_every_pipeline_is_a_run_that_can_work(path: Path):
    loaded = assemble.load_run(path)
    assert loaded.spec.name == path.stem


def test_every_pipeline_is_a_template_and_is_listed():
    names = [path.stem for path in PIPELINES]
    assert names == scaffold.templates()
    listed = (ROOT / "pipelines" / "README.md").read_text()
    assert [name for name in names if f"({name}.yaml)" not in listed] == []


def test_init_reads_the_pipelines_of_this_repository():
    for path in PIPELINES:
        assert scaffold.pipeline(path.stem) == path.read_text()


def test_the_contracts_pipelines_are_there():
    assert {"quickstart", "four-regions", "mixed-speeds", "smoke"} <= set(scaffold.templates())


GUIDES_TO_THE_CODE = (
    "CONTRIBUTING.md",
    "README.md",
    "docs/glossary.md",
    "docs/concepts/architecture.md",
    "docs/concepts/life-of-a-contribution.md",
)


def paths_in(text: str) -> list[str]:
    """Python files and folders named in backticks; a bare name is beside the one before it."""
    paths: list[str] = []
    for name in re.findall(r"`([a-z_/]+(?:\.py|/))`", text):
        beside = "/" not in name and bool(paths)
        paths.append(f"{paths[-1].rpartition('/')[0]}/{name}" if beside else name)
    return paths


@pytest.mark.parametrize("page", GUIDES_TO_THE_CODE)
def test_the_code_that_a_page_names_is_there(page: str):
    roots = (ROOT, ROOT / "diloco_cli")
    missing = [
        path
        for path in paths_in((ROOT / page).read_text())
        if not any((root / path).exists() for root in roots)
    ]
    assert missing == []


def test_that_check_would_notice():
    assert paths_in("`core/rounds.py`, `pace.py`, `merge/`") == [
        "core/rounds.py",
        "core/pace.py",
        "merge/",
    ]


def pages_in(nav: object) -> list[str]:
    """The files that a table of contents names, at any depth."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    assert isinstance(parts, Iterable)
    return [page for part in parts for page in pages_in(part)]


def test_the_site_leads_to_every_page_once(tmp_path):
    docs, nav = ROOT / "docs", contents(ROOT / "docs")
    written = sorted(path.relative_to(docs).as_posix() for path in docs.glob("**/*.md"))
    assert sorted(pages_in(nav)) == written and nav[0] == {"Overview": "README.md"}
    assert [name for part in nav[1:4] for name in part] == ["Start", "Guides", "Concepts"]
    (tmp_path / "new" / "deep").mkdir(parents=True)
    (tmp_path / "new" / "deep" / "page.md").touch()
    assert pages_in(contents(tmp_path)) == ["README.md", "new/deep/page.md"]


def test_the_site_is_checked_and_asks_nobody_for_anything():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert site["strict"] is True and site["theme"]["font"] is False
    assert set(site["validation"]["links"].values()) == {"warn"}


def test_links_that_a_site_has_no_page_for_become_names():
    class Files:
        @staticmethod
        def documentation_pages():
            return [SimpleNamespace(src_uri="reference/commands.md")]

    text = "[a](../../pipelines/a.py), [b](reference/), [c](guides/c.md#d), [e](https://e.org/f/)"
    assert on_page_markdown(text, page=None, config=None, files=Files) == (
        "`a`, [b](reference/commands.md), [c](guides/c.md#d), [e](https://e.org/f/)"
    )


ODD = re.compile(
    r"somebody asked for it|; again in \d|the same command again goes on|only took up room"
    r"|(bits|bytes) a parameter|nats a token|one line a check|once more kills|has given all it held"
    r"|until he is|Make the server's weights again|versions made again",
    re.IGNORECASE,
)
"""Phrases that made native readers stop."""


def test_no_page_and_no_message_says_it_oddly():
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "diloco_cli").rglob("*.py"),
    ]
    found = {
        f"{path.relative_to(ROOT)}: {odd[0]}"
        for path in pages
        if (odd := ODD.search(re.sub(r"\s+", " ", path.read_text("utf-8"))))
    }
    assert found == set()
    assert ODD.search("4.3 bits a parameter")
