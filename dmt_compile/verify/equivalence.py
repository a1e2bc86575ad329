"""Run the compiled program of every rank against the flat model, and say what was equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..adapters import torchrec as torchrec_adapter
from ..errors import DmtError, InputError
from ..graphs import clone_sharing_tensors, clone_with_parameters, copy_graph, extras_of, graph_module_over
from ..lookups import Lookup, LookupSet
from ..runtime.base import RankContext
from ..runtime.ids import Bag, GlobalBags, LocalBags, MakeRequest, UnpackIds
from ..runtime.pooled import RestoreColumns
from ..stage import Stage
from .certificate import Certificate, Check
from .cluster import run_cluster
from .compare import bits_differ, furthest, furthest_change, tensors_in, tolerance
from .layout import check_layout

Inputs = Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Recompile = Callable[[LookupSet, nn.Module], Mapping[str, Stage]]


def simulate(stage: Stage, inputs: Inputs, roots: Sequence[nn.Module], seed: int | None = None) -> list[Any]:
    """Run a stage on all ranks in lock-step; ``roots`` are the module trees that the ranks read parameters from."""
    topology = stage.plan.topology
    programs = [stage.bind(RankContext(rank, root, topology)) for rank, root in enumerate(roots)]
    return run_cluster(programs, stage.plan.grid, inputs, seed)


def default_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain SGD."""
    return torch.optim.SGD(parameters, lr=0.01)


