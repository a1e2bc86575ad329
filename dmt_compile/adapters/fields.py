"""One table with offsets: which rows of a parameter belong to which field (a column of its ids)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..observe import Seen
from .plain_calls import Call


@dataclass(frozen=True)
class Columns:
    """The ids of one lookup, column by column of their last dimension: the row of the parameter that id 0 of each is found in."""

    starts: tuple[int, ...]
    highest: tuple[int, ...]


def split_rows(calls: Sequence[tuple[Call, Seen]], rows: int) -> tuple[list[int], list[list[int]]] | None:
    """Cut a parameter of ``rows`` rows into the tables of several fields, where its lookups add a constant to every field's ids.

    ``calls`` are all lookups of the parameter, with what was seen of their ids. The constants are seen where all inputs are zero:
    they must be the same for every sample, and grow by at most one where all inputs are one. That is evidence and no proof;
    so ids are checked against their field's rows in every batch, and the example's ids must already lie there.

    Returns the first row of each table, and for each call the number of the table that every column of its ids reads (a single
    one if all columns read the same). None if there is but one table.
    """
    found = []
    for call, seen in calls:
        columns = _columns(seen)
        if columns is None or (call.pooling != "rows" and len(columns.starts) > 1):
            return None
        found.append(columns)
    starts = sorted({start for columns in found for start in columns.starts})
    if len(starts) < 2 or starts[0] < 0 or starts[-1] >= rows:
        return None
    # What lies before the first field (a padding row, say) goes with it.
    first = [0, *starts[1:]]
    places = [[bisect_right(starts, start) - 1 for start in columns.starts] for columns in found]
    for columns, own in zip(found, places, strict=True):
        for place, highest in zip(own, columns.highest, strict=True):
            if highest >= (*first, rows)[place + 1]:
                return None
    return first, places


def _columns(seen: Seen) -> Columns | None:
    """None unless every sample's ids are the same where all inputs are zero, and grow with the inputs by at most one."""
    if seen.probes is None or seen.values is None or any(x.is_meta for x in (*seen.probes, seen.values)):
        return None
    zeros, ones = seen.probes
    if zeros.shape != seen.shape or ones.shape != seen.shape or not zeros.numel():
        return None
    columns = seen.shape[-1] if len(seen.shape) > 1 and seen.shape[-1] == seen.fewer[-1] else 1
    zeros, ones, values = (x.reshape(-1, columns).long() for x in (zeros, ones, seen.values))
    grows = ones - zeros
    if not torch.equal(zeros, zeros[:1].expand_as(zeros)) or bool(((grows < 0) | (grows > 1)).any()):
        return None
    starts, highest = zeros[0].tolist(), values.amax(0).tolist()
    if bool((values < zeros).any()):
        return None
    if len(set(starts)) == 1:
        return Columns((starts[0],), (max(highest),))
    return Columns(tuple(starts), tuple(highest))
