"""The lookups of one of Dynamo's graphs, as the records that passes work on.

Ranks do not compile the same graphs: a size that one has seen change is a constant to another. So nothing here may depend on
sizes. A lookup makes a row per id, or per bag, of as many as there are; which lookups share a round of exchanges follows from how
they are written alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..adapters.plain_calls import Call, find_calls, kept_weights
from ..errors import CaptureError, source_location
from ..graphs import NO_GRAD, source_text
from ..lookups import IdSource, Lookup, LookupOutput, LookupSet, Table


def value_of(node: fx.Node) -> Any:
    """What Dynamo noted of a node's value: a fake tensor, a size, or None."""
    return node.meta.get("example_value")


def find_lookups(flat: fx.GraphModule, keep: Mapping[str, str], alone: bool = False) -> tuple[LookupSet, dict[str, str]]:
    """Every lookup that an owner can serve, and why the tables of the others stay on every rank, by parameter.

    Tables in ``keep`` stay for the reason given there. ``alone`` is for one rank, whose tables cannot differ from another's.
    """
    calls = [call for call in find_calls(flat) if not call.indexing or _is_ids(call.ids)]
    replicated = {call.parameter: keep[call.parameter] for call in calls if call.parameter in keep}
    replicated = {**kept_weights(flat, calls), **replicated}
    for call in calls:
        if call.dim == 0 or not _is_ids(call.ids):
            replicated.setdefault(call.parameter, f"{call.at}: its ids are no tensor of integers")
        weights = value_of(call.weights) if call.weights is not None else None
        if isinstance(weights, torch.Tensor) and weights.dtype != call.dtype:
            raise CaptureError(
                f"{call.at}: the weights are {weights.dtype}, the table that they weigh is {call.dtype}: convert them"
            )
        if call.parameter in replicated and call.max_norm is not None and not alone:
            raise CaptureError(
                f"{call.at}: '{call.parameter}' would stay on every rank ({replicated[call.parameter]}), and every rank would "
                "scale the rows of its own batch only (max_norm), until the tables differ: leave max_norm out, or give the weight "
                "a parameter of its own"
            )
    served = [call for call in calls if call.parameter not in replicated]
    rounds = _rounds(flat.graph, served)
    return _lookup_set(served, rounds), replicated


def _is_ids(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)


def _rounds(graph: fx.Graph, calls: Sequence[Call]) -> list[int]:
    """The number of each lookup's round: behind those that its ids need; of one depth, together with those written alike."""
    made = {call.node for call in calls}
    depth: dict[fx.Node, int] = {}
    for node in graph.nodes:
        depth[node] = max((depth[used] for used in node.all_input_nodes), default=0) + (node in made)
    keys = [(max(depth[used] for used in call.reads), _kind(call)) for call in calls]
    order = {key: number for number, key in enumerate(sorted(dict.fromkeys(keys), key=lambda key: key[0]))}
    return [order[key] for key in keys]


def _kind(call: Call) -> tuple[object, ...]:
    """Lookups of one kind have about as many rows: one for each sample; or one for each id of one and the same tensor.

    In a round all send as many bags as the one with the most of them.
    """
    if call.pooling != "rows" or (value_of(call.ids).dim() < 2 and not _is_flattened(call.ids)):
        return ("samples",)
    return ("ids", call.ids.name)


def _is_flattened(ids: fx.Node) -> bool:
    """Whether a tensor of one dimension has been made from one of several by listing all of its values."""
    name = ids.target if isinstance(ids.target, str) else getattr(ids.target, "__name__", "")
    if name.partition(".")[0] not in ("view", "reshape", "flatten", "ravel"):
        return False
    made_from = [value_of(used) for used in ids.all_input_nodes[:1]]
    return any(isinstance(value, torch.Tensor) and value.dim() > 1 for value in made_from)


def _lookup_set(calls: Sequence[Call], rounds: Sequence[int]) -> LookupSet:
    tables = {
        call.parameter: Table(call.parameter.removesuffix(".weight"), call.parameter, call.rows, call.dim, call.dtype)
        for call in calls
    }
    reads: dict[str, int] = {}
    sources: list[IdSource] = []
    lookups: list[Lookup] = []
    outputs: list[LookupOutput] = []
    for call, number in zip(calls, rounds, strict=True):
        source = _source(call, number)
        if source not in sources:
            sources.append(source)
        table = tables[call.parameter]
        times = reads[table.name] = reads.get(table.name, 0) + 1
        name = table.name if times == 1 else f"{table.name}#{times}"
        lookups.append(
            Lookup(
                name=name,
                feature=source.features[0],
                table=table.name,
                source=sources.index(source),
                pooling=call.pooling,
                weighted=source.weighted,
                dim=table.dim,
                dtype=call.dtype,
                output=len(outputs),
                padding_idx=call.padding_idx,
                sparse=call.sparse,
                grad=NO_GRAD not in call.node.meta,
                max_norm=call.max_norm,
                norm_type=call.norm_type,
            )
        )
        where = source_location(call.node)
        shape, like = (None, call.ids.name) if call.pooling == "rows" else ((-1, table.dim), None)
        outputs.append(LookupOutput(call.node.name, (name,), (name,), where, shape, like))
    return LookupSet(tuple(tables.values()), tuple(sources), tuple(lookups), tuple(outputs))


def _source(call: Call, number: int) -> IdSource:
    label = source_text(call.ids)
    extra = tuple(node.name for node in (call.offsets, call.weights) if node is not None)
    weighted = call.weights is not None
    dims = value_of(call.ids).dim()
    if call.offsets is not None:
        return IdSource(
            call.ids.name,
            label,
            (label,),
            weighted,
            "offsets",
            extra=extra,
            include_last_offset=call.include_last_offset,
            unit="bag",
            round=number,
        )
    count, unit, shape = (1, "id", (None,) * dims) if call.pooling == "rows" else (0, "bag", (-1, None))
    return IdSource(
        call.ids.name,
        label,
        (label,),
        weighted,
        "fixed",
        count=count,
        extra=extra,
        shape=shape,
        unit=unit,  # type: ignore[arg-type]
        round=number,
        wraps=call.rows if call.wraps else 0,
    )


def described(lookups: LookupSet, owner: Mapping[str, int]) -> list[tuple[object, ...]]:
    """What all ranks must agree on: which table each lookup of each round reads, how, and who owns it."""
    return [
        (
            x.name,
            x.table,
            x.pooling,
            x.dim,
            str(x.dtype),
            x.weighted,
            x.max_norm,
            x.norm_type,
            lookups.sources[x.source].round,
            owner[x.table],
        )
        for x in lookups.lookups
    ]
