"""The contract of a pass: what it requires of a stage, the rewrite, and what it ensures of the result. Both are checked."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx, nn

from dmt_compile.errors import PassError, at
from dmt_compile.graphs import EXTRAS, copy_graph, extras_of, graph_module_over
from dmt_compile.stage import PASS, STEP, Stage

Condition = Callable[[Stage], None]


class Draft:
    """A copy of a stage's graph while a pass rewrites it. Nodes and modules are added through it, with their provenance."""

    def __init__(self, stage: Stage, pass_name: str) -> None:
        self.stage = stage
        self.graph = copy_graph(stage.graph)
        self.extras = extras_of(stage.graph_module)
        self.pass_name = pass_name
        self._step = ""
        self._prefix = ""
        self._like: fx.Node | None = None

    def module(self, node: fx.Node) -> nn.Module:
        """The module that a ``call_module`` node of the draft calls."""
        target = str(node.target)
        if target.startswith(f"{EXTRAS}."):
            return self.extras[target[len(EXTRAS) + 1 :]]
        return self.stage.root.get_submodule(target)

    def calls(self, kind: type[nn.Module]) -> list[fx.Node]:
        """All ``call_module`` nodes of a kind of module, in graph order."""
        return [n for n in self.graph.nodes if n.op == "call_module" and isinstance(self.module(n), kind)]

    @contextmanager
    def placing(self, before: fx.Node, like: fx.Node, step: str, round: int = 0) -> Iterator[None]:
        """Insert before a node; new nodes take the user's line from ``like`` and note which step they implement.

        Nodes and modules of every ``round`` of exchanges but the first get its number into their names.
        """
        previous = self._step, self._like, self._prefix
        self._step, self._like, self._prefix = step, like, f"round_{round}_" if round else ""
        try:
            with self.graph.inserting_before(before):
                yield
        finally:
            self._step, self._like, self._prefix = previous

    def call(self, name: str, module: nn.Module, *args: Any) -> fx.Node:
        """Add ``module`` as ``dmt.<name>`` and a node of that name that calls it."""
        name = self._prefix + name
        self.extras[name] = module
        return self._mark(self.graph.create_node("call_module", f"{EXTRAS}.{name}", args, {}, name=name))

    def function(self, name: str, target: Callable[..., Any], *args: Any) -> fx.Node:
        """Add a node that calls a function."""
        return self._mark(self.graph.create_node("call_function", target, args, {}, name=self._prefix + name))

    def _mark(self, node: fx.Node) -> fx.Node:
        node.meta[PASS] = self.pass_name
        node.meta[STEP] = self._step
        if self._like is not None:
            node.stack_trace = self._like.stack_trace
            for key in ("nn_module_stack", "custom"):
                if key in self._like.meta:
                    node.meta[key] = self._like.meta[key]
        return node

    def erase(self, node: fx.Node) -> None:
        """Remove a node that nothing uses, and its module if a pass had added it."""
        target = str(node.target)
        self.graph.erase_node(node)
        if node.op == "call_module" and target.startswith(f"{EXTRAS}."):
            del self.extras[target[len(EXTRAS) + 1 :]]

    def finish(self, name: str) -> Stage:
        """The rewritten stage."""
        stage = self.stage
        module = graph_module_over(stage.root, self.graph, self.extras, f"{name.capitalize()}Stage")
        return Stage(name, module, stage.root, stage.lookups, stage.plan, stage.vectors)


@dataclass(frozen=True)
class GraphPass(abc.ABC):
    """A rewrite from one stage to the next.

    ``requires`` is checked on the input, ``ensures`` on the result; each condition raises :class:`PassError`, which gets the
    name of the pass and, as a note, the graph it was found in.
    """

    name: ClassVar[str]
    takes: ClassVar[tuple[str, ...]]
    makes: ClassVar[str]
    requires: ClassVar[tuple[Condition, ...]] = ()
    ensures: ClassVar[tuple[Condition, ...]] = ()

    def applies(self, stage: Stage) -> bool:
        """Whether the pipeline is to run this pass on a stage, or to go on to the next one."""
        return True

    @abc.abstractmethod
    def rewrite(self, draft: Draft) -> None:
        """Change the draft in place."""

    def apply(self, stage: Stage) -> Stage:
        """Check, rewrite, check.

        Raises:
            PassError: a condition does not hold.
        """
        if stage.name not in self.takes:
            raise PassError(f"pass '{self.name}' takes stage {' or '.join(map(repr, self.takes))}, got '{stage.name}'")
        self._check(self.requires, stage, "requires")
        draft = Draft(stage, self.name)
        self.rewrite(draft)
        result = draft.finish(self.makes)
        self._check((well_formed, *self.ensures), result, "ensures")
        return result

    def _check(self, conditions: tuple[Condition, ...], stage: Stage, when: str) -> None:
        for condition in conditions:
            try:
                condition(stage)
            except PassError as error:
                error.add_note(f"(what pass '{self.name}' {when}, on stage '{stage.name}')")
                raise


def well_formed(stage: Stage) -> None:
    """The graph is topologically sorted, returns something, and every module it calls exists."""
    outputs = 0
    seen: set[fx.Node] = set()
    for node in stage.graph.nodes:
        for used in node.all_input_nodes:
            if used not in seen:
                raise PassError(f"pass '{node.meta.get(PASS, 'capture')}': {at(node)} uses '{used.name}' before it is computed")
        seen.add(node)
        outputs += node.op == "output"
        if node.op == "call_module":
            try:
                stage.module(node)
            except AttributeError:
                raise PassError(f"{at(node)} calls module '{node.target}', which does not exist") from None
    if outputs != 1:
        raise PassError(f"stage '{stage.name}' has {outputs} output nodes, one is needed")
