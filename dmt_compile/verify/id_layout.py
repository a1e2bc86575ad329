"""The layout check of ids: where they are read, whom they are sent to, and that what arrives is what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from ..runtime.ids import CountIds, MakeRequest, ReadSizes, RouteIds, UnpackIds
from ..runtime.select import ReadIds, SelectIds
from .values import Ids, Routed, Sizes

if TYPE_CHECKING:
    from .layout import _Checker


def read_ids(check: _Checker, module: ReadIds, *inputs: Any) -> Any:
    read = tuple(check.flat_name(arg) for arg in check.node.args if isinstance(arg, fx.Node))
    expected = module.source.nodes
    check.expect(read == expected, f"reads ids from {', '.join(read)}, the model reads them from {', '.join(expected)}")
    return Ids("source", SelectIds((), (), (), ()), module.source)


def request(check: _Checker, module: MakeRequest, *sources: Any) -> Any:
    _sources(check, module.select, sources, module.exchange.round)
    _counts_match(check, module.select, module.exchange)
    return Ids("request", module.select, module.exchange)


def route(check: _Checker, module: RouteIds, *sources: Any) -> Any:
    _sources(check, module.select, sources, module.exchange.round)
    _counts_match(check, module.select, module.exchange)
    return Routed(module.select, module.exchange)


def _sources(check: _Checker, select: SelectIds, sources: tuple[Any, ...], number: int) -> None:
    check.expect(number in range(len(check.rounds)), f"is of round {number} of {len(check.rounds)}")
    expected = check.rounds[number].sources
    found = tuple(source.module if isinstance(source, Ids) else source for source in sources)
    check.expect(found == expected, "ids are not read from the model's id sources, in their order")
    check.expect(select.sources == expected, "ids are selected from other sources than the model's")


def _counts_match(check: _Checker, select: SelectIds, exchange: Any) -> None:
    check.expect(
        len(exchange.features_per_rank) == check.world and exchange.starts[-1] == len(select.entries),
        f"{len(select.entries)} features are sent, but the ranks expect {exchange.starts[-1]}",
    )
    weighted = tuple(exchange.starts[rank] + place for rank, run in enumerate(exchange.weighted_per_rank) for place in run)
    check.expect(weighted == select.weighted, "the features that come with weights are not the ones the ranks expect")
    largest = max(table.end for table in check.rounds[0].tables) - 1
    check.expect(largest <= torch.iinfo(exchange.id_dtype).max, f"{exchange.id_dtype} does not hold every id up to {largest}")


def _same_division(check: _Checker, ids: Ids, module: Any) -> None:
    check.expect(ids.module == module.exchange, "divides the ids among the ranks in another way than they were ordered for")


def count_ids(check: _Checker, module: CountIds, request: Any) -> Any:
    check.expect(isinstance(request, Ids) and request.kind == "request", "counts something that is not a request for ids")
    _same_division(check, request, module)
    return Ids("counts", request.select, module.exchange)


def read_sizes(check: _Checker, module: ReadSizes, received: Any, sent: Any) -> Any:
    check.awaited(received)
    check.expect(isinstance(received, Ids) and received.kind == "counts received", "reads sizes that no rank has sent")
    check.expect(isinstance(sent, Ids) and sent.kind == "counts", "does not know what this rank has sent")
    _same_division(check, received, module)
    return Sizes("ids", module.exchange)


def unpack_ids(check: _Checker, module: UnpackIds, lengths: Any, values: Any, weights: Any, sizes: Any) -> Any:
    for value, kind in ((lengths, "lengths received"), (values, "values received"), (weights, "weights received")):
        check.awaited(value)
        if value is None and kind.startswith("weights") and not module.exchange.carries_weights:
            continue
        check.expect(isinstance(value, Ids) and value.kind == kind, f"is not given the {kind.split()[0]} that were received")
        _same_division(check, value, module)
    check.expect(isinstance(sizes, Sizes) and sizes.kind == "ids", "does not know the sizes of what was received")
    check.expect(sizes.source == module.exchange, "is given the sizes of another exchange")
    return Routed(lengths.select, module.exchange)


HANDLERS: dict[type[nn.Module], Callable[..., Any]] = {
    ReadIds: read_ids,
    MakeRequest: request,
    RouteIds: route,
    CountIds: count_ids,
    ReadSizes: read_sizes,
    UnpackIds: unpack_ids,
}
