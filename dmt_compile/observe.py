"""Running the captured model on example inputs to see what its ids look like: their shapes, types and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map

from .adapters import plain_calls
from .adapters import torchrec as torchrec_adapter
from .errors import CaptureError
from .graphs import clone_sharing_tensors, extras_of, graph_module_over
from .shapes import Shape, fit
from .verify.cluster import placeholders
from .verify.deal import Layout, batch_size, deal_sizes

ExampleInputs = tuple[Any, ...] | list[Any] | Mapping[str, Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Seen:
    """A tensor of the graph: its shape for the whole example batch and for half of it, its type, and its values if it holds ids.

    ``probes`` are its values where all inputs are zero (and jagged ones longer), and where all are one; None where the graph does
    not run on these or where the tensor depends on a lookup.
    """

    shape: tuple[int, ...]
    fewer: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor | None
    probes: tuple[torch.Tensor, torch.Tensor] | None

    @property
    def varies(self) -> bool:
        """Whether the number of its elements depends on the values of the inputs."""
        return self.probes is not None and any(probe.shape != self.shape for probe in self.probes)


@dataclass(frozen=True)
class Observed:
    """What was seen on ``batch`` samples, and on ``fewer``, by node; ``shapes`` and ``dtypes`` are those of all tensors."""

    batch: int
    fewer: int
    tensors: Mapping[str, Seen]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype]


def split_inputs(example_inputs: ExampleInputs | None, example_kwargs: Mapping[str, Any] | None) -> Inputs | None:
    """Example inputs as (args, kwargs): a tuple or list is positional, a dict is by keyword; None if there are none."""
    if example_kwargs is not None and not isinstance(example_kwargs, Mapping):
        raise CaptureError(f"example_kwargs must be a dict of keyword arguments, got {type(example_kwargs).__name__}")
    if example_inputs is None:
        return ((), dict(example_kwargs)) if example_kwargs is not None else None
    if isinstance(example_inputs, Mapping):
        if example_kwargs is not None:
            raise CaptureError("example_inputs is a dict of keyword arguments: give them all in it, or positional ones in a tuple")
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), dict(example_kwargs or {})
    raise CaptureError(
        f"example_inputs must be a tuple of positional arguments or a dict of keyword arguments, "
        f"got {type(example_inputs).__name__}"
    )


def observe(flat: fx.GraphModule, root: nn.Module, calls: Iterable[plain_calls.Call], inputs: Inputs, layout: Layout) -> Observed:
    """See the ids, offsets and results of plain lookups, and the shapes of all tensors.

    Raises:
        CaptureError: the model does not run on the example inputs, or not on half of them, or there are too few samples.
    """
    calls = list(calls)
    read = {node.name for call in calls for node in call.reads}
    names = read | {call.node.name for call in calls}
    args, kwargs = inputs
    batch = batch_size(args, kwargs, layout)
    if batch < 1:
        raise CaptureError("example_inputs must hold at least one sample")
    # In evaluation mode, because layers such as BatchNorm refuse to train on one sample.
    clone = clone_sharing_tensors(root, copy_buffers=True).eval()
    torchrec_adapter.accept_empty_batches(clone)
    module = graph_module_over(clone, flat.graph, extras_of(flat), "Recorder")
    plain_calls.copy_tables_that_reading_changes(module, calls)
    full = _run(module, names, args, kwargs)
    fewer = batch // 2
    first_half, second_half = deal_sizes(args, kwargs, [fewer, batch - fewer], layout)
    try:
        half = _run(module, names, *first_half)
    except CaptureError as error:
        if fewer:
            raise
        raise CaptureError("example_inputs must hold at least two samples: the model does not run on none of them") from error
    rest = _run(module, set(), *second_half)
    runs = ((batch, full.shapes), (fewer, half.shapes), (batch - fewer, rest.shapes))
    shapes = {name: fit([(size, own[name]) for size, own in runs if name in own]) for name in full.shapes}
    zeros, ones = (_probe(module, calls, read, args, kwargs, value) for value in (0, 1))
    tensors = {}
    for name, value in full.tensors.items():
        if name in half.tensors:
            probes = (zeros[name], ones[name]) if name in zeros and name in ones else None
            kept = value if name in read and not value.dtype.is_floating_point else None
            tensors[name] = Seen(tuple(value.shape), tuple(half.tensors[name].shape), value.dtype, kept, probes)
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    return Observed(batch, fewer, tensors, known, full.dtypes)


class _Recorder(fx.Interpreter):
    """Keeps the tensors of some nodes and the shapes of all; of nodes in ``skipped`` it runs nothing."""

    def __init__(self, module: fx.GraphModule, names: set[str], given: Mapping[fx.Node, Any], skipped: set[fx.Node]) -> None:
        super().__init__(module)
        self.names = names
        self.given = given
        self.skipped = skipped
        self.tensors: dict[str, torch.Tensor] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n in self.skipped:
            return None
        value = self.given[n] if n.op == "placeholder" else super().run_node(n)
        if isinstance(value, torch.Tensor) and not value.is_nested:
            self.shapes[n.name] = tuple(value.shape)
            self.dtypes[n.name] = value.dtype
            if n.name in self.names:
                self.tensors[n.name] = value.detach()
        return value


def _run(
    module: fx.GraphModule, names: set[str], args: tuple[Any, ...], kwargs: dict[str, Any], skipped: set[fx.Node] | None = None
) -> _Recorder:
    try:
        given = placeholders(module.graph, args, kwargs)
    except TypeError as error:
        hint = " (a dict holds keyword arguments: write (batch,) for a forward that takes one dict)" if kwargs and not args else ""
        raise CaptureError(f"example_inputs do not fit forward: {error}{hint}") from None
    recorder = _Recorder(module, names, given, skipped or set())
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            recorder.run(enable_io_processing=False)
        except Exception as error:
            first = str(error).strip().split("\n")[0]
            raise CaptureError(f"the model does not run on example_inputs: {type(error).__name__}: {first}") from error
    return recorder


def _probe(
    module: fx.GraphModule,
    calls: Iterable[plain_calls.Call],
    names: set[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    value: int,
) -> dict[str, torch.Tensor]:
    """The tensors ``names`` with every tensor of the inputs filled with ``value``, as far as they do not depend on a lookup."""
    behind: set[fx.Node] = {call.node for call in calls}
    for node in module.graph.nodes:
        if any(used in behind for used in node.all_input_nodes):
            behind.add(node)
    wanted = {node for node in module.graph.nodes if node.name in names and node not in behind}
    needed, stack = set(wanted), list(wanted)
    while stack:
        for used in stack.pop().all_input_nodes:
            if used not in needed:
                needed.add(used)
                stack.append(used)

    def filled(leaf: Any) -> Any:
        if torchrec_adapter.is_jagged(leaf):
            return torchrec_adapter.with_more_ids(leaf, value)
        return torch.full_like(leaf, value) if isinstance(leaf, torch.Tensor) else leaf

    probe_args, probe_kwargs = tree_map(filled, (args, kwargs), is_leaf=torchrec_adapter.is_jagged)
    skipped = {node for node in module.graph.nodes if node not in needed and node.op != "placeholder"}
    found: dict[str, torch.Tensor] = {}
    # The inputs are not real ones: nothing says that the model can take them.
    with suppress(CaptureError):
        found = _run(module, {node.name for node in wanted}, probe_args, probe_kwargs, skipped).tensors
    return found
