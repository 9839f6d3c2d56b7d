"""A region's colour and shape: the same on every chart, in every row and beside every event.

Both follow from its place in the spec, so they never change; colour never speaks alone.
"""

from __future__ import annotations

from collections.abc import Sequence

SHAPES = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.5-3.5h7v7h-7z",
    "M0-4.5L4.5 3.5h-9z",
    "M0-5L4.5 0L0 5L-4.5 0z",
    "M0 4.5L4.5-3.5h-9z",
    "M-5-2h10v4h-10z",
    "M-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    "M-2-5h4v10h-4z",
)

DEFINITIONS = (
    "<svg width='0' height='0' aria-hidden='true'><defs><pattern id='hatch' width='5' height='5' "
    "patternUnits='userSpaceOnUse' patternTransform='rotate(45)'>"
    "<line class='hatch' x1='0' y1='0' x2='0' y2='5'/></pattern>"
    + "".join(f"<path id='m{place}' d='{shape}'/>" for place, shape in enumerate(SHAPES))
    + "<path id='missed' d='M-3-3L3 3M-3 3L3-3'/></defs></svg>"
)
"""What drawings refer to; once in a document."""


def styles_of(regions: Sequence[str]) -> dict[str, str]:
    """Each region's CSS class, by its place."""
    return {name: f"r{place % len(SHAPES)}" for place, name in enumerate(regions)}


def shape(style: str) -> str:
    """What a `use` of the region's shape refers to."""
    return f"#m{style[1:]}" if style[:1] == "r" else "#m0"


def mark(style: str) -> str:
    """The region's mark beside its name."""
    return (
        "<svg class='mark' aria-hidden='true' width='11' height='11' viewBox='-5.5 -5.5 11 11'>"
        f"<use href='{shape(style)}' class='dot {style}'/></svg>"
    )
