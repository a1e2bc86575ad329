"""What the analysis of a model knows about its embedding lookups, independent of the library they were written with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

# "rows" keeps every row: nothing is pooled.
Pooling = Literal["sum", "mean", "max", "amax", "rows"]

Form = Literal["keyed", "fixed", "offsets"]

Unit = Literal["sample", "id", "bag"]

ANY = -1


@dataclass(frozen=True)
class Table:
    """One embedding table: ``rows`` x ``dim`` values of ``dtype``.

    ``name`` is unique in the model and is what plans use. ``parameter`` is the full name of the weight in the model's
    state dict. A parameter that holds the tables of several features is several tables here, each a run of its rows that begins
    at row ``start``; ids then count from the parameter's first row, as in the model.
    """

    name: str
    parameter: str
    rows: int
    dim: int
    dtype: torch.dtype
    start: int = 0

    @property
    def end(self) -> int:
        """The row behind the table's last one."""
        return self.start + self.rows

    @property
    def bytes(self) -> int:
        return self.rows * self.dim * self.dtype.itemsize


@dataclass(frozen=True)
class IdSource:
    """A place in the graph where ids come from: ``node`` yields them, ``features`` are the keys read from it.

    ``label`` is what errors call it: the user's expression where that is known. ``form`` says how the ids are laid out:

    - "keyed": a KeyedJaggedTensor;
    - "fixed": a tensor of ``shape`` with ``count`` ids of each feature per sample (in the shape -1 is the dimension that grows with
      the batch, None one of any size); its last dimension lists the features, if there are several; ``extra`` may name a tensor of
      as many weights. With a ``count`` of 0 there are as many as the last dimension says; else ``because`` is why there may be no
      other number, if that is known;
    - "offsets": a 1-D tensor of ids; ``extra`` names its offsets, and then its weights if it is ``weighted``.

    A lookup makes one row of columns per ``unit``. That is the batch's sample, wherever the number of ids, or of bags, of a batch
    follows from the number of its samples; elsewhere it is the "id" or the "bag". A fixed source whose unit is no sample has
    ``count`` 1. Lookups of other units, and those whose ids are computed from the result of others, are served in a ``round`` of
    exchanges of their own; ``per_sample`` is how many ids or bags of each feature the example inputs have for one sample, None
    where the data decides it. Where ids count from the end if they are negative, ``wraps`` is the number of rows. Weights that are
    a mask are taken as numbers of ``weight_dtype``. ``leads`` are the tensors, by their number among ``nodes``, whose order in
    memory the model's rows take on: torch adds in another order where that is another one, so it must be the usual one.
    """

    node: str
    label: str
    features: tuple[str, ...]
    weighted: bool
    form: Form = "keyed"
    count: int = 0
    extra: tuple[str, ...] = ()
    include_last_offset: bool = False
    shape: tuple[int | None, ...] = ()
    unit: Unit = "sample"
    per_sample: float | None = None
    because: str = ""
    round: int = 0
    wraps: int = 0
    weight_dtype: torch.dtype | None = None
    leads: tuple[int, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes that are read."""
        return (self.node, *self.extra)


@dataclass(frozen=True)
class Lookup:
    """One lookup: the bags of ``feature``, taken from id source number ``source``, read from ``table``.

    ``name`` is unique in the model. Its output is (B, ``dim``) of ``dtype``, part of output number ``output``. Rows that are
    not pooled lie side by side: n ids per sample in a table of width d make n * d columns. Where the model takes rows and pools the
    ``sequence`` rows of every sample itself, its own operation pools them at the owner, after they are multiplied by their weights;
    "amax" is found only there. A ``sequence`` of ``ANY`` are as many rows as the samples of the batch have, the same number each.
    ``padding_idx`` and ``sparse`` (gradients) are those of ``torch.nn.functional.embedding``. ``grad`` is False for a lookup that
    the model makes under ``torch.no_grad()``. ``max_norm`` and ``norm_type`` are torch's: rows that are read are scaled down in the
    table first.
    """

    name: str
    feature: str
    table: str
    source: int
    pooling: Pooling
    weighted: bool
    dim: int
    dtype: torch.dtype
    output: int
    padding_idx: int | None = None
    sparse: bool = False
    grad: bool = True
    max_norm: float | None = None
    norm_type: float = 2.0
    sequence: int = 0

    @property
    def gathers(self) -> bool:
        """Whether rows are taken from the table as they are, whatever becomes of them."""
        return self.pooling == "rows" or bool(self.sequence)


@dataclass(frozen=True)
class RaggedInput:
    """An input of the model in offsets form: a 1-D tensor whose length is no batch size, and what cuts it into samples.

    Each place is a path into the inputs: the name of an argument, then keys, indices or attribute names.
    """

    values: tuple[object, ...]
    offsets: tuple[object, ...]
    weights: tuple[object, ...] | None
    include_last_offset: bool


@dataclass(frozen=True)
class LookupOutput:
    """A graph node that yields pooled columns, and the lookups whose columns it holds, in its own order.

    ``keys`` are the names under which the node offers the columns; ``location`` is the user's file:line. ``shape`` is that of
    a plain tensor output, -1 in the place of the dimension that grows with the batch; None for a KeyedTensor. Where it has no
    fixed shape, it is that of the value of node ``like``, and the columns are its last dimension. ``inner`` are further nodes that
    the lookup stands for: rows before the model pools them.
    """

    node: str
    keys: tuple[str, ...]
    lookups: tuple[str, ...]
    location: str | None
    shape: tuple[int, ...] | None = None
    like: str | None = None
    inner: tuple[str, ...] = ()


@dataclass(frozen=True)
class LookupSet:
    """All embedding lookups of one model. ``lookups`` stand in declaration order: output by output, column by column."""

    tables: tuple[Table, ...]
    sources: tuple[IdSource, ...]
    lookups: tuple[Lookup, ...]
    outputs: tuple[LookupOutput, ...]

    def __add__(self, other: LookupSet) -> LookupSet:
        """Both sets in one; their names must not clash."""
        moved = (
            replace(lookup, source=lookup.source + len(self.sources), output=lookup.output + len(self.outputs))
            for lookup in other.lookups
        )
        return LookupSet(
            self.tables + other.tables,
            self.sources + other.sources,
            (*self.lookups, *moved),
            self.outputs + other.outputs,
        )

    @cached_property
    def table(self) -> dict[str, Table]:
        return {table.name: table for table in self.tables}

    @cached_property
    def lookup(self) -> dict[str, Lookup]:
        return {lookup.name: lookup for lookup in self.lookups}

    @cached_property
    def lookups_of_table(self) -> dict[str, tuple[Lookup, ...]]:
        """The lookups that read each table, in declaration order; a table that nothing reads has none."""
        found: dict[str, list[Lookup]] = {table.name: [] for table in self.tables}
        for lookup in self.lookups:
            found[lookup.table].append(lookup)
        return {name: tuple(lookups) for name, lookups in found.items()}

    @cached_property
    def shards(self) -> dict[str, tuple[Table, ...]]:
        """By parameter, the tables that it holds, in the order of their rows."""
        found: dict[str, list[Table]] = {}
        for table in sorted(self.tables, key=lambda table: table.start):
            found.setdefault(table.parameter, []).append(table)
        return {table.parameter: tuple(found[table.parameter]) for table in self.tables}

    @cached_property
    def rounds(self) -> tuple[LookupSet, ...]:
        """The lookups of each round of exchanges, in order, with their own sources and outputs; all tables are in every round.

        Without lookups there is no round.
        """
        numbers = sorted({source.round for source in self.sources})
        if len(numbers) == 1:
            return (self,)
        return tuple(self._of_round(number) for number in numbers)

    def _of_round(self, number: int) -> LookupSet:
        sources = [index for index, source in enumerate(self.sources) if source.round == number]
        lookups = [lookup for lookup in self.lookups if lookup.source in sources]
        outputs = list(dict.fromkeys(lookup.output for lookup in lookups))
        return LookupSet(
            self.tables,
            tuple(self.sources[index] for index in sources),
            tuple(replace(x, source=sources.index(x.source), output=outputs.index(x.output)) for x in lookups),
            tuple(self.outputs[index] for index in outputs),
        )

    @property
    def unit(self) -> Unit:
        """What a row of columns of a round belongs to: a bag where some lookups have bags, because an id is a bag of one."""
        return "bag" if any(source.unit == "bag" for source in self.sources) else self.sources[0].unit

    @property
    def uneven(self) -> bool:
        """Whether the lookups of a round have numbers of rows of their own, of which a rank's batch size is the largest."""
        return len(self.sources) > 1 and self.unit != "sample"

    def columns_per_sample(self, lookup: Lookup) -> float:
        """The columns that a lookup makes for a sample of the example inputs; those of one id or bag where the data decides."""
        source = self.sources[lookup.source]
        return lookup.dim if source.unit == "sample" or source.per_sample is None else lookup.dim * source.per_sample

    def source_of(self, output: LookupOutput) -> int:
        """The number of the source that an output's ids are taken from."""
        return self.lookup[output.lookups[0]].source

    @cached_property
    def bag_of(self) -> dict[tuple[int, str], int]:
        """The place of each (source, feature) among the bags of a batch: each once, as the lookups first name them."""
        return {entry: index for index, entry in enumerate(dict.fromkeys((x.source, x.feature) for x in self.lookups))}

    @property
    def width(self) -> int:
        """Pooled columns per sample, over all lookups."""
        return sum(lookup.dim for lookup in self.lookups)

    @property
    def exchange_dtype(self) -> torch.dtype:
        """The type in which pooled rows travel: the narrowest that holds every lookup's output exactly."""
        dtype = self.lookups[0].dtype
        for lookup in self.lookups[1:]:
            dtype = torch.promote_types(dtype, lookup.dtype)
        return dtype
