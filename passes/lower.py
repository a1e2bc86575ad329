"""sptt -> lowered: every declared exchange as pack, collective, wait, unpack; then scheduled for overlap.

    tower = dmt.exchange_tower(x, sizes)  ==>  packed = dmt.tower_pack(x)
                                               out    = dmt.tower_out_splits(sizes)
                                               in_    = dmt.tower_in_splits(sizes)
                                               sent   = all_to_all_single(packed, out, in_, "tower")
                                               buffer = wait_tensor(sent)
                                               tower  = dmt.tower_unpack(buffer, sizes)

The group argument is the axis of the tower grid; binding to a rank puts the process group's name there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from torch import fx

from dmt_compile.errors import PassError, at
from dmt_compile.graphs import closure
from dmt_compile.runtime.announce import NUMBERS
from dmt_compile.runtime.ids import CountIds, RouteIds
from dmt_compile.runtime.pooled import ExchangeRows, OpenRound, Pack
from dmt_compile.stage import ALL_TO_ALL, STEP, WAIT, Stage
from dmt_compile.verify.layout import check_layout

from .base import Draft, GraphPass
from .effects import effect_of


def only_collectives_move_data(stage: Stage) -> None:
    """No declared exchange is left, and every collective is awaited."""
    for node in stage.graph.nodes:
        if node.op == "call_module" and isinstance(stage.module(node), RouteIds | ExchangeRows):
            raise PassError(f"pass 'lower': {at(node)} is an exchange that was not lowered")


@dataclass(frozen=True)
class Lower(GraphPass):
    name: ClassVar[str] = "lower"
    takes: ClassVar[tuple[str, ...]] = ("sptt", "modules")
    makes: ClassVar[str] = "lowered"
    ensures = (only_collectives_move_data, check_layout)

    def rewrite(self, draft: Draft) -> None:
        for node in draft.calls(RouteIds):
            _lower_route(draft, node)
        for node in draft.calls(ExchangeRows):
            _lower_exchange(draft, node)
        _overlap(draft)
        _open_rounds(draft)


def _open_rounds(draft: Draft) -> None:
    """Say between two collectives that the second begins another round, where it does."""
    transfers = [node for node in draft.graph.nodes if node.target is ALL_TO_ALL]
    for number, (last, following) in enumerate(pairwise(transfers), 1):
        payload = following.args[0]
        assert isinstance(payload, fx.Node)
        if payload.op == "call_module" and isinstance(draft.module(payload), CountIds):
            with draft.placing(before=last.next, like=following, step="a"):
                draft.call(f"open_{number}", OpenRound())


def _transfer(draft: Draft, name: str, buffer: Any, out_splits: Any, in_splits: Any, axis: str) -> fx.Node:
    sent = draft.function(f"{name}_all_to_all", ALL_TO_ALL, buffer, out_splits, in_splits, axis)
    return draft.function(f"{name}_wait", WAIT, sent)


def _lower_exchange(draft: Draft, node: fx.Node) -> None:
    module = draft.module(node)
    assert isinstance(module, ExchangeRows)
    rows, sizes = node.args
    axis = module.exchange.axis
    parts = module.parts()
    with draft.placing(before=node, like=node, step=node.meta[STEP], round=module.exchange.round):
        packed = draft.call(f"{axis}_pack", parts["pack"], rows)
        out_splits = draft.call(f"{axis}_out_splits", parts["out_splits"], sizes)
        in_splits = draft.call(f"{axis}_in_splits", parts["in_splits"], sizes)
        buffer = _transfer(draft, axis, packed, out_splits, in_splits, axis)
        blocks = draft.call(f"{axis}_unpack", parts["unpack"], buffer, sizes)
    node.replace_all_uses_with(blocks)
    draft.erase(node)


def _lower_route(draft: Draft, node: fx.Node) -> None:
    module = draft.module(node)
    assert isinstance(module, RouteIds)
    exchange, parts = module.exchange, module.parts()
    three = [NUMBERS] * exchange.world_size
    kinds = ["lengths", "values"] + (["weights"] if exchange.carries_weights else [])
    with draft.placing(before=node, like=node, step="a", round=exchange.round):
        request = draft.call("request", parts["request"], *node.args)
        counts = draft.call("counts", parts["counts"], request)
        received = _transfer(draft, "counts", counts, three, three, "world")
        sizes = draft.call("sizes", parts["sizes"], received, counts)
        buffers: dict[str, fx.Node] = {}
        starts = []
        for kind in kinds:
            payload = draft.function(f"{kind}_sent", getattr, request, kind)
            if kind == "lengths":
                payload = draft.call("lengths_pack", Pack(), payload)
            out_splits = draft.function(f"{kind}_out", getattr, sizes, f"{kind}_out")
            in_splits = draft.function(f"{kind}_in", getattr, sizes, f"{kind}_in")
            starts.append((kind, draft.function(f"{kind}_all_to_all", ALL_TO_ALL, payload, out_splits, in_splits, "world")))
        for kind, sent in starts:
            buffers[kind] = draft.function(f"{kind}_wait", WAIT, sent)
        routed = draft.call("unpack_ids", parts["unpack"], buffers["lengths"], buffers["values"], buffers.get("weights"), sizes)
    node.replace_all_uses_with(routed)
    draft.erase(node)


def _overlap(draft: Draft) -> None:
    """Run what leads to the last collective first, then what does not need its result, then the rest.

    Order inside each of the three groups is kept. Dense layers that do not need embeddings thereby stand between the start of
    the peer exchange and its wait. A node that draws random numbers or writes to its input never changes places with another
    that it could be told apart from.
    """
    graph = draft.graph
    starts = [node for node in graph.nodes if node.target is ALL_TO_ALL]
    if not starts:
        return
    last = starts[-1]
    leading = closure([last])
    waiting = closure(list(last.users), users=True)
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    (output,) = [n for n in graph.nodes if n.op == "output"]
    effects = {n: effect for n in nodes if (effect := effect_of(draft, n))}
    _lead_with_effects(nodes, leading, effects)
    _wait_with_effects(nodes, leading, waiting, effects)
    ordered = [n for n in nodes if n in leading]
    ordered += [n for n in nodes if n not in leading and n not in waiting]
    ordered += [n for n in nodes if n in waiting]
    for node in ordered:
        output.prepend(node)


def _lead_with_effects(nodes: list[fx.Node], leading: set[fx.Node], effects: dict[fx.Node, str]) -> None:
    """Nothing may be overtaken by a leading node with an effect, nor a node that writes by any leading node."""
    last = max(index for index, n in enumerate(nodes) if n in leading)
    places = [i for i, n in enumerate(nodes[: last + 1]) if n in effects and (n in leading or effects[n] == "writes")]
    if places:
        leading.update(nodes[: places[-1] + 1])


def _wait_with_effects(nodes: list[fx.Node], leading: set[fx.Node], waiting: set[fx.Node], effects: dict[fx.Node, str]) -> None:
    """No node may overtake a waiting node with an effect, and no node that writes may overtake a waiting node."""
    some = barrier = False
    for node in nodes:
        if node in leading:
            continue
        if barrier or (some and effects.get(node) == "writes") or any(used in waiting for used in node.all_input_nodes):
            waiting.add(node)
        if node in waiting:
            some = True
            barrier = barrier or node in effects
