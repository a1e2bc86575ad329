"""Running the captured model on example inputs to see what its ids look like: their shapes, types and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map

from .adapters import plain_calls
from .adapters import torchrec as torchrec_adapter
from .errors import CaptureError, source_line
from .graphs import clone_sharing_tensors, extras_of, graph_module_over
from .hints import leading_to, longest_of_the_batch, number_of_samples
from .nested import take_apart
from .shapes import Shape, fit
from .verify.cluster import placeholders
from .verify.deal import Layout, batch_size, deal_sizes
from .verify.structure import by_name

ExampleInputs = tuple[Any, ...] | list[Any] | Mapping[str, Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Seen:
    """A tensor of the graph: its shape for the whole example batch and for half of it, its type, and its values if it holds ids.

    ``varies`` tells whether the number of its elements depends on the values of the inputs.
    """

    shape: tuple[int, ...]
    fewer: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor | None
    varies: bool


@dataclass(frozen=True)
class Observed:
    """What was seen on ``batch`` samples, and on ``fewer``, by node.

    ``shapes`` and ``dtypes`` are those of all tensors. ``values`` are those of everything that ids are computed from, and
    ``constants`` the tensors among them that are the same for all inputs. ``laid_out`` are the
    sizes and strides of one on the whole batch. ``storage`` numbers the memory of every tensor, and
    ``writes`` says into which of it a node writes.
    """

    batch: int
    fewer: int
    tensors: Mapping[str, Seen]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype]
    laid_out: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    values: Mapping[str, Any]
    constants: Mapping[str, torch.Tensor]
    storage: Mapping[str, int]
    writes: Mapping[str, frozenset[int]]


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
    module = _to_record(flat, root, calls)
    closure = _leads_to(module.graph, read, {call.node for call in calls})
    full = _run(module, args, kwargs, names | {node.name for node in closure})
    fewer = batch // 2
    first_half, second_half = deal_sizes(args, kwargs, [fewer, batch - fewer], layout)
    of = f"of the {batch} samples of example_inputs"
    hint = partial(number_of_samples, by_name(args, kwargs, layout.names), batch)
    try:
        half = _run(module, *first_half, names, what=f"the first {fewer} {of}", hint=hint)
    except CaptureError as error:
        if fewer:
            raise
        raise CaptureError("example_inputs must hold at least two samples: the model does not run on none of them") from error
    rest = _run(module, *second_half, set(), what=f"the last {batch - fewer} {of}", hint=hint)
    runs = ((batch, full.shapes), (fewer, half.shapes), (batch - fewer, rest.shapes))
    shapes = {name: fit([(size, own[name]) for size, own in runs if name in own]) for name in full.shapes}
    probes = [_probe(module, closure, *inputs, value) for value in (0, 1)]
    tensors = {}
    for name, value in full.tensors.items():
        if name in names and name in half.tensors:
            varies = any(name in probe and probe[name].shape != value.shape for probe in probes) or name in full.of_data_size
            kept = value if name in read and not value.dtype.is_floating_point else None
            tensors[name] = Seen(tuple(value.shape), tuple(half.tensors[name].shape), value.dtype, kept, varies)
    leading = {node.name for node in closure}
    return Observed(
        batch,
        fewer,
        tensors,
        {name: shape for name, shape in shapes.items() if shape is not None},
        full.dtypes,
        full.laid_out,
        {name: value for name, value in full.values.items() if name in leading},
        _constants(full.tensors, probes),
        full.storage,
        full.writes,
    )


def shapes_on(flat: fx.GraphModule, root: nn.Module, inputs: Inputs) -> Mapping[str, tuple[int, ...]]:
    """The shapes of all tensors of a captured graph on ``inputs``.

    Raises:
        CaptureError: it does not run on them.
    """
    return _run(_to_record(flat, root, plain_calls.find_calls(flat)), *inputs, set()).shapes


def _to_record(flat: fx.GraphModule, root: nn.Module, calls: Sequence[plain_calls.Call]) -> fx.GraphModule:
    # In evaluation mode, because layers such as BatchNorm refuse to train on one sample.
    clone = clone_sharing_tensors(root, copy_buffers=True).eval()
    torchrec_adapter.accept_empty_batches(clone)
    module = graph_module_over(clone, flat.graph, extras_of(flat), "Recorder")
    plain_calls.copy_tables_that_reading_changes(module, calls)
    return module


def _constants(tensors: Mapping[str, torch.Tensor], probes: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors that are the same whatever the inputs are."""
    found = {}
    for name, value in tensors.items():
        others = [probe[name] for probe in probes if name in probe]
        if len(others) == len(probes) and all(_same(value, other) for other in others):
            found[name] = value
    return found


def _same(value: torch.Tensor, other: torch.Tensor) -> bool:
    if not (_is_plain(value) and _is_plain(other)) or value.is_meta or other.is_meta or value.dtype != other.dtype:
        return False
    return torch.equal(value, other)


