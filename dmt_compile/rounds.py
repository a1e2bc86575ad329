"""Which lookups one set of exchanges can serve."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from .lookups import IdSource, LookupSet
from .shapes import SHAPE

# In a round whose rows are ids or bags, a rank's batch size is that of its lookup with the most of them, and the others send empty
# bags for the rest, each with a row of zeros on its way back. A lookup that has at least half as many as the longest wastes less
# than it moves. In return for that, a round of its own (five collectives, each as slow as its slowest rank) is saved.
_MOST_TIMES_AS_MANY = 2


def in_rounds(graph: fx.Graph, lookups: LookupSet) -> LookupSet:
    """Give every lookup its round of exchanges: behind those that its ids depend on, and apart from those of other units.

    The first round is that of lookups which need no other and make a row per sample; there may be none. Of those that make a row
    per id or bag, the ones with about as many of them share a round; where the data decides the number, those do whose ids come
    out of one jagged input. Examples of other ranks have other such data, and all ranks must come to the same rounds.
    """
    calls = {output.inner[0] if output.inner else output.node for output in lookups.outputs}
    # How many lookups, one behind the other, lead to a node.
    depth: dict[str, int] = {}
    nodes: dict[str, fx.Node] = {}
    for node in graph.nodes:
        behind = max((depth[used.name] for used in node.all_input_nodes), default=0)
        depth[node.name] = behind + (node.name in calls)
        nodes[node.name] = node
    depths = [max(depth[name] for name in source.nodes) for source in lookups.sources]
    alike: dict[int, dict[float, float]] = {}
    for own in set(depths):
        here = (source.per_sample for source, other in zip(lookups.sources, depths, strict=True) if other == own)
        alike[own] = _together(size for size in here if size is not None)
    first = (0, "sample", ())
    keys: list[tuple[int, str, object]] = []
    for own, source in zip(depths, lookups.sources, strict=True):
        if source.unit == "sample":
            keys.append((own, "sample", ()))
        elif source.per_sample is None:
            keys.append((own, source.unit, _origin(nodes, source)))
        else:
            keys.append((own, "", alike[own][source.per_sample]))
    # A stable sort: rounds of one depth keep the order in which the model makes their lookups.
    order = [first, *sorted({key: None for key in keys if key != first}, key=lambda key: key[0])]
    number = {key: index for index, key in enumerate(order)}
    sources = tuple(replace(source, round=number[key]) for source, key in zip(lookups.sources, keys, strict=True))
    return replace(lookups, sources=sources)


def _together(sizes: Iterable[float]) -> dict[float, float]:
    """For each size the largest of those that share its round."""
    found: dict[float, float] = {}
    largest = 0.0
    for size in sorted(set(sizes), reverse=True):
        if size * _MOST_TIMES_AS_MANY < largest or not found:
            largest = size
        found[size] = largest
    return found


def _origin(nodes: dict[str, fx.Node], source: IdSource) -> tuple[str, ...]:
    """What ids are taken out of that is no tensor, such as a KeyedJaggedTensor; the nodes themselves if there is no such thing."""
    origin, node = source.nodes, nodes[source.node]
    while len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
        if SHAPE in node.meta or node.op == "placeholder":
            break
        origin = (node.name,)
    return origin
