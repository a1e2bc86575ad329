"""What ``backend="dmt"`` would make of a model: Dynamo's graphs, their stages, the differences, and why there is more than one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from ..graphs import clone_sharing_tensors, deepcopy_values
from ..render.diff import StageDiff, diff_stages
from ..topology import Topology
from .options import Options
from .staging import Staged, staged


@dataclass(frozen=True)
class Break:
    """Where Dynamo ends a graph, and why."""

    reason: str
    location: str


@dataclass(frozen=True)
class Explanation:
    """The graphs that Dynamo makes of a model, in the order in which they run, and what the backend makes of each.

    ``graphs[i].stages`` has the stages "flat" (Dynamo's graph) to "lowered" by name; it is empty for a graph without lookups,
    which goes to the inner backend as it is. ``breaks`` says why there is more than one graph.
    """

    graphs: tuple[Staged, ...]
    breaks: tuple[Break, ...]

    @property
    def rewritten(self) -> int:
        """How many graphs have lookups that owners serve."""
        return sum(bool(graph.stages) for graph in self.graphs)

    def diff(self, index: int, before: str = "flat", after: str = "sptt") -> StageDiff:
        """What changed between two stages of a graph.

        Raises:
            PlanError: the graph has no stages, or none of that name.
        """
        stages = self.graphs[index].stages
        for name in (before, after):
            if name not in stages:
                raise PlanError(f"graph {index} has no stage {name!r}; it has {', '.join(stages) or 'none: it has no lookups'}")
        return diff_stages(stages[before], stages[after])

    def __str__(self) -> str:
        others = len(self.graphs) - self.rewritten
        lines = [
            f"{len(self.graphs)} graph{'s' * (len(self.graphs) != 1)} of Dynamo's: {self.rewritten} with lookups that owners "
            f"serve, {others} that go{'es' * (others == 1)} to the inner backend as {'it is' if others == 1 else 'they are'}; "
            f"{len(self.breaks)} graph break{'s' * (len(self.breaks) != 1)}"
        ]
        if not self.graphs:
            lines += ["", "Dynamo leaves forward to Python as a whole (a recurrent layer does that); fullgraph=True says why"]
        for number, one in enumerate(self.breaks):
            lines += ["", f"break {number}: {one.location}", *(f"  {line}" for line in one.reason.strip().splitlines())]
        for number, graph in enumerate(self.graphs):
            lines += ["", f"graph {number}, as Dynamo gives it", _listed(graph)]
            lines += [f"table {name} stays on every rank: {why}" for name, why in graph.replicated.items()]
            if graph.stages:
                lines += ["", f"graph {number}, as it is compiled on every rank", _text(graph.stages["lowered"].graph)]
                lines += ["", f"graph {number}, the difference", str(self.diff(number))]
        return "\n".join(lines)


def _listed(graph: Staged) -> str:
    return _text(graph.lifted.flat.graph)


def _text(graph: torch.fx.Graph) -> str:
    return "\n".join(f"  {line.strip()}" for line in str(graph).splitlines()[1:])


def explain(
    model: nn.Module,
    *inputs: Any,
    topology: Topology,
    towers: int | None = None,
    partition: str = "balanced",
    **kwargs: Any,
) -> Explanation:
    """What ``torch.compile(model, backend="dmt")`` makes of a model on these inputs, without ranks: print the result.

    A clone of the model runs once, under Dynamo, in the mode that the model is in; parameters are shared and not changed.

    Args:
        inputs: one batch, as forward takes it; ``kwargs`` are further arguments of forward.
        topology: hosts and ranks per host, as of the job that is to be run.
        towers: as the option of the backend; so is ``partition``.

    Raises:
        PlanError: ``topology``, ``towers`` or ``partition`` does not fit.
    """
    from torch._dynamo.backends.debugging import ExplainWithBackend

    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.Module):
        raise PlanError(f"explain takes a module, got {type(model).__name__}: give it the module whose forward is to be compiled")
    if not isinstance(topology, Topology):
        raise PlanError(f"topology must be a dmt_compile.Topology, got {type(topology).__name__}")
    options = Options.of({"topology": topology, "towers": towers, "partition": partition, "inner": "eager"})
    found: list[Staged] = []

    def collect(module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        found.append(staged(module, None, options, topology))
        return module.forward

    torch._dynamo.reset()
    try:
        watched = ExplainWithBackend(collect)
        args, given = deepcopy_values((inputs, kwargs))
        clone = clone_sharing_tensors(model, copy_buffers=True)
        with torch.random.fork_rng(devices=[]):
            torch.compile(clone, backend=watched)(*args, **given)
        breaks = [Break(str(one.reason), _place(one.user_stack)) for one in watched.output().break_reasons if one.graph_break]
    finally:
        torch._dynamo.reset()
    return Explanation(tuple(found), tuple(breaks))


def _place(stack: Sequence[Any]) -> str:
    return f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "unknown"
