"""Where a model mixes its features: kind, vectors, and the user's line of each interaction."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .text import WIDTH
from .words import counted, cut, listed, place, plain, span, span_of

if TYPE_CHECKING:
    from ..interactions import Interaction, Member

_MOST = 6
_INDENT = 4


def interaction_lines(found: Sequence[Interaction]) -> Iterator[str]:
    """Lines of at most 80 columns, three for each interaction."""
    if not found:
        yield "  none: no value depends on two features"
    for one in found[:_MOST]:
        if one.kind == "unknown":
            yield cut(f"  unknown: {plain(one.variant)}", WIDTH)
            continue
        yield cut(f"  {one.kind}{', ' if one.variant else ''}{one.variant}", WIDTH)
        head = " " * _INDENT + f"{_size(one)}: "
        yield head + listed(_names(one.block.members), WIDTH - len(head))
        if one.location is not None:
            yield cut(f"{' ' * _INDENT}{place(one.location)}: {plain(one.text)}".rstrip(": "), WIDTH)
    if len(found) > _MOST:
        yield f"  ... and {len(found) - _MOST:,} more (program.interactions)"


def _size(one: Interaction) -> str:
    widths = one.block.widths
    number = counted(one.block.vectors, "vector")
    return f"{number} of {span(span_of(widths))}" if widths else number


def _names(members: Sequence[Member]) -> Iterator[str]:
    """Names of lookups; vectors of other roles that lie together are counted."""
    for (role, _), run in itertools.groupby(members, key=lambda member: (member.role, member.name)):
        same = list(run)
        if role in ("lookup", "replicated"):
            yield same[0].name if len(same) == 1 else f"{len(same)} x {same[0].name}"
        elif role == "dense":
            yield f"{len(same)} dense"
        elif role == "constant":
            yield counted(len(same), "constant")
        else:
            yield "results of others"
