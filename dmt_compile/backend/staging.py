"""From one of Dynamo's graphs to the graph that is compiled in its place."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx, nn

from ..errors import CaptureError
from ..lookups import LookupSet
from ..stage import Stage
from ..topology import Topology
from .lift import Lifted, lift
from .modes import refuse_lookups_in_modes, refuse_moved
from .one_device import by_towers
from .options import Options
from .owners import Ranks, plan_for
from .records import find_lookups
from .rewrite import Rewritten, rewritten
from .start import topology_of

logger = logging.getLogger("dmt_compile")


@dataclass
class Counted:
    """How many graphs the backend was given since the process began, and what became of them."""

    rewritten: int = 0
    others: int = 0


counted = Counted()


@dataclass(frozen=True)
class Staged:
    """One of Dynamo's graphs: with its parameters in a module tree, its lookups, and the stages of those that owners serve."""

    lifted: Lifted
    lookups: LookupSet
    replicated: Mapping[str, str]
    stages: Mapping[str, Stage]


def staged(
    module: fx.GraphModule,
    ranks: Ranks | None,
    options: Options,
    topology: Topology,
    model: nn.Module | None = None,
    alone: bool = False,
) -> Staged:
    """Find the lookups of a graph and run the passes on it; no stages where it has none.

    Tables that graphs of the same ``ranks`` have given an owner keep it, and those that they use otherwise stay on every rank.
    """
    lifted = lift(module)
    held = {name: lifted.root.get_parameter(name) for _, name in lifted.arguments if name is not None}
    keep = {name: ranks.kept.get(one, _OTHERWISE) for name, one in held.items() if one in ranks.used} if ranks is not None else {}
    lookups, replicated = find_lookups(lifted.flat, keep, alone)
    if not lookups.lookups:
        return Staged(lifted, lookups, replicated, {})
    from dmt_compile.passes.pipeline import run

    nodes = {node.name: node for node in lifted.flat.graph.nodes}
    refuse_lookups_in_modes(lifted.flat.graph, [nodes[output.node] for output in lookups.outputs])
    known = {table.name: ranks.owned(held[table.parameter]) for table in lookups.tables} if ranks is not None else {}
    load = ranks.load_of(model) if ranks is not None else []
    owners = {name: rank for name, rank in known.items() if rank is not None}
    plan = plan_for(lookups, owners, load, (topology, options.towers, options.partition))
    stages = run(Stage("flat", lifted.flat, lifted.root, lookups, plan))
    for name in ("towers", "lowered"):
        refuse_moved(lifted.flat.graph, stages[name].graph)
    return Staged(lifted, lookups, replicated, stages)


_OTHERWISE = "another graph, compiled before, uses it otherwise"


def one_device_graph(module: fx.GraphModule, options: Options) -> fx.GraphModule:
    """The graph that the inner backend is to compile where there is one rank: with the lookups of all towers, tower by tower.

    The towers are those of ``options.topology``, so that a job's plan can be tried in one process; one tower by default.
    """
    made = staged(module, None, options, topology_of(options), alone=True)
    if not made.stages:
        counted.others += 1
        return module
    counted.rewritten += 1
    return by_towers(module, made.lifted, made.stages["towers"])


def rank_graph(module: fx.GraphModule, options: Options, ranks: Ranks, model: nn.Module | None) -> Rewritten:
    """The graph that the inner backend is to compile on a rank of a process group; ``model`` is what the graph is a part of."""
    made = staged(module, ranks, options, topology_of(options), model)
    root, lookups = made.lifted.root, made.lookups
    tables = {table.parameter for table in lookups.tables}
    others = {name: root.get_parameter(name) for _, name in made.lifted.arguments if name is not None and name not in tables}
    for name, parameter in others.items():
        if ranks.owned(parameter) is not None:
            raise CaptureError(
                f"table '{name}' is looked up in one graph and used otherwise in another, where only its owner would have it: use "
                "it in one graph (dmt_compile.explain names the graph break between them), then it stays on every rank"
            )
        ranks.used[parameter] = True
        if name in made.replicated:
            ranks.kept[parameter] = made.replicated[name]
    if not made.stages:
        counted.others += 1
        return Rewritten(module, parameters=_placed(made.lifted, {}))
    lowered = made.stages["lowered"]
    result = rewritten(module, made.lifted, lowered, ranks)
    owners = {lookups.table[name].parameter: rank for rank, names in enumerate(lowered.plan.tables_of_rank) for name in names}
    for name, rank in owners.items():
        ranks.give(root.get_parameter(name), rank)
    counted.rewritten += 1
    logger.info("graph with %d lookups of %d tables rewritten", len(lookups.lookups), len(lookups.tables))
    for name, why in made.replicated.items():
        logger.info("table %s stays on every rank: %s", name, why)
    return replace(result, parameters=_placed(made.lifted, owners))


def _placed(lifted: Lifted, owners: Mapping[str, int]) -> tuple[tuple[int, int | None], ...]:
    return tuple((place, owners.get(name)) for place, (_, name) in enumerate(lifted.arguments) if name is not None)
