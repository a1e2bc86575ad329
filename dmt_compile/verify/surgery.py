"""Parts of a stage's own graph for a check: cut off behind a node, or with the modules that carry a dtype made wide."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ..errors import VerificationError, at
from ..graphs import copy_graph, extras_of, graph_module_over
from ..lookups import Lookup
from ..runtime.ids import GlobalBags, RouteIds, UnpackIds
from ..runtime.pooled import MakeOutput, RestoreColumns
from ..runtime.select import Bag, LocalBags
from ..runtime.tables import RankLookups, TowerLookups
from ..runtime.tower_rows import ReplacedOutput, TowerColumns
from ..runtime.vectors import FlatColumns, TakeVectors
from ..stage import PASS, Stage
from .cluster import GIVEN


def cut_at(stage: Stage, kind: type[nn.Module]) -> Stage:
    """The stage's graph up to the nodes that call a module of ``kind``, one per round, whose values become the output, a list."""
    return _cut(stage, lambda nodes: [n for n in nodes if n.op == "call_module" and isinstance(stage.module(n), kind)])


def cut_at_names(stage: Stage, names: Sequence[str]) -> Stage:
    """The stage's graph up to the nodes called ``names``, whose values become the output, a list."""
    return _cut(stage, lambda nodes: [node for name in names for node in nodes if node.name == name])


def cut_at_outputs(stage: Stage, given: Sequence[str] = ()) -> Stage:
    """The stage's graph up to what the flat model's lookups return, a list of them in declaration order.

    The nodes called ``given`` are not computed: their values come from outside, see :func:`simulate`.
    """
    made = made_outputs(stage)
    return _cut(stage, lambda nodes: [node for name in made.values() for node in nodes if node.name == name], given)


def with_given(stage: Stage, given: Sequence[str]) -> Stage:
    """The stage's whole graph, but what reads the nodes called ``given`` gets values from outside, see :func:`simulate`."""
    graph = copy_graph(stage.graph)
    _give(graph, given, ())
    return replace(stage, graph_module=graph_module_over(stage.root, graph, extras_of(stage.graph_module), "Given"))


def _give(graph: fx.Graph, given: Sequence[str], except_to: Sequence[fx.Node]) -> None:
    for node in list(graph.nodes):
        if node.name in given:
            with graph.inserting_before(node):
                outside = graph.call_function(_given)
            outside.meta[GIVEN] = node.name
            node.replace_all_uses_with(outside, delete_user_cb=lambda user: user not in except_to)


def made_outputs(stage: Stage) -> dict[str, str]:
    """The name of the node that stands for each lookup call of the flat model, by that call's name, in declaration order.

    A call of which towers' modules have taken all columns, and nothing else needs any, is left out.

    Raises:
        VerificationError: a lookup's value is made by no node or by several.
    """
    made: dict[str, str] = {}
    for node in stage.graph.nodes:
        if node.op == "call_module" and isinstance(module := stage.module(node), MakeOutput):
            if module.output.node in made:
                raise VerificationError(f"stage '{stage.name}': {at(node)} makes '{module.output.node}' a second time")
            made[module.output.node] = node.name
    taken = {name for one in stage.vectors for name in one.lookups} if modules_moved(stage) else set()
    for output in stage.lookups.outputs:
        if output.node not in made and not set(output.lookups) <= taken:
            raise VerificationError(f"stage '{stage.name}': no node makes the output of the lookup '{output.node}'")
    return {output.node: made[output.node] for output in stage.lookups.outputs if output.node in made}


def modules_moved(stage: Stage) -> bool:
    """Whether towers' modules run among the exchanges, and not on the values of the model's lookups."""
    return any(node.op == "call_module" and isinstance(stage.module(node), TowerColumns) for node in stage.graph.nodes)


def _cut(stage: Stage, choose: Callable[[Sequence[fx.Node]], Any], given: Sequence[str] = ()) -> Stage:
    graph = copy_graph(stage.graph)
    (output,) = [n for n in graph.nodes if n.op == "output"]
    output.args = (choose(list(graph.nodes)),)
    _give(graph, given, (output,))
    needed, stack = {output}, [output]
    while stack:
        for used in stack.pop().all_input_nodes:
            if used not in needed:
                needed.add(used)
                stack.append(used)
    for n in reversed(list(graph.nodes)):
        if n not in needed and n.op != "placeholder":
            graph.erase_node(n)
    module = graph_module_over(stage.root, graph, extras_of(stage.graph_module), "Cut")
    return replace(stage, graph_module=module)


