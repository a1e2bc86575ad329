"""classic -> sptt: the global exchange as peer permute, intra-tower exchange, shuffle, peer exchange (section 3.1).

received = exchange_world(pooled)  ==>  permuted = dmt.permute(pooled)              # step c
                                        tower    = dmt.exchange_tower(permuted)     # step d, inside the tower
                                        shuffled = dmt.shuffle(tower)               # step e
                                        received = dmt.exchange_peer(shuffled)      # step g, between towers
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from dmt_compile.runtime.pooled import ExchangeRows, PeerPermute, RestoreColumns, Shuffle
from dmt_compile.stage import PASS
from dmt_compile.verify.layout import check_layout

from .base import Draft, GraphPass


@dataclass(frozen=True)
class Sptt(GraphPass):
    name: ClassVar[str] = "sptt"
    takes: ClassVar[tuple[str, ...]] = ("classic",)
    makes: ClassVar[str] = "sptt"
    ensures = (check_layout,)

    def rewrite(self, draft: Draft) -> None:
        plan = draft.stage.plan
        for node in draft.calls(ExchangeRows):
            _rewrite_exchange(draft, node)
        # Columns now arrive tower by tower, each tower's ranks side by side.
        for node in draft.calls(RestoreColumns):
            module = draft.module(node)
            assert isinstance(module, RestoreColumns)
            per_rank = plan.lookups_of_rank(module.lookups)
            arrival = [[x.name for rank in tower.ranks for x in per_rank[rank]] for tower in plan.towers]
            draft.extras[str(node.target).partition(".")[2]] = RestoreColumns(module.lookups, arrival)
            node.meta = {**node.meta, PASS: self.name}


def _rewrite_exchange(draft: Draft, node: fx.Node) -> None:
    module = draft.module(node)
    assert isinstance(module, ExchangeRows)
    exchange = module.exchange
    pooled, sizes = node.args
    inside = replace(exchange, axis="tower")
    with draft.placing(before=node, like=node, step="c", round=exchange.round):
        permuted = draft.call("permute", PeerPermute(inside.source(0).rows), pooled, sizes)
    with draft.placing(before=node, like=node, step="d", round=exchange.round):
        tower = draft.call("exchange_tower", ExchangeRows(inside), permuted, sizes)
    with draft.placing(before=node, like=node, step="e", round=exchange.round):
        shuffled = draft.call("shuffle", Shuffle(), tower)
    with draft.placing(before=node, like=node, step="g", round=exchange.round):
        received = draft.call("exchange_peer", ExchangeRows(replace(exchange, axis="peer")), shuffled, sizes)
    node.replace_all_uses_with(received)
    draft.erase(node)
