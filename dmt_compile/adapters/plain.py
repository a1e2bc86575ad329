"""Plain PyTorch lookups as the records that passes work on: how their ids are laid out, which round of exchanges serves them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from ..errors import source_location
from ..graphs import NO_GRAD, source_text
from ..lookups import ANY, IdSource, Lookup, LookupOutput, LookupSet, Pooling, Table, Unit
from ..observe import Observed, Seen
from ..shapes import in_order
from .fields import split_rows
from .plain_calls import Call, kept_weights
from .pooled_rows import PooledRows, pooled_rows


@dataclass(frozen=True)
class _Served:
    """A lookup that an owner can serve: where its ids come from, and the shape of its result.

    One whose rows the owner also pools can be served ``as_rows`` instead, and one with a number of ids for each sample for
    ``any_number`` of them; ``grows`` is the dimension of the ids that grows with the batch.
    """

    call: Call
    source: IdSource
    shape: tuple[int, ...] | None
    like: str | None
    pooled: PooledRows | None = None
    as_rows: _Served | None = None
    any_number: _Served | None = None
    grows: int = 0

    @property
    def pooling(self) -> Pooling:
        return self.pooled.pooling if self.pooled is not None else self.call.pooling


@dataclass(frozen=True)
class _Rows:
    """The tables that a parameter holds, and by lookup the number of the table that each column of its ids reads."""

    tables: tuple[Table, ...]
    places: Mapping[fx.Node, Sequence[int]]
    whole: str | None = None


def find_plain(
    flat: fx.GraphModule,
    calls: Sequence[Call],
    observed: Observed,
    others: LookupSet,
    keep: Mapping[str, str] | None = None,
    plainly: Collection[str] = (),
    fixed: Callable[[fx.Node, int, tuple[int, ...]], str | None] = lambda *_: "",
) -> tuple[LookupSet, dict[str, str], dict[str, str]]:
    """Every plain lookup of a captured graph that an owner can serve, and for the rest of the tables why they stay replicated.

    Also why tables are not taken apart whose lookups add another constant to every field's ids.

    ``others`` are the graph's lookups of another kind; no lookup or table gets a name of theirs. Tables in ``keep`` stay
    replicated, for the reason given there. Parameters in ``plainly`` are not taken apart, and their rows not pooled by the owner.
    ``fixed`` says of ids (a node, the dimension that grows with the batch, their shape in the example) why their number per sample
    must not change from batch to batch; None where it may.
    """
    calls = [call for call in calls if not call.indexing or _indexes_by_ids(call, observed)]
    kept = {call.parameter: keep[call.parameter] for call in calls if keep and call.parameter in keep}
    replicated = {**kept, **kept_weights(flat, calls)}
    served = []
    behind = _behind(flat, {call.node for call in calls}, {output.node for output in others.outputs})
    for call in calls:
        if call.parameter not in replicated:
            found = _serve(call, observed, None if call.parameter in plainly else pooled_rows(call, observed, behind))
            if isinstance(found, str):
                replicated[call.parameter] = f"{call.at}: {found}"
            else:
                served.append(found)
    served = [one for one in served if one.call.parameter not in replicated]
    rows = _tables(served, observed, {*others.table, *others.lookup}, plainly)
    # What reads several tables cannot be pooled by the owner of one.
    several = {node for own in rows.values() for node, places in own.places.items() if len(places) > 1}
    served = [one.as_rows if one.as_rows is not None and one.call.node in several else one for one in served]
    served = [one if one.call.node in several else _freed(one, observed, fixed) for one in served]
    served = [replace(one, source=_by_field(one.source, rows[one.call.parameter].places[one.call.node])) for one in served]
    whole = {parameter: own.whole for parameter, own in rows.items() if own.whole is not None}
    return _lookup_set(served, rows, set(others.lookup)), replicated, whole


def _freed(one: _Served, observed: Observed, fixed: Callable[[fx.Node, int, tuple[int, ...]], str | None]) -> _Served:
    """A lookup as it is served for any number of ids, where that may change."""
    if one.any_number is None:
        return one
    because = fixed(one.call.ids, one.grows, observed.tensors[one.call.ids.name].shape)
    return one.any_number if because is None else replace(one, source=replace(one.source, because=because))


def _indexes_by_ids(call: Call, observed: Observed) -> bool:
    """Whether an index is a tensor of ids of the batch, and no mask, slice or constant."""
    seen = observed.tensors.get(call.ids.name)
    if seen is None or seen.dtype.is_floating_point or seen.dtype.itemsize < 4:
        return False
    return seen.shape != seen.fewer or seen.varies


def _behind(flat: fx.GraphModule, calls: set[fx.Node], others: set[str]) -> set[fx.Node]:
    """The nodes that need a lookup."""
    found: set[fx.Node] = set()
    for node in flat.graph.nodes:
        if node in calls or node.name in others or any(used in found for used in node.all_input_nodes):
            found.add(node)
    return found


def _serve(call: Call, observed: Observed, pooled: PooledRows | None) -> _Served | str:
    """How an owner can serve a lookup, or why none can."""
    seen, result = (observed.tensors.get(node.name) for node in (call.ids, call.node))
    if seen is None or result is None:
        return "its ids are no tensor"
    if seen.shape == seen.fewer and not seen.varies and call.offsets is None:
        return f"its ids are of shape {seen.shape} for any number of samples"
    label = source_text(call.ids)
    extra = tuple(node.name for node in (call.offsets, call.weights) if node is not None)
    # Indexing lays rows out as the index is; all other lookups, sample by sample.
    leads = (0,) if call.indexing else ()
    if leads and call.ids.name in observed.laid_out and not in_order(*observed.laid_out[call.ids.name]):
        return "its index lies transposed in memory, and its rows would too: call .contiguous() on it"
    source = IdSource(call.ids.name, label, (label,), call.weights is not None, extra=extra, leads=leads)
    if call.offsets is not None:
        return _serve_offsets(call, replace(source, form="offsets"), observed, result)
    source = replace(source, form="fixed")
    if call.wraps:
        source = replace(source, wraps=call.rows)
    if call.pooling != "rows":
        per_sample = _per_sample(seen.shape[0], seen.fewer[0], seen.varies, observed)
        source = replace(source, shape=(-1, None), unit="sample" if per_sample == 1 else "bag", per_sample=per_sample)
        return _Served(call, source, (-1, *result.shape[1:]), None)
    count, left = divmod(_numel(seen.shape), observed.batch)
    grows = [place for place, (size, fewer) in enumerate(zip(seen.shape, seen.fewer, strict=False)) if size != fewer]
    regular = len(seen.shape) == len(seen.fewer) and len(grows) == 1 and _numel(seen.fewer) == count * observed.fewer
    # Samples must not share a row of ids.
    regular = regular and seen.shape[grows[0]] % observed.batch == 0
    ids = _per_sample(_numel(seen.shape), _numel(seen.fewer), seen.varies, observed)
    by_id = replace(source, count=1, shape=(None,) * len(seen.shape), unit="id", per_sample=ids)
    any_number = _Served(call, by_id, None, call.ids.name)
    if seen.varies or left or not count or not regular:
        return any_number

    def growing(shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(-1 if place == grows[0] else size for place, size in enumerate(shape))

    source = replace(source, count=count, shape=growing(seen.shape), per_sample=count)
    free = any_number if len(seen.shape) > 1 else None
    rows = _Served(call, source, growing(result.shape), None, any_number=free, grows=grows[0])
    if pooled is None or len(seen.shape) != 2:
        return rows
    if pooled.weights is not None:
        source = replace(source, weighted=True, extra=(pooled.weights.name,), weight_dtype=call.dtype)
        source = replace(source, leads=(*source.leads, 1) if pooled.weights_lead else source.leads)
    # Their number travels with the ids, and what goes back does not depend on it.
    any_number = _Served(call, replace(source, count=0, shape=(-1, None)), pooled.shape, None, pooled)
    return _Served(call, source, pooled.shape, None, pooled, rows, any_number)


def _serve_offsets(call: Call, source: IdSource, observed: Observed, result: Seen) -> _Served | str:
    assert call.offsets is not None
    offsets = observed.tensors.get(call.offsets.name)
    if offsets is None:
        return "its offsets are no tensor"
    bags, fewer = (_numel(shape) - call.include_last_offset for shape in (offsets.shape, offsets.fewer))
    if bags == fewer:
        return f"it makes {bags} bags for any number of samples"
    per_sample = _per_sample(bags, fewer, offsets.varies, observed)
    unit: Unit = "sample" if per_sample == 1 else "bag"
    source = replace(source, include_last_offset=call.include_last_offset, unit=unit, per_sample=per_sample)
    return _Served(call, source, (-1, *result.shape[1:]), None)


def _per_sample(units: int, fewer: int, varies: bool, observed: Observed) -> float | None:
    """How many there are for each sample; None where that is not the same for any number of samples."""
    if varies or units * observed.fewer != fewer * observed.batch:
        return None
    return units / observed.batch


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _tables(
    served: Sequence[_Served], observed: Observed, names_taken: Iterable[str], plainly: Collection[str]
) -> dict[str, _Rows]:
    """By parameter, the tables in it."""
    calls: dict[str, list[Call]] = {}
    for one in served:
        calls.setdefault(one.call.parameter, []).append(one.call)
    taken = set(names_taken)
    found = {}
    for parameter, own in calls.items():
        call = own[0]
        name = parameter.removesuffix(".weight")
        split = split_rows(own, call.rows, observed) if parameter not in plainly else None
        if split is None or isinstance(split, str):
            table = Table(_unused(name, taken), parameter, call.rows, call.dim, call.dtype)
            found[parameter] = _Rows((table,), {one.node: [0] for one in own}, split)
            continue
        ends = (*split[0][1:], call.rows)
        tables = tuple(
            Table(_unused(f"{name}[{start}:{end}]", taken), parameter, end - start, call.dim, call.dtype, start)
            for start, end in zip(split[0], ends, strict=True)
        )
        found[parameter] = _Rows(tables, {one.node: places for one, places in zip(own, split[1], strict=True)})
    return found


def _by_field(source: IdSource, places: Sequence[int]) -> IdSource:
    """The source with a feature for every column of its ids, where the columns read tables of their own."""
    fields = len(places)
    if fields == 1:
        return source
    before = ":" if len(source.shape) == 2 else "..."
    features = tuple(f"{source.label}[{before}, {column}]" for column in range(fields))
    count = source.count if source.unit == "id" else source.count // fields
    per_sample = source.per_sample / fields if source.per_sample is not None else None
    return replace(source, features=features, count=count, shape=(*source.shape[:-1], fields), per_sample=per_sample)


def _lookup_set(served: Sequence[_Served], rows: Mapping[str, _Rows], names_taken: set[str]) -> LookupSet:
    reads: dict[str, int] = {}
    columns: dict[fx.Node, list[tuple[str, Table]]] = {}
    for one in served:
        own = rows[one.call.parameter]
        tables = [own.tables[place] for place in own.places[one.call.node]]
        columns[one.call.node] = list(zip(one.source.features, tables, strict=True))
        for table in tables:
            reads[table.name] = reads.get(table.name, 0) + 1
    sources = list(dict.fromkeys(one.source for one in served))
    taken = set(names_taken)
    lookups: list[Lookup] = []
    outputs: list[LookupOutput] = []
    for one in served:
        call, names = one.call, []
        for feature, table in columns[call.node]:
            name = _unused(table.name if reads[table.name] == 1 else f"{table.name}@{feature}", taken)
            names.append(name)
            padded = call.padding_idx is not None and table.start <= call.padding_idx < table.end
            lookups.append(
                Lookup(
                    name=name,
                    feature=feature,
                    table=table.name,
                    source=sources.index(one.source),
                    pooling=one.pooling,
                    weighted=one.source.weighted,
                    dim=table.dim * (one.source.count if one.pooling == "rows" else 1),
                    dtype=call.dtype,
                    output=len(outputs),
                    padding_idx=call.padding_idx if padded else None,
                    sparse=call.sparse,
                    grad=NO_GRAD not in call.node.meta,
                    max_norm=call.max_norm,
                    norm_type=call.norm_type,
                    sequence=(one.source.count or ANY) if one.pooled is not None else 0,
                )
            )
        node = one.pooled.node if one.pooled is not None else call.node
        inner = tuple(x.name for x in one.pooled.inner) if one.pooled is not None else ()
        where = source_location(call.node)
        outputs.append(LookupOutput(node.name, tuple(names), tuple(names), where, one.shape, one.like, inner))
    return LookupSet(tuple(table for own in rows.values() for table in own.tables), tuple(sources), tuple(lookups), tuple(outputs))


def _unused(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}#{number}"
    taken.add(candidate)
    return candidate
