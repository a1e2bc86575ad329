"""What a compilation keeps: the captured model, what is known of it, the plan, and the stages of both modes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from .analysis import Analysis
from .capture import Captured
from .graphs import copy_graph, extras_of, graph_module_over
from .observe import Inputs
from .plan import TowerPlan
from .stage import Stage

if TYPE_CHECKING:
    from .interactions import Interaction
    from .towers.model import TowerModel


def few(inputs: Inputs | None, analyses: Mapping[bool, Analysis]) -> Any:
    """A few samples of the example inputs, None if there are none."""
    from .interactions import few_samples

    return few_samples(*inputs, analyses[True].layout) if inputs is not None else None


@dataclass(frozen=True)
class Compilation:
    """Analyses and stages are kept by mode (True: training); where the graph does not depend on it, both are the same."""

    captured: Captured
    analyses: Mapping[bool, Analysis]
    plan: TowerPlan
    stages: Mapping[bool, Mapping[str, Stage]]
    # A few samples of the example inputs, and by mode what was found with them.
    sample: Any = None
    tower_model: TowerModel | None = None
    interactions: dict[bool, tuple[Interaction, ...]] = field(default_factory=dict)

    @property
    def analysis(self) -> Analysis:
        """The one for the mode that the model is in."""
        return self.analyses[self.program.root.training]

    @property
    def program(self) -> Captured:
        """What the program computes: the flat model, or the tower model."""
        return self.captured if self.tower_model is None else self.tower_model.captured


def stages_by_mode(
    captured: Captured, analyses: Mapping[bool, Analysis], plan: TowerPlan, made: TowerModel | None
) -> Mapping[bool, Mapping[str, Stage]]:
    """All stages by mode, by name and in order; with a tower model, the flat graph and then those of the tower model."""
    from dmt_compile.passes.pipeline import run

    def stages(mode: bool) -> Mapping[str, Stage]:
        flat = Stage("flat", captured.graphs[mode], captured.root, analyses[mode].lookups, plan)
        if made is None:
            return run(flat)
        model = Stage("model", made.captured.graphs[mode], made.captured.root, analyses[mode].lookups, plan, made.vectors)
        return {"flat": flat, **run(model)}

    training = stages(True)
    return {True: training, False: training if captured.graphs[False] is captured.graphs[True] else stages(False)}


def recaptured(captured: Captured, root: nn.Module) -> Captured:
    """The captured graphs over another clone of the module tree."""
    made: dict[int, fx.GraphModule] = {}
    for flat in captured.graphs.values():
        if id(flat) not in made:
            made[id(flat)] = graph_module_over(root, copy_graph(flat.graph), extras_of(flat), type(flat).__name__)
    graphs = {mode: made[id(flat)] for mode, flat in captured.graphs.items()}
    return Captured(graphs, root, captured.leaves, captured.front_end)