@dataclass
class _Copies:
    """A copy of the model to train: one set of parameters, and per rank a module tree with buffers of its own."""

    parameters: dict[str, nn.Parameter]
    roots: list[nn.Module]

    @classmethod
    def of(cls, root: nn.Module, world_size: int) -> _Copies:
        base = clone_with_parameters(root)
        roots = [clone_sharing_tensors(base, copy_buffers=True) for _ in range(world_size)]
        for copy in roots:
            torchrec_adapter.accept_empty_batches(copy)
        return cls(dict(base.named_parameters()), roots)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        grads = {name: parameter.grad for name, parameter in self.parameters.items()}
        return {name: grad.to_dense() if grad is not None and grad.is_sparse else grad for name, grad in grads.items()}

    def clear(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


class Verifier:
    """The checks behind :meth:`TowerProgram.verify`.

    The reference is the user's own forward, on every rank's own samples; the objective is the mean over ranks.
    """

    def __init__(
        self,
        stages: Mapping[str, Stage],
        recompile: Recompile,
        inputs: Inputs,
        seed: int,
    ) -> None:
        self.stages = stages
        self.recompile = recompile
        self.flat = stages["flat"]
        self.plan = self.flat.plan
        self.world = self.plan.topology.world_size
        self.seed = seed
        self.inputs = inputs
        meta = next((name for name, tensor in _state(self.flat.root) if tensor.is_meta), None)
        if meta is not None:
            raise InputError(
                f"'{meta}' is on the meta device and has no values to compare: verify a copy with real values "
                "(smaller tables will do)"
            )

    def certify(self, steps: int, optimizer: OptimizerFactory) -> Certificate:
        """Run every check; one that cannot run because the program is wrong counts as failed, with the error's text."""
        self._check_ids()
        checks = [
            self._run(
                f"layout, stage {name}",
                "followed through the graph, for any batch sizes",
                partial(self.layout, name),
            )
            for name in _EXCHANGING
        ]
        expected = self.reference()
        for name in ("towers", *_EXCHANGING):
            checks.append(self._run(f"outputs, stage {name}", "bit for bit", partial(self.outputs, name, expected)))
        relative = f"within {tolerance(torch.float32):.1e} of the largest (float32): sums change order"
        checks.append(self._run("table gradients, integers", "bit for bit (float64)", self.exact_gradients))
        checks.append(self._run("gradients", relative, lambda: self.training(0, optimizer)))
        if steps:
            after = f"changes within {tolerance(torch.float32, steps):.1e} of the largest change, and rounding (float32)"
            checks.append(self._run(f"parameters after {steps} steps", after, lambda: self.training(steps, optimizer)))
        sizes = tuple(self._sizes())
        return Certificate(type(self.flat.root).__name__, self.plan.hash, sizes, tuple(checks))

    def _check_ids(self) -> None:
        """Let every rank look at its ids, so that a bad batch is refused by name and not by the flat model."""
        requests = _cut_at(self.stages["lowered"], MakeRequest)
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

    def _sizes(self) -> list[int]:
        bags = self._bags()
        return [rank_bags[0].offsets.numel() - 1 for rank_bags in bags]

    def layout(self, name: str) -> tuple[bool, str]:
        check_layout(self.stages[name])
        return True, f"{self.world} ranks, {len(self.flat.lookups.lookups)} lookups"

    def reference(self) -> list[Any]:
        """The user's forward on every rank's samples."""
        copies = _Copies.of(self.flat.root, self.world)
        with torch.no_grad():
            return self._flat_outputs(copies)

    def _flat_outputs(self, copies: _Copies) -> list[Any]:
        outputs = []
        for rank, (args, kwargs) in enumerate(self.inputs):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed + rank)
                try:
                    outputs.append(copies.roots[rank](*args, **kwargs))
                except Exception as error:
                    if not isinstance(error, DmtError) and self._sizes()[rank] == 0:
                        raise InputError(
                            f"the flat model does not run on no samples, which is what rank {rank} gets of this batch "
                            f"({type(error).__name__}: {error}): verify with at least {self.world} samples"
                        ) from error
                    raise
        return outputs

    def outputs(self, name: str, expected: Sequence[Any]) -> tuple[bool, str]:
        copies = _Copies.of(self.flat.root, self.world)
        with torch.no_grad():
            found = simulate(self.stages[name], self.inputs, copies.roots, self.seed)
        for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            difference = bits_differ(mine, theirs)
            if difference is not None:
                return False, f"rank {rank}: {difference}"
        return True, f"equal on {self.world} ranks"

    def training(self, steps: int, optimizer: OptimizerFactory) -> tuple[bool, str]:
        """Gradients (``steps`` 0), or parameters after that many optimizer steps, against the flat model's."""
        flat, towers = _Copies.of(self.flat.root, self.world), _Copies.of(self.flat.root, self.world)
        trainers = [optimizer(copies.parameters.values()) for copies in (flat, towers)] if steps else []
        tables = {table.parameter for table in self.flat.lookups.tables}
        for _ in range(max(steps, 1)):
            flat.clear()
            towers.clear()
            self._backward(self._flat_outputs(flat), self.world)
            self._backward(simulate(self.stages["lowered"], self.inputs, towers.roots, self.seed), 1)
            for name, parameter in towers.parameters.items():
                # What the dense gradient synchronisation does on real ranks; tables are scaled in the graph.
                if name not in tables and parameter.grad is not None:
                    parameter.grad /= self.world
            for trainer in trainers:
                trainer.step()
        if steps:
            start = {name: parameter.detach() for name, parameter in self.flat.root.named_parameters()}
            worst, name = furthest_change(towers.parameters, flat.parameters, start)
        else:
            worst, name = furthest(towers.gradients(), flat.gradients())
        allowed = max(steps, 1)
        trained = sum(gradient is not None for gradient in flat.gradients().values())
        return worst <= allowed, f"{trained} parameters, {worst / allowed:.2g} of the tolerance" + (f" ('{name}')" if name else "")

    def _backward(self, outputs: Sequence[Any], divide: int) -> None:
        """Backward of the sum over ranks of <output, random cotangent>, divided."""
        generator = torch.Generator().manual_seed(self.seed)
        terms = []
        for output in outputs:
            for _, tensor in tensors_in(output):
                if tensor.requires_grad and tensor.dtype.is_floating_point:
                    cotangent = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
                    terms.append((tensor * cotangent).sum())
        if not terms:
            raise InputError("no output of the model depends on a trainable parameter, so there is no gradient to compare")
        (torch.stack([term.double() for term in terms]).sum() / divide).backward()

    def _bags(self) -> list[Any]:
        """Every rank's bags, in declaration order of (source, feature)."""
        towers = self.stages["towers"]
        cut = _cut_at(towers, LocalBags)
        copies = [clone_sharing_tensors(towers.root, copy_buffers=True) for _ in range(self.world)]
        with torch.no_grad():
            return simulate(cut, self.inputs, copies, self.seed)

    def exact_gradients(self) -> tuple[bool, str]:
        """Table gradients through all exchanges, with whole numbers in float64: sums are exact, so their order cannot matter.

        Cotangents are multiples of the world size and, for mean pooling, of the bag's length, so that the divisions on the way
        back leave whole numbers; mean-pooled bags whose length is no power of two get zero, because the kernel multiplies by
        1 / length, which is exact for those only. The reference is one plain ``embedding_bag`` per lookup and rank.
        """
        root = clone_with_parameters(self.flat.root)
        generator = torch.Generator().manual_seed(self.seed)
        lookups = self.flat.lookups
        weights: dict[str, nn.Parameter] = {}
        for table in lookups.tables:
            values = torch.randint(-4, 5, (table.rows, table.dim), generator=generator).double()
            _path, _, _attribute = table.parameter.rpartition(".")
            weights[table.name] = nn.Parameter(values.to(root.get_parameter(table.parameter).device))
            for module_path, name in _places(root, root.get_parameter(table.parameter)):
                setattr(root.get_submodule(module_path), name, weights[table.name])
        wide = replace(
            lookups,
            tables=tuple(replace(table, dtype=torch.float64) for table in lookups.tables),
            lookups=tuple(replace(lookup, dtype=torch.float64, grad=True, max_norm=None) for lookup in lookups.lookups),
        )
        lowered = _with_whole_weights(_cut_at(self.recompile(wide, root)["lowered"], RestoreColumns))
        roots = [clone_sharing_tensors(root, copy_buffers=True) for _ in range(self.world)]
        columns = simulate(lowered, self.inputs, roots, self.seed)
        bags = self._bags()
        entries = list(dict.fromkeys((lookup.source, lookup.feature) for lookup in lookups.lookups))
        place = {entry: index for index, entry in enumerate(entries)}
        reference = {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
        mine: list[torch.Tensor] = []
        theirs: list[torch.Tensor] = []
        for rank in range(self.world):
            start = dict.fromkeys(range(len(lookups.outputs)), 0)
            for lookup in lookups.lookups:
                bag = bags[rank][place[lookup.source, lookup.feature]]
                pooled = _plainly(lookup, reference[lookup.table], bag)
                first = start[lookup.output]
                column = columns[rank][lookup.output][:, first : first + lookup.dim]
                start[lookup.output] += lookup.dim
                difference = bits_differ(column, pooled)
                if difference is not None:
                    return False, f"pooled '{lookup.name}' on rank {rank}: {difference}"
                cotangent = torch.randint(-4, 5, pooled.shape, generator=generator).double().to(pooled.device) * self.world
                if lookup.pooling == "mean":
                    lengths = _counted(bag, lookup.padding_idx)
                    cotangent = cotangent * (lengths * ((lengths & (lengths - 1)) == 0)).unsqueeze(1)
                mine.append((column * cotangent).sum())
                theirs.append((pooled * cotangent).sum())
        torch.stack(mine).sum().backward()
        (torch.stack(theirs).sum() / self.world).backward()
        for name, weight in weights.items():
            difference = bits_differ(_or_zeros(weight), _or_zeros(reference[name]))
            if difference is not None:
                return False, f"gradient of table '{name}': {difference}"
        return True, f"{len(weights)} tables"


def _plainly(lookup: Lookup, weight: torch.Tensor, bag: Bag) -> torch.Tensor:
    """A lookup in one call of torch.nn.functional, (B, dim)."""
    values, offsets = bag.values.long(), bag.offsets.long()
    if lookup.pooling == "rows":
        return nn.functional.embedding(values, weight, lookup.padding_idx).reshape(len(offsets) - 1, lookup.dim)
    return nn.functional.embedding_bag(
        values,
        weight,
        offsets,
        mode=lookup.pooling,
        include_last_offset=True,
        per_sample_weights=_whole(bag.weights) if bag.weights is not None and lookup.weighted else None,
        padding_idx=lookup.padding_idx,
    )


def _counted(bag: Bag, padding_idx: int | None) -> torch.Tensor:
    """How many ids of each bag a mean divides by."""
    if padding_idx is None:
        return bag.offsets.diff()
    kept = nn.functional.pad((bag.values != padding_idx).long().cumsum(0), (1, 0))
    return kept[bag.offsets.long()].diff()


_EXCHANGING = ("classic", "sptt", "lowered")


def _or_zeros(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


def _state(root: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from root.named_parameters()
    yield from root.named_buffers()


def _places(root: nn.Module, parameter: nn.Parameter) -> list[tuple[str, str]]:
    """Every (module, attribute) under which a parameter is registered."""
    return [
        (path, name) for path, module in root.named_modules() for name, value in module._parameters.items() if value is parameter
    ]


def _whole(weights: torch.Tensor) -> torch.Tensor:
    """Weights of ids as whole numbers in float64, zero only where they nearly are."""
    return (weights.detach().double() * 16).round()


def _whole_weights(routed: GlobalBags) -> GlobalBags:
    if routed.weights is None:
        return routed
    bags = [bag if bag.weights is None else bag._replace(weights=_whole(bag.weights)) for bag in routed.bags]
    return routed._replace(bags=bags, weights=_whole(routed.weights))


def _with_whole_weights(stage: Stage) -> Stage:
    """The stage with every id's weight made whole where it has reached the table."""
    graph = copy_graph(stage.graph)
    for node in list(graph.nodes):
        if node.op == "call_module" and isinstance(stage.module(node), UnpackIds):
            with graph.inserting_after(node):
                whole = graph.call_function(_whole_weights, (node,))
            node.replace_all_uses_with(whole, delete_user_cb=lambda user, whole=whole: user is not whole)
    return replace(stage, graph_module=graph_module_over(stage.root, graph, extras_of(stage.graph_module), "Whole"))


def _cut_at(stage: Stage, kind: type[nn.Module]) -> Stage:
    """The stage's graph up to the one node that calls a module of ``kind``, whose value becomes the output."""
    graph = copy_graph(stage.graph)
    node = next(n for n in graph.nodes if n.op == "call_module" and isinstance(stage.module(n), kind))
    (output,) = [n for n in graph.nodes if n.op == "output"]
    output.args = (node,)
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