def _given() -> Any:
    raise VerificationError("the value of a node that is given from outside is missing")


def refuse_other_layers(stage: Stage, flat: Stage) -> None:
    """Check that a stage consists of the flat model's nodes, with its arguments, and of what passes put in the lookups' place.

    Raises:
        VerificationError: a node of the flat model is missing, or computes something else or from something else.
    """
    calls = made_outputs(stage)
    inner = {name for output in stage.lookups.outputs for name in output.inner}
    mine = {node.name: node for node in stage.graph.nodes}
    if modules_moved(stage):
        inner |= _moved_away(stage, flat)

    def named(node: fx.Node, names: dict[str, str]) -> tuple[Any, ...]:
        args = fx.node.map_arg((node.args, node.kwargs), lambda used: _Name(names.get(used.name, used.name)))
        return (node.op, node.target, args)

    for node in flat.graph.nodes:
        if node.name in calls or node.name in inner:
            continue
        found = mine.get(node.name)
        if found is None:
            # A weight that only a lookup reads goes with it.
            if node.op != "get_attr" or any(user.name not in calls and user.name not in inner for user in node.users):
                raise VerificationError(f"stage '{stage.name}': {at(node)} of the flat model is missing")
        elif named(found, {}) != named(node, calls):
            raise VerificationError(
                f"pass '{found.meta.get(PASS, 'capture')}', stage '{stage.name}': {at(found)} is not computed as in the flat model"
            )


def _moved_away(stage: Stage, model: Stage) -> set[str]:
    """The nodes of a tower model that the layout check answers for, because a pass has moved what they do."""
    names = {output.node for output in model.lookups.outputs} - set(made_outputs(stage))
    targets = {one.target for one in model.vectors}
    replaced = {
        node.name for node in stage.graph.nodes if node.op == "call_module" and isinstance(stage.module(node), ReplacedOutput)
    }
    for node in model.graph.nodes:
        if node.op == "call_module" and (node.target in targets or isinstance(model.module(node), TakeVectors | FlatColumns)):
            names.add(node.name)
    return names | replaced


class _Name(str):
    """The name of a node, told apart from a plain string."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Name) and str.__eq__(self, other)

    __hash__ = str.__hash__


def widened(stage: Stage) -> Stage:
    """The stage's own graph for tables of whole numbers in float64.

    Every node stays. The modules that carry a dtype are copies with float64 in its place, lookups never detach or scale down
    their table, and every id's weight is made whole where it has reached the table.
    """
    graph = copy_graph(stage.graph)
    for node in list(graph.nodes):
        if node.op == "call_module" and (whole := _whole_for(stage.module(node))) is not None:
            with graph.inserting_after(node):
                made = graph.call_function(whole, (node,))
            node.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
    extras = {name: _wide_module(module) for name, module in extras_of(stage.graph_module).items()}
    return replace(stage, graph_module=graph_module_over(stage.root, graph, extras, "Wide"))


def wide_lookup(lookup: Lookup) -> Lookup:
    """The lookup in float64, with a gradient and without side effects on its table."""
    return replace(lookup, dtype=torch.float64, grad=True, max_norm=None)


def _wide_module(module: nn.Module) -> nn.Module:
    wide: Any = copy.copy(module)
    if isinstance(module, RankLookups):
        wide.lookups = tuple(tuple(map(wide_lookup, served)) for served in module.lookups)
        wide.dtype = torch.float64
    elif isinstance(module, TowerLookups):
        wide.lookups = tuple(map(wide_lookup, module.lookups))
    elif isinstance(module, RestoreColumns):
        wide._outputs = [[(*run[:3], torch.float64) for run in runs] for runs in module._outputs]
    else:
        return module
    return wide  # type: ignore[no-any-return]


def _whole_for(module: nn.Module) -> Callable[[Any], Any] | None:
    if isinstance(module, UnpackIds | RouteIds):
        return _whole_weights
    return _whole_bags if isinstance(module, LocalBags) else None


def whole(weights: torch.Tensor) -> torch.Tensor:
    """Weights of ids as whole numbers in float64, zero only where they nearly are."""
    return (weights.detach().double() * 16).round()


def _whole_bags(bags: list[Bag]) -> list[Bag]:
    return [bag if bag.weights is None else bag._replace(weights=whole(bag.weights)) for bag in bags]


def _whole_weights(routed: GlobalBags) -> GlobalBags:
    if routed.weights is None:
        return routed
    return routed._replace(bags=_whole_bags(routed.bags), weights=whole(routed.weights))
