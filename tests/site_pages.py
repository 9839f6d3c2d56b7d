"""What makes a site of the pages in docs/, which are written to be read in a repository.

MkDocs calls the functions by their names (`hooks` in mkdocs.yml). Links to files beside docs/,
which a site does not have, become their names; links to a folder lead to its first page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

SECTIONS = ("start", "guides", "concepts", "reference", "results", "decisions")
"""In the order in which a newcomer needs them; others come after these."""
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Lists the pages, and names headings as repositories do, so that one link works in both."""
    from pymdownx.slugs import slugify  # pyright: ignore[reportMissingImports]  # extra `site`

    config["nav"] = contents(Path(config["docs_dir"]))
    config["mdx_configs"].setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def contents(docs: Path) -> list[Any]:
    """The site's table of contents: every page that there is."""
    pages = sorted(path.relative_to(docs).as_posix() for path in docs.glob("**/*.md"))
    top = [page for page in pages if "/" not in page and page != "README.md"]
    folders = {page.partition("/")[0] for page in pages if "/" in page}
    known = [name for name in SECTIONS if name in folders]
    sections = {
        name.capitalize(): [page for page in pages if page.startswith(f"{name}/")]
        for name in [*known, *sorted(folders - set(known))]
    }
    return [{"Overview": "README.md"}, *({name: found} for name, found in sections.items()), *top]


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    pages = sorted(file.src_uri for file in files.documentation_pages())

    def replaced(link: re.Match[str]) -> str:
        text, target = link.groups()
        if target.startswith("../../"):
            return text if text.startswith("`") else f"`{text}`"
        if target.endswith("/") and "://" not in target:
            first = next((name for name in pages if name.startswith(target)), None)
            return f"[{text}]({first})" if first else text
        return link[0]

    return LINK.sub(replaced, markdown)
