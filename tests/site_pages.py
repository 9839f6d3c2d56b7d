"""What makes a site of the pages in docs/, which are written to be read in a repository.

MkDocs calls the functions by their names (`hooks` in mkdocs.yml). Links to files beside docs/,
which a site does not have, become their names; links to a folder lead to its first page.
"""

from __future__ import annotations

import re
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Names headings as repositories do, so that one link works in both."""
    from pymdownx.slugs import slugify

    config["mdx_configs"].setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


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
