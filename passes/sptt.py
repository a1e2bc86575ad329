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
    takes: ClassVar[str] = "classic"
    makes: ClassVar[str] = "sptt"
    ensures = (check_layout,)

    def rewrite(self, draft: Draft) -> None:
        lookups, plan = draft.stage.lookups, draft.stage.plan
        for node in draft.calls(ExchangeRows):
            _rewrite_exchange(draft, node)
        # Columns now arrive tower by tower, each tower's ranks side by side.
        per_rank = plan.lookups_of_rank(lookups)
        arrival = [[x.name for rank in tower.ranks for x in per_rank[rank]] for tower in plan.towers]
        for node in draft.calls(RestoreColumns):
            draft.extras[str(node.target).partition(".")[2]] = RestoreColumns(lookups, arrival)
            node.meta = {**node.meta, PASS: self.name}


def _rewrite_exchange(draft: Draft, node: fx.Node) -> None:
    module = draft.module(node)
    assert isinstance(module, ExchangeRows)
    exchange = module.exchange
    pooled, sizes = node.args
    inside = replace(exchange, axis="tower")
    with draft.placing(before=node, like=node, step="c"):
        permuted = draft.call("permute", PeerPermute(inside.source(0).rows), pooled, sizes)
    with draft.placing(before=node, like=node, step="d"):
        tower = draft.call("exchange_tower", ExchangeRows(inside), permuted, sizes)
    with draft.placing(before=node, like=node, step="e"):
        shuffled = draft.call("shuffle", Shuffle(), tower)
    with draft.placing(before=node, like=node, step="g"):
        received = draft.call("exchange_peer", ExchangeRows(replace(exchange, axis="peer")), shuffled, sizes)
    node.replace_all_uses_with(received)
    draft.erase(node)
