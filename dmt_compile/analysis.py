"""Which lookups a captured model has, in whatever way they are written, and which of them can be spread over towers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from . import versions
from .adapters import plain, torchrec
from .errors import CaptureError
from .graphs import clone_sharing_tensors, graph_module_over, keys_read
from .lookups import LookupSet
from .verify.deal import Layout, batch_size, deal_sizes

ExampleInputs = tuple[Any, ...] | list[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Analysis:
    """The lookups that towers will serve, and the tables that stay replicated on every rank, with the reason."""

    lookups: LookupSet
    replicated: Mapping[str, str]
    layout: Layout


def analyse(flat: fx.GraphModule, root: nn.Module, example_inputs: ExampleInputs | None) -> Analysis:
    """Find every embedding lookup of a captured model.

    Raises:
        CaptureError: there is none that towers could serve, or plain lookups were found and ``example_inputs`` is missing.
    """
    lookups = torchrec.find_collections(flat)
    needed = plain.id_nodes(flat)
    names = tuple(str(node.target) for node in flat.graph.nodes if node.op == "placeholder")
    layout = Layout(names, plain.ragged_inputs(flat), keys_read(flat.graph))
    replicated: dict[str, str] = {}
    if needed and example_inputs is not None:
        shapes, batches = _record(flat, root, needed, example_inputs, layout)
        taken = {*lookups.lookup, *lookups.table}
        found, replicated = plain.find_plain(flat, shapes, batches, taken)
        lookups = lookups + found
    elif needed and not lookups.lookups:
        raise CaptureError(
            "the model reads plain torch embeddings: pass example_inputs=(...), one batch as forward takes it, "
            "so that the shapes of the ids are known"
        )
    elif needed:
        replicated = {name: "plain embeddings are spread over towers only with example_inputs=" for name in plain.tables_of(flat)}
    if not lookups.lookups:
        _refuse(replicated)
    return Analysis(lookups, replicated, layout)


def _refuse(replicated: Mapping[str, str]) -> None:
    if replicated:
        listed = "\n".join(f"  {name}: {why}" for name, why in list(replicated.items())[:8])
        raise CaptureError(f"none of the model's embedding lookups can be served by another rank:\n{listed}")
    # Whoever has no working torchrec should hear that first: the model may hold stand-ins for its modules.
    if versions.torchrec_installed():
        versions.require_torchrec()
    raise CaptureError(
        "no embedding lookup was found: the graph of the model calls no torchrec EmbeddingBagCollection, nn.Embedding or "
        "nn.EmbeddingBag, so there is nothing to spread over towers"
    )


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, names: set[str]) -> None:
        super().__init__(module)
        self.names = names
        self.shapes: dict[str, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self.names and isinstance(value, torch.Tensor):
            self.shapes[n.name] = tuple(value.shape)
        return value


def split_inputs(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as (args, kwargs): a tuple or list is positional, a dict is by keyword."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    raise CaptureError(
        f"example_inputs must be a tuple of positional arguments or a dict of keyword arguments, "
        f"got {type(example_inputs).__name__}"
    )


def _record(
    flat: fx.GraphModule, root: nn.Module, names: list[str], example_inputs: ExampleInputs, layout: Layout
) -> tuple[dict[str, tuple[tuple[int, ...], tuple[int, ...]]], tuple[int, int]]:
    """Shapes of nodes for the example batch and for the first half of its samples."""
    args, kwargs = split_inputs(example_inputs)
    batch = batch_size(args, kwargs, layout)
    if batch < 1:
        raise CaptureError("example_inputs must hold at least one sample")
    # In evaluation mode, because layers such as BatchNorm refuse to train on one sample.
    clone = clone_sharing_tensors(root, copy_buffers=True).eval()
    module = graph_module_over(clone, flat.graph, {}, "Recorder")
    plain.copy_tables_that_reading_changes(module)
    full = _shapes(module, set(names), args, kwargs)
    fewer = batch // 2
    half_args, half_kwargs = deal_sizes(args, kwargs, [fewer, batch - fewer], layout)[0]
    try:
        half = _shapes(module, set(names), half_args, half_kwargs)
    except CaptureError as error:
        if fewer:
            raise
        raise CaptureError("example_inputs must hold at least two samples: the model does not run on none of them") from error
    return {name: (shape, half[name]) for name, shape in full.items() if name in half}, (batch, fewer)


def _shapes(module: fx.GraphModule, names: set[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    from .verify.cluster import placeholders

    recorder = _Recorder(module, names)
    try:
        given = placeholders(module.graph, args, kwargs)
    except TypeError as error:
        hint = " (a dict holds keyword arguments: write (batch,) for a forward that takes one dict)" if kwargs and not args else ""
        raise CaptureError(f"example_inputs do not fit forward: {error}{hint}") from None
    ordered = [given[node] for node in module.graph.nodes if node.op == "placeholder"]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            recorder.run(*ordered, enable_io_processing=False)
        except Exception as error:
            raise CaptureError(f"the model does not run on example_inputs: {type(error).__name__}: {error}") from error
    return recorder.shapes
