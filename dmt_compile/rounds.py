"""Which lookups one set of exchanges can serve."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from .lookups import LookupSet


def in_rounds(graph: fx.Graph, lookups: LookupSet) -> LookupSet:
    """Give every lookup its round of exchanges: behind those that its ids depend on, and apart from those of other units.

    The first round is that of lookups which need no other and make a row per sample; there may be none.
    """
    calls = {output.inner[0] if output.inner else output.node for output in lookups.outputs}
    # How many lookups, one behind the other, lead to a node.
    depth: dict[str, int] = {}
    for node in graph.nodes:
        behind = max((depth[used.name] for used in node.all_input_nodes), default=0)
        depth[node.name] = behind + (node.name in calls)
    first = (0, "sample", ())
    keys = []
    for source in lookups.sources:
        own = max(depth[name] for name in source.nodes)
        keys.append((own, source.unit, () if source.unit == "sample" else source.nodes))
    # A stable sort: rounds of one depth keep the order in which the model makes their lookups.
    order = [first, *sorted({key: None for key in keys if key != first}, key=lambda key: key[0])]
    number = {key: index for index, key in enumerate(order)}
    sources = tuple(replace(source, round=number[key]) for source, key in zip(lookups.sources, keys, strict=True))
    return replace(lookups, sources=sources)
