"""Sparse ids on their own rank: read from the batch, checked, picked feature by feature, cut into bags.

Jagged ids are feature-major throughout: ``lengths[f, b]`` ids of feature f for sample b, values of feature 0 first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..adapters import plain_ids
from ..adapters import torchrec as torchrec_adapter
from ..errors import InputError
from ..jagged import permute_blocks
from ..lookups import IdSource
from ..shapes import in_order
from .base import Constant


class JaggedIds(NamedTuple):
    """Ids of F features for B samples: ``keys`` F names, ``values`` (N,), ``lengths`` (F, B), ``weights`` (N,) or None."""

    keys: list[str]
    values: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor | None


class Bag(NamedTuple):
    """Bags of one feature: ``values`` (n,), ``offsets`` (samples + 1,), ``weights`` (n,) or None."""

    values: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None


class IdRequest(NamedTuple):
    """Ids in the order of their destinations: ``lengths`` (E, B) for E entries; ``weights`` of the weighted entries only."""

    values: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor | None


class ReadIds(nn.Module):
    """Read one id source of the flat model as jagged ids; see the two ``read_ids`` of the adapters for what is refused.

    Raises:
        InputError: an index or weights lie transposed in memory, so that the model adds in another order than the program.
    """

    def __init__(self, source: IdSource) -> None:
        super().__init__()
        self.source = source

    def forward(self, batch: Any, *extra: torch.Tensor) -> JaggedIds:
        if self.source.form == "keyed":
            return JaggedIds(*torchrec_adapter.read_ids(batch, self.source))
        for number in self.source.leads:
            lead = (batch, *extra)[number]
            if not in_order(lead.shape, lead.stride()):
                what = f"the weights of '{self.source.label}' lie" if number else f"'{self.source.label}' lies"
                raise InputError(
                    f"{what} transposed in memory, unlike in example_inputs, and the model would add rows in another order than "
                    "the program: call .contiguous() in forward or on the batch, or compile with example_inputs that lie alike"
                )
        return JaggedIds(*plain_ids.read_ids(batch, extra, self.source))


class SelectIds(nn.Module):
    """Pick ``entries`` (source number, feature), in that order, out of several id sources.

    ``weighted`` are the positions of the entries whose weights are needed too. With ``limits`` (the first row of each entry's
    table, and the one behind its last) ids are checked to lie inside their table before they travel; where tables are
    ``partial``, runs of rows of a parameter, that must not be left out: an id could be one of another table. ``tables`` are the
    names of the entries' tables. Sources of ids or bags (and not of samples) may have different numbers of them: all get as many
    as the largest, by empty bags behind their own. The sources numbered ``never_none`` must have ids if they have samples.

    Raises:
        InputError: a feature is missing from the batch, sources disagree on the batch size, or an id is out of range.
    """

    def __init__(
        self,
        entries: Sequence[tuple[int, str]],
        weighted: Sequence[int],
        limits: Sequence[tuple[int, int]],
        sources: Sequence[IdSource],
        partial: bool = False,
        tables: Sequence[str] = (),
        never_none: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.never_none = tuple(never_none)
        self.partial = partial
        self.tables = tuple(tables)
        self.entries = tuple(entries)
        self.weighted = tuple(weighted)
        self.limits = tuple(limits)
        self.sources = tuple(sources)
        self.uneven = all(source.unit != "sample" for source in self.sources)
        self._limits = tuple(Constant(ends) for ends in zip(*self.limits, strict=True)) if self.limits else ()
        self._known: tuple[list[list[str]], Constant, Constant] | None = None

    def positions(self, all_keys: list[list[str]]) -> tuple[Constant, Constant]:
        """Rows of the stacked sources that the entries, and the weighted entries, are found in."""
        if self._known is not None and self._known[0] == all_keys:
            return self._known[1], self._known[2]
        found: dict[tuple[int, str], tuple[int, int]] = {}
        row = weighted_row = 0
        for number, keys in enumerate(all_keys):
            for key in keys:
                # Of two features with one name TorchRec reads the last.
                found[number, key] = (row, weighted_row)
                row += 1
                weighted_row += self.sources[number].weighted
        for number, feature in self.entries:
            if (number, feature) not in found:
                have = ", ".join(repr(key) for key in all_keys[number][:12]) + (", ..." if len(all_keys[number]) > 12 else "")
                raise InputError(
                    f"the batch has no feature '{feature}', which the model looks up from '{self.sources[number].label}'; "
                    f"it has {have}"
                )
        order = Constant([found[entry][0] for entry in self.entries])
        weighted = Constant([found[self.entries[position]][1] for position in self.weighted])
        self._known = ([list(keys) for keys in all_keys], order, weighted)
        return order, weighted

    def forward(self, *ids: JaggedIds) -> IdRequest:
        order, weighted = self.positions([one.keys for one in ids])
        for number in self.never_none:
            if not ids[number].values.numel() and ids[number].lengths.shape[1]:
                label = self.sources[number].label
                raise InputError(f"'{label}' has no ids for its samples, and the model takes the maximum of their rows")
        sizes = {one.lengths.shape[1] for one in ids}
        if len(sizes) > 1 and self.uneven:
            ids = tuple(_with_empty_bags(one, max(sizes)) for one in ids)
        elif len(sizes) > 1:
            named = ", ".join(f"'{s.label}' {one.lengths.shape[1]}" for s, one in zip(self.sources, ids, strict=True))
            raise InputError(f"the sparse inputs have different batch sizes: {named}")
        values, lengths = _stack(ids)
        if int(lengths.sum()) != values.numel():
            raise InputError(
                f"the lengths of {', '.join(repr(s.label) for s in self.sources)} add up to {int(lengths.sum())} ids, "
                f"but there are {values.numel()}"
            )
        weights = None
        if weighted.values:
            carrying = [(one.lengths, one.weights) for one in ids if one.weights is not None]
            weight_lengths = torch.cat([own for own, _ in carrying])
            weights = _select(torch.cat([own for _, own in carrying]), weight_lengths, weighted)
        values = _select(values, lengths, order)
        if not _keeps_order(order, lengths):
            lengths = lengths[order.on(lengths.device)]
        return IdRequest(values, lengths, weights)

    def check_range(self, request: IdRequest) -> None:
        """Refuse ids outside their table, naming the first feature that has one."""
        counts = request.lengths.sum(dim=1)
        first, behind = (
            torch.repeat_interleave(ends.on(request.values.device), counts, output_size=request.values.numel())
            for ends in self._limits
        )
        bad = (request.values < first) | (request.values >= behind)
        if bool(bad.any()):
            place = int(bad.nonzero()[0])
            entry = int((counts.cumsum(0) <= place).sum())
            number, feature = self.entries[entry]
            low, high = self.limits[entry]
            what = f"feature '{feature}' has id {int(request.values[place])}, "
            ends = request.lengths.flatten().cumsum(0)
            sample = int((ends <= place).sum()) - entry * request.lengths.shape[1]
            where = f" (table '{self.tables[entry]}', {self.sources[number].unit} {sample} of the batch)" if self.tables else ""
            if low or (self.sources[number].form != "keyed" and len(self.sources[number].features) > 1):
                raise InputError(
                    f"{what}outside rows {low} to {high - 1} of its table, which example_inputs showed to be its own{where}: "
                    "correct the id, or compile with example_inputs that hold such ids"
                )
            raise InputError(f"{what}outside its table of {high} rows{where}")


def _with_empty_bags(ids: JaggedIds, size: int) -> JaggedIds:
    return ids._replace(lengths=nn.functional.pad(ids.lengths, (0, size - ids.lengths.shape[1])))


def _stack(ids: Sequence[JaggedIds]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(ids) == 1:
        return ids[0].values, ids[0].lengths.long()
    return torch.cat([one.values for one in ids]), torch.cat([one.lengths for one in ids]).long()


def _keeps_order(order: Constant, lengths: torch.Tensor) -> bool:
    return order.values == tuple(range(lengths.shape[0]))


def _select(values: torch.Tensor, lengths: torch.Tensor, order: Constant) -> torch.Tensor:
    if _keeps_order(order, lengths):
        return values
    return permute_blocks(values, lengths.sum(dim=1), order.on(lengths.device))


def split_bags(values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None, weighted: Sequence[int]) -> list[Bag]:
    """Cut feature-major ids into one :class:`Bag` per row of ``lengths``; ``weighted`` are the rows that have weights."""
    offsets = nn.functional.pad(lengths.cumsum(dim=1), (1, 0))
    sizes = lengths.sum(dim=1).tolist()
    parts = values.split(sizes)
    weight_of: dict[int, torch.Tensor] = {}
    if weights is not None:
        weight_of = dict(zip(weighted, weights.split([sizes[row] for row in weighted]), strict=True))
    return [Bag(part, offsets[row], weight_of.get(row)) for row, part in enumerate(parts)]


class LocalBags(nn.Module):
    """All bags of one round of the local batch, in declaration order, for lookups on one device."""

    def __init__(self, select: SelectIds, round: int = 0) -> None:
        super().__init__()
        self.select = select
        self.round = round

    def forward(self, *ids: JaggedIds) -> list[Bag]:
        request = self.select(*ids)
        return split_bags(request.values, request.lengths, request.weights, self.select.weighted)
