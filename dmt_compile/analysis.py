"""Which lookups a captured model has, in whatever way they are written, and which of them can be spread over towers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from . import versions
from .adapters import plain, torchrec
from .capture import Captured
from .errors import CaptureError
from .graphs import clone_sharing_tensors, extras_of, graph_module_over, keys_read
from .lookups import LookupSet
from .verify.deal import Layout, batch_size, deal_sizes

ExampleInputs = tuple[Any, ...] | list[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Analysis:
    """The lookups that towers will serve, and the tables that stay replicated on every rank, with the reason."""

    lookups: LookupSet
    replicated: Mapping[str, str]
    layout: Layout


def analyse(captured: Captured, example_inputs: ExampleInputs | None) -> Mapping[bool, Analysis]:
    """Find every embedding lookup of a captured model, for training mode (True) and for evaluation mode.

    Raises:
        CaptureError: there is none that towers could serve, plain lookups were found and ``example_inputs`` is missing, or the
            two modes do not look up the same tables in the same way.
    """
    training, evaluation = captured.graphs[True], captured.graphs[False]
    if training is evaluation:
        only = _analyse(training, captured.root, example_inputs, {})
        return {True: only, False: only}
    both = {mode: _analyse(graph, captured.root, example_inputs, {}) for mode, graph in captured.graphs.items()}
    kept = {**both[True].replicated, **both[False].replicated}
    if set(both[True].replicated) != set(both[False].replicated):
        # What one mode must have on every rank stays there in the other.
        both = {mode: _analyse(graph, captured.root, example_inputs, kept) for mode, graph in captured.graphs.items()}
    _refuse_other_lookups(both[True].lookups, both[False].lookups)
    return both


def _refuse_other_lookups(training: LookupSet, evaluation: LookupSet) -> None:
    mine = {x.name: (x.table, x.pooling, x.dim, x.weighted) for x in training.lookups}
    theirs = {x.name: (x.table, x.pooling, x.dim, x.weighted) for x in evaluation.lookups}
    for name in (*mine, *theirs):
        if mine.get(name) != theirs.get(name):
            has = training if name in mine else evaluation
            where = has.outputs[has.lookup[name].output].location or "forward"
            raise CaptureError(
                f"{where}: the lookup '{name}' is not the same in training as in evaluation, because forward reads self.training: "
                "make the same lookups in both modes"
            )


def _analyse(flat: fx.GraphModule, root: nn.Module, example_inputs: ExampleInputs | None, keep: Mapping[str, str]) -> Analysis:
    lookups = torchrec.find_collections(flat)
    needed = plain.id_nodes(flat)
    names = tuple(str(node.target) for node in flat.graph.nodes if node.op == "placeholder")
    layout = Layout(names, plain.ragged_inputs(flat), keys_read(flat.graph))
    replicated: dict[str, str] = {}
    if needed and example_inputs is not None:
        shapes, batches = _record(flat, root, needed, example_inputs, layout)
        taken = {*lookups.lookup, *lookups.table}
        found, replicated = plain.find_plain(flat, shapes, batches, taken, keep)
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
    def __init__(self, module: fx.GraphModule, names: set[str], given: Mapping[fx.Node, Any]) -> None:
        super().__init__(module)
        self.names = names
        self.given = given
        self.shapes: dict[str, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = self.given[n] if n.op == "placeholder" else super().run_node(n)
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
    module = graph_module_over(clone, flat.graph, extras_of(flat), "Recorder")
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

    try:
        given = placeholders(module.graph, args, kwargs)
    except TypeError as error:
        hint = " (a dict holds keyword arguments: write (batch,) for a forward that takes one dict)" if kwargs and not args else ""
        raise CaptureError(f"example_inputs do not fit forward: {error}{hint}") from None
    recorder = _Recorder(module, names, given)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            recorder.run(enable_io_processing=False)
        except Exception as error:
            first = str(error).strip().split("\n")[0]
            raise CaptureError(f"the model does not run on example_inputs: {type(error).__name__}: {first}") from error
    return recorder.shapes
