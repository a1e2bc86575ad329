"""Run the compiled program of every rank against the flat model, and say what was equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from ..errors import DmtError, InputError, VerificationError
from ..graphs import clone_sharing_tensors
from ..runtime.ids import MakeRequest
from ..runtime.select import Bag, JaggedIds, ReadIds, split_bags
from ..stage import Stage
from .certificate import Certificate, Check
from .cluster import Inputs, simulate
from .compare import bits_differ, cancellation, excess, furthest, furthest_change, tolerance
from .copies import Copies, Gradients, dense
from .exact import exact_difference, refuse_other_reads
from .layout import check_layout
from .precision import TypesSeen
from .reference import Reference, objectives
from .sizes import SizesSeen, wrong_size
from .surgery import cut_at, cut_at_names, made_outputs, refuse_other_layers, with_given
from .tower_outputs import Columns, by_tower, column_nodes, largest_difference, towers_draw, watch_columns

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def default_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain SGD."""
    return torch.optim.SGD(parameters, lr=0.01)


class Verifier:
    """The checks behind :meth:`TowerProgram.verify`.

    The reference is the user's own forward, or that of the tower model, on every rank's own samples, of which there are ``sizes``;
    the objective is the mean over ranks. ``names`` are those of forward's arguments.
    """

    def __init__(
        self,
        stages: Mapping[str, Stage],
        inputs: Inputs,
        sizes: Sequence[int],
        seed: int,
        names: Sequence[str] = (),
    ) -> None:
        self.stages = stages
        # With tower modules the program is to compute what the tower model does.
        self.moved = "model" in stages
        self.flat = stages["model" if self.moved else "flat"]
        self.plan = self.flat.plan
        self.world = self.plan.topology.world_size
        self.seed = seed
        self._seen = SizesSeen()
        self.inputs = inputs
        self.sizes = tuple(sizes)
        self._model = Reference(self.flat, inputs, self.sizes, seed, names)
        self._reference = "model" if self.moved else "flat"
        self._exchanging = tuple(name for name in _EXCHANGING if name in stages)
        meta = next((name for name, tensor in _state(self.flat.root) if tensor.is_meta), None)
        if meta is not None:
            raise InputError(
                f"'{meta}' is on the meta device and has no values to compare: verify a copy with real values "
                "(smaller tables will do)"
            )

    def certify(self, steps: int, optimizer: OptimizerFactory) -> Certificate:
        """Run every check; one that cannot run because the program is wrong counts as failed, with the error's text.

        Raises:
            InputError: ``steps`` is not a number of steps, or there is nothing to compare on.
        """
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise InputError(f"steps must be a number of optimizer steps, 0 or more, got {steps!r}")
        given: object = optimizer
        if not callable(given):
            kind = type(given).__name__
            raise InputError(f"optimizer must be a function that makes one from parameters, such as torch.optim.Adam, got {kind}")
        self._check_ids()
        if not sum(self.sizes):
            raise InputError("the batch has no samples, on which everything is equal: verify needs at least one sample")
        checks = [
            self._run(
                f"layout, stage {name}",
                "followed through the graph, for any batch sizes",
                partial(self.layout, name),
            )
            for name in self._exchanging
        ]
        expected = self.reference()
        for name in ("towers", *self._exchanging):
            if not self.moved or name not in _MOVED:
                checks.append(self._run(f"outputs, stage {name}", "bit for bit", partial(self.outputs, name, expected)))
        for name in _MOVED if self.moved else ():
            checks.append(self._run(f"outputs, stage {name}", self._other_rows(), partial(self.moved_outputs, name, expected)))
        checks.append(self._run("recorded shapes", "equal at run time", self.recorded_shapes))
        relative = f"within {tolerance(torch.float32):.1e} of the largest (float32): sums change order"
        checks.append(self._run("table gradients, integers", "bit for bit (float64)", self.exact_gradients))
        for name in ("towers", *(_MOVED if self.moved else ("lowered",))):
            title = "gradients" if name == "lowered" else f"gradients, stage {name}"
            checks.append(self._run(title, relative, partial(self.gradients, name)))
        if steps:
            after = f"changes within {tolerance(torch.float32):.1e} of the largest change, and rounding (float32)"
            checks.append(self._run(f"parameters after {steps} steps", after, lambda: self.training(steps, optimizer)))
        subject, reference = type(self.stages["flat"].root).__name__, "tower model" if self.moved else "flat model"
        return Certificate(subject, self.plan.hash, self.sizes, tuple(checks), reference)

    def _check_ids(self) -> None:
        """Let every rank look at its ids, so that a bad batch is refused by name and not by the flat model."""
        requests = cut_at(self.stages["lowered"], MakeRequest)
        roots = [clone_sharing_tensors(requests.root, copy_buffers=True) for _ in range(self.world)]
        with torch.no_grad():
            simulate(requests, self.inputs, roots, self.seed)

    @staticmethod
    def _run(name: str, how: str, check: Callable[[], tuple[bool, str]]) -> Check:
        try:
            passed, found = check()
        except DmtError as error:
            return Check(name, False, how, str(error))
        return Check(name, passed, how, found)

    def layout(self, name: str) -> tuple[bool, str]:
        check_layout(self.stages[name])
        return True, f"{self.world} ranks, {len(self.flat.lookups.lookups)} lookups"

    def reference(self) -> list[Any]:
        """The user's forward on every rank's samples."""
        copies = self._copies()
        with torch.no_grad():
            return self._model.outputs(copies)

    def outputs(self, name: str, expected: Sequence[Any]) -> tuple[bool, str]:
        copies = self._copies()
        with torch.no_grad():
            found = simulate(self.stages[name], self.inputs, copies.roots, self.seed, watch=self._seen.watch(name))
        for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            difference = bits_differ(mine, theirs)
            if difference is not None:
                return False, f"rank {rank}: {difference}"
        return True, f"equal on {self.world} ranks"

    def _other_rows(self) -> str:
        still = ", dropout in towers off" if self._towers_draw else ""
        return (
            f"tower columns within {tolerance(torch.float32):.1e} of the largest (float32{still}): towers multiply more rows at "
            "once, sums change order; the rest bit for bit, given the model's tower columns"
        )

    def moved_outputs(self, name: str, expected: Sequence[Any]) -> tuple[bool, str]:
        """What towers' modules make on the rows of peers, to a tolerance; and what is made of that, bit for bit."""
        stage = self.stages[name]
        refuse_other_layers(stage, self.flat)
        found: Columns = [{} for _ in range(self.world)]
        with torch.no_grad():
            watch = watch_columns(stage, found, self._seen.watch(name))
            outputs = simulate(stage, self.inputs, self._copies().roots, self.seed, watch=watch)
            given = with_given(stage, column_nodes(stage))
            exact = simulate(given, self.inputs, self._copies().roots, self.seed, self._tower_columns)
        for rank, (mine, theirs) in enumerate(zip(exact, expected, strict=True)):
            difference = bits_differ(mine, theirs)
            if difference is not None:
                return False, f"rank {rank}, given the model's tower columns: {difference}"
        for rank, (own, its) in enumerate(zip(found, self._tower_columns, strict=True)):
            shapes = [{key: tuple(value.shape) for key, value in one.items()} for one in (own, its)]
            if shapes[0] != shapes[1]:
                return False, f"rank {rank}: the towers make columns {shapes[0]}, in the model {shapes[1]}"
        worst, where = furthest(by_tower(found), by_tower(self._tower_columns))
        off = largest_difference(outputs, expected)
        told = f"{self.world} ranks, {worst:.2g} of the tolerance; outputs off by {off:.1e}"
        return worst <= 1, told + (f" ('{where}')" if where else "")

    @cached_property
    def _tower_columns(self) -> Columns:
        """What every tower makes for every rank's samples in the tower model."""
        columns: Columns = [{} for _ in range(self.world)]
        with torch.no_grad():
            simulate(self.flat, self.inputs, self._copies().roots, self.seed, watch=watch_columns(self.flat, columns))
        return columns

    @cached_property
    def _towers_draw(self) -> bool:
        return self.moved and towers_draw(clone_sharing_tensors(self.flat.root, copy_buffers=True), self.flat)

    def _copies(self) -> Copies:
        """A copy of the model to run. Towers' modules that draw random numbers draw none in it: they run on other rows."""
        copies = Copies.of(self.flat.root, self.world)
        for root in copies.roots if self._towers_draw else ():
            for record in self.flat.vectors:
                root.get_submodule(record.target).eval()
        return copies

    def gradients(self, name: str) -> tuple[bool, str]:
        """Gradients of one step against the flat model's: which parameters have one, and its values."""
        self._refuse_copies(self.stages[name])
        expected, terms = self._flat_gradients
        program = self._copies()
        self._program_backward(name, program)
        found = program.gradients()
        self._refuse_other_trained(found, expected)
        worst, parameter = furthest(found, expected, terms, self._sums, self._types)
        return self._within(worst, parameter, expected)

    def recorded_shapes(self) -> tuple[bool, str]:
        """The shapes in the graphs of all stages against those of the values, as seen while the outputs were compared."""
        copies = self._copies()
        with torch.no_grad():
            simulate(self.flat, self.inputs, copies.roots, self.seed, watch=self._seen.watch(self._reference))
        compared, free, wrong = wrong_size(self.stages, self._seen, self.sizes, self._reference)
        if wrong is not None:
            return False, wrong
        if not compared:
            return True, "none: compiled without example_inputs"
        return True, f"{compared} tensors, {len(self._seen.of)} stages" + (f"; {free} depend on the data" if free else "")

    @cached_property
    def _flat_gradients(self) -> tuple[Gradients, dict[str, torch.Tensor]]:
        flat = self._copies()
        terms = self._flat_backward(flat)
        return flat.gradients(), terms

    @cached_property
    def _sums(self) -> dict[str, float]:
        """For every table, how many times the tolerance its most hit row needs."""
        lookups = self.flat.lookups
        ids: dict[str, list[torch.Tensor]] = {}
        for bags in self._bags:
            for lookup in lookups.lookups:
                ids.setdefault(lookups.table[lookup.table].parameter, []).append(bags[lookup.name].values.long())
        found = {}
        for parameter, parts in ids.items():
            hits = torch.cat(parts).unique(return_counts=True)[1]
            found[parameter] = excess(int(hits.max()) if hits.numel() else 0)
        return found

    @cached_property
    def _types(self) -> dict[str, torch.dtype]:
        """For every parameter, the coarsest type that its gradient flows through."""
        seen = TypesSeen()
        simulate(self.flat, self.inputs, self._copies().roots, self.seed, watch=seen.see)
        return seen.by_parameter(self.flat)

    def training(self, steps: int, optimizer: OptimizerFactory) -> tuple[bool, str]:
        """Parameters after each optimizer step against the flat model's, every step from the flat model's parameters.

        A model whose loss is steep or has kinks would else carry the rounding of one step into the next and make it as large as
        anything: that says something about the model, and nothing about the program.
        """
        flat, program = self._copies(), self._copies()
        trainers = [optimizer(copies.parameters.values()) for copies in (flat, program)]
        worst, parameter = 0.0, ""
        for _ in range(steps):
            start = {name: value.detach().clone() for name, value in flat.parameters.items()}
            flat.clear()
            program.clear()
            terms = self._flat_backward(flat)
            self._program_backward("lowered", program)
            gradients = flat.gradients()
            self._refuse_other_trained(program.gradients(), gradients)
            for trainer in trainers:
                trainer.step()
            cancelled = cancellation(gradients, terms, self._sums)
            off, name = furthest_change(program.parameters, flat.parameters, start, cancelled, self._types)
            if off > worst:
                worst, parameter = off, name
            with torch.no_grad():
                for name, value in flat.parameters.items():
                    program.parameters[name].copy_(value)
        return self._within(worst, parameter, flat.gradients())

    @staticmethod
    def _within(worst: float, name: str, gradients: Gradients) -> tuple[bool, str]:
        trained = sum(gradient is not None for gradient in gradients.values())
        return worst <= 1, f"{trained} parameters, {worst:.2g} of the tolerance" + (f" ('{name}')" if name else "")

    def _refuse_copies(self, stage: Stage) -> None:
        """A stage's parameters must be the model's own: training a copy would not train the model."""
        own = dict(self.flat.root.named_parameters(remove_duplicate=False))
        for name, parameter in stage.graph_module.named_parameters(remove_duplicate=False):
            if own.get(name) is not parameter:
                raise VerificationError(f"stage '{stage.name}': '{name}' is not a parameter of the flat model, but one of its own")

    def _refuse_other_trained(self, found: Gradients, expected: Gradients) -> None:
        """The same parameters must get a gradient. A table without one is a table whose gradient is zero."""
        tables = set(self.flat.lookups.shards)
        for name, gradient in expected.items():
            if name not in tables and (gradient is None) != (found[name] is None):
                which = "the flat model but not in the program" if gradient is not None else "the program but not in the flat model"
                raise VerificationError(f"'{name}' gets a gradient in {which}")

    def _flat_backward(self, flat: Copies) -> dict[str, torch.Tensor]:
        """Rank by rank; the sums over the ranks of the absolute gradients, which say how large the terms were."""
        terms: dict[str, torch.Tensor] = {}
        total: dict[str, torch.Tensor] = {}
        for objective in objectives(self._model.outputs(flat), self.seed):
            if objective is None:
                continue
            flat.clear()
            try:
                (objective / self.world).backward()
            except RuntimeError as error:
                raise VerificationError(f"the flat model itself cannot run backward: {str(error).splitlines()[0]}") from error
            for name, parameter in flat.parameters.items():
                if parameter.grad is not None:
                    size = dense(parameter.grad).detach().abs()
                    terms[name] = terms[name] + size if name in terms else size
                    total[name] = total[name] + parameter.grad if name in total else parameter.grad
        for name, gradient in total.items():
            flat.parameters[name].grad = gradient
        return terms

    def _program_backward(self, name: str, program: Copies) -> None:
        outputs = simulate(self.stages[name], self.inputs, program.roots, self.seed)
        torch.stack([one for one in objectives(outputs, self.seed) if one is not None]).sum().backward()
        tables = set(self.flat.lookups.shards) if name != "towers" else set()
        for parameter_name, parameter in program.parameters.items():
            # What the dense gradient synchronisation does on real ranks; tables are scaled in the graph.
            if parameter_name not in tables and parameter.grad is not None:
                parameter.grad /= self.world

    @cached_property
    def _bags(self) -> list[dict[str, Bag]]:
        """Every rank's bags, by lookup."""
        towers = self.stages["towers"]
        modules = [towers.module(node) for node in towers.graph.nodes if node.op == "call_module"]
        sources = [module.source for module in modules if isinstance(module, ReadIds)]
        lookups = self.flat.lookups
        found = []
        for read in self._run_towers(cut_at(towers, ReadIds)):
            # As they are read: a round may have empty bags behind them.
            bags = {source: _bags_of(ids) for source, ids in zip(sources, read, strict=True)}
            found.append({x.name: bags[lookups.sources[x.source]][x.feature] for x in lookups.lookups})
        return found

    @cached_property
    def _later_ids(self) -> list[dict[str, Any]]:
        """Every rank's values of the nodes that ids of all rounds but the first are read from."""
        towers = self.stages["towers"]
        made = made_outputs(towers)
        sources = [source for lookups in self.flat.lookups.rounds[1:] for source in lookups.sources]
        names = list(dict.fromkeys(made.get(name, name) for source in sources for name in source.nodes))
        if not names:
            return [{} for _ in range(self.world)]
        found = self._run_towers(cut_at_names(towers, names))
        return [dict(zip(names, values, strict=True)) for values in found]

    def _run_towers(self, part: Stage) -> list[Any]:
        copies = [clone_sharing_tensors(part.root, copy_buffers=True) for _ in range(self.world)]
        with torch.no_grad():
            return simulate(part, self.inputs, copies, self.seed)

    def exact_gradients(self) -> tuple[bool, str]:
        """Table gradients with whole numbers in float64: sums are exact, so their order cannot matter.

        The stages "towers" (one device, its own samples) and "lowered" (through all exchanges) run their own graphs up to what
        the flat model's lookups return; behind that they must be the flat model's own nodes. Where towers' modules run among the
        exchanges these values never reach a rank, so "sptt" stands in for "lowered".
        """
        covered = ("towers", "sptt" if self.moved else "lowered")
        for name in covered:
            refuse_other_layers(self.stages[name], self.flat)
            refuse_other_reads(self.stages[name])
            if not self.flat.lookups.lookups:
                continue
            difference = exact_difference(self.stages[name], self.inputs, self._bags, self.seed, self._later_ids)
            if difference is not None:
                return False, f"stage {name}: {difference}"
        if not self.flat.lookups.lookups:
            return True, f"no table is spread; stages {' and '.join(covered)} are the flat model's nodes"
        return True, f"{len(self.flat.lookups.tables)} tables, stages {' and '.join(covered)}"


def _bags_of(ids: JaggedIds) -> dict[str, Bag]:
    """The bags of every feature."""
    weighted = range(len(ids.keys)) if ids.weights is not None else ()
    return dict(zip(ids.keys, split_bags(ids.values, ids.lengths.long(), ids.weights, weighted), strict=True))


_EXCHANGING = ("classic", "sptt", "modules", "lowered")
# Where towers' modules, if there are any, run on the rows of peers.
_MOVED = ("modules", "lowered")


def _state(root: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from root.named_parameters()
    yield from root.named_buffers()