def _is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor has values in memory of its own: not one of a class that only stands for some, and not sparse or nested."""
    return type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_nested


# Operators whose result has as many elements as the data says.
_OF_DATA_SIZE = ("nonzero", "masked_select", "unique", "unique_consecutive", "repeat_interleave", "argwhere")


class _Recorder(fx.Interpreter):
    """Sees what all nodes yield, and keeps it of nodes called ``kept``; of nodes in ``skipped`` it runs nothing."""

    def __init__(self, module: fx.GraphModule, given: Mapping[fx.Node, Any], kept: set[str], skipped: set[fx.Node]) -> None:
        super().__init__(module)
        self.given = given
        self.kept = kept
        self.skipped = skipped
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.laid_out: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.values: dict[str, Any] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.of_data_size: set[str] = set()
        self.node: fx.Node | None = None
        self.storage: dict[str, int] = {}
        self.writes: dict[str, frozenset[int]] = {}
        self._numbers: dict[int, int] = {}
        # Memory that is written to must not be freed: used again, it would look like memory that is shared.
        self._written: list[torch.Tensor] = []

    def run_node(self, n: fx.Node) -> Any:
        if n in self.skipped:
            return None
        self.node = n
        used = [value for value in (self.env.get(node) for node in n.all_input_nodes) if isinstance(value, torch.Tensor)]
        versions = [value._version for value in used]
        value = self.given[n] if n.op == "placeholder" else super().run_node(n)
        written = [one for one, version in zip(used, versions, strict=True) if one._version != version and _is_plain(one)]
        if written:
            self.writes[n.name] = frozenset(map(self._number, written))
            self._written.extend(written)
        if n.name in self.kept:
            self.values[n.name] = value
        if self._has_data_size(n, used) or any(node.name in self.of_data_size for node in n.all_input_nodes):
            self.of_data_size.add(n.name)
        if isinstance(value, torch.Tensor) and not value.is_nested:
            self.shapes[n.name] = tuple(value.shape)
            self.dtypes[n.name] = value.dtype
            if _is_plain(value):
                self.storage[n.name] = self._number(value)
                self.laid_out[n.name] = (tuple(value.shape), value.stride())
            if n.name in self.kept:
                self.tensors[n.name] = value.detach()
        return value

    def _number(self, value: torch.Tensor) -> int:
        # By the storage object, because tensors on the meta device all have the address 0.
        return self._numbers.setdefault(value.untyped_storage()._cdata, len(self._numbers))

    @staticmethod
    def _has_data_size(n: fx.Node, used: Sequence[torch.Tensor]) -> bool:
        name = getattr(n.target, "__name__", str(n.target)).partition(".")[0]
        if name in _OF_DATA_SIZE:
            return True
        return name in ("getitem", "index") and any(value.dtype in (torch.bool, torch.uint8) for value in used[1:])


def _run(
    module: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kept: set[str],
    skipped: set[fx.Node] | None = None,
    what: str = "example_inputs",
    hint: Callable[[Exception], str] = lambda _error: "",
) -> _Recorder:
    try:
        # Forward may change lists and dicts that it is given.
        leaves, template = take_apart([args, kwargs])
        given = placeholders(module.graph, *template.build(leaves))
    except TypeError as error:
        call = " (a dict holds keyword arguments: write (batch,) for a forward that takes one dict)" if kwargs and not args else ""
        raise CaptureError(f"example_inputs do not fit forward: {error}{call}") from None
    recorder = _Recorder(module, given, kept, skipped or set())
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            recorder.run(enable_io_processing=False)
        except Exception as error:
            first = str(error).strip().split("\n")[0]
            place = source_line(recorder.node) if recorder.node is not None else None
            where = f"{place}: " if place else ""
            longest = longest_of_the_batch(leading_to(recorder.node)) if recorder.node is not None else ""
            text = f"{where}the model does not run on {what}: {type(error).__name__}: {first}{longest}{hint(error)}"
            raise CaptureError(text) from error
    return recorder


def _leads_to(graph: fx.Graph, names: set[str], calls: set[fx.Node]) -> set[fx.Node]:
    """The nodes called ``names`` and all that they are computed from, as far as they do not depend on one of ``calls``."""
    behind = set(calls)
    for node in graph.nodes:
        if any(used in behind for used in node.all_input_nodes):
            behind.add(node)
    waiting = [node for node in graph.nodes if node.name in names and node not in behind]
    found = set(waiting)
    while waiting:
        for used in waiting.pop().all_input_nodes:
            if used not in found:
                found.add(used)
                waiting.append(used)
    return found


def _probe(
    module: fx.GraphModule, needed: set[fx.Node], args: tuple[Any, ...], kwargs: dict[str, Any], value: int
) -> Mapping[str, torch.Tensor]:
    """The tensors of the nodes ``needed`` with every tensor of the inputs filled with ``value``."""

    def filled(leaf: Any) -> Any:
        if torchrec_adapter.is_jagged(leaf):
            return torchrec_adapter.with_more_ids(leaf, value)
        return torch.full_like(leaf, value) if isinstance(leaf, torch.Tensor) else leaf

    probe_args, probe_kwargs = tree_map(filled, (args, kwargs), is_leaf=torchrec_adapter.is_jagged)
    skipped = {node for node in module.graph.nodes if node not in needed and node.op != "placeholder"}
    # The inputs are not real ones: nothing says that the model can take them.
    with suppress(CaptureError):
        return _run(module, probe_args, probe_kwargs, {node.name for node in needed}, skipped).tensors
    return {}
