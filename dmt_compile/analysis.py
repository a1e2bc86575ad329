"""Which lookups a captured model has, in whatever way they are written, and which of them can be spread over towers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from torch import fx, nn

from . import versions
from .adapters import plain, plain_calls, torchrec
from .capture import Captured
from .errors import CaptureError
from .graphs import input_path, keys_read
from .lengths import Lengths
from .lookups import LookupSet
from .observe import Inputs, Observed, observe
from .rounds import in_rounds
from .shapes import SHAPE, STORAGE, WRITES, PerSample
from .verify.deal import Layout
from .verify.structure import Place, by_name, places_read


@dataclass(frozen=True)
class Analysis:
    """The lookups that towers will serve, and the tables that stay replicated on every rank, with the reason.

    ``whole`` says of tables whose fields are told apart by offsets why they are not taken apart all the same.
    """

    lookups: LookupSet
    replicated: Mapping[str, str]
    layout: Layout
    whole: Mapping[str, str]


def analyse(captured: Captured, inputs: Inputs | None, dynamic_ids: bool | None = None) -> Mapping[bool, Analysis]:
    """Find every embedding lookup of a captured model, for training mode (True) and for evaluation mode.

    ``dynamic_ids`` says whether the number of ids per sample may change; None is for where the model itself takes any.

    Raises:
        CaptureError: there is none, plain lookups were found and example ``inputs`` (args, kwargs) are missing, or the two modes do
            not look up the same tables in the same way.
    """
    training, evaluation = captured.graphs[True], captured.graphs[False]
    fixed = _fixed(captured, inputs, dynamic_ids)
    if training is evaluation:
        only = _analyse(training, captured.root, inputs, {}, (), fixed)
        return {True: only, False: only}
    kept: Mapping[str, str] = {}
    plainly: set[str] = set()
    while True:
        both = {mode: _analyse(graph, captured.root, inputs, kept, plainly, fixed) for mode, graph in captured.graphs.items()}
        mine, theirs = both[True], both[False]
        whole = {**mine.replicated, **theirs.replicated}
        if set(mine.replicated) != set(theirs.replicated) and set(whole) != set(kept):
            # What one mode must have on every rank stays there in the other.
            kept = whole
            continue
        differing = {
            parameter
            for parameter in {**mine.lookups.shards, **theirs.lookups.shards}
            if _treatment(mine.lookups, parameter) != _treatment(theirs.lookups, parameter)
        }
        if not differing - plainly:
            _refuse_other_lookups(mine.lookups, theirs.lookups)
            return both
        plainly |= differing


def _layout(flat: fx.GraphModule, calls: Sequence[plain_calls.Call]) -> Layout:
    names = tuple(str(node.target) for node in flat.graph.nodes if node.op == "placeholder")
    return Layout(names, plain_calls.ragged_inputs(calls), keys_read(flat.graph))


_Fixed = Callable[[fx.GraphModule, fx.Node, int, tuple[int, ...]], str | None]


def _fixed(captured: Captured, inputs: Inputs | None, dynamic_ids: bool | None) -> _Fixed:
    """Why the number of ids of a node of one of the graphs is fixed, None where it is not."""
    if dynamic_ids is not None or inputs is None:
        return lambda *_: None if dynamic_ids else "or compile without dynamic_ids=False"
    return Lengths(captured, inputs, _layout(captured.flat, plain_calls.find_calls(captured.flat))).fixed


def _treatment(lookups: LookupSet, parameter: str) -> set[tuple[object, ...]]:
    """How a parameter's tables are read."""
    tables = lookups.shards.get(parameter, ())
    return {(x.name, x.table, x.pooling, x.dim, x.weighted) for table in tables for x in lookups.lookups_of_table[table.name]}


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


def _analyse(
    flat: fx.GraphModule,
    root: nn.Module,
    inputs: Inputs | None,
    keep: Mapping[str, str],
    plainly: Collection[str],
    fixed: _Fixed,
) -> Analysis:
    lookups = torchrec.find_collections(flat)
    calls = plain_calls.find_calls(flat)
    certain = [call for call in calls if not call.indexing]
    layout = _layout(flat, calls)
    replicated: dict[str, str] = {}
    whole: dict[str, str] = {}
    if inputs is not None:
        observed = record_shapes(flat, root, inputs, layout)
        plain_lookups, replicated, whole = plain.find_plain(flat, calls, observed, lookups, keep, plainly, partial(fixed, flat))
        lookups = lookups + plain_lookups
    elif certain and not lookups.lookups:
        raise CaptureError(
            "the model reads plain torch embeddings, or rows that are not pooled: pass example_inputs=(...), one batch as forward "
            "takes it, so that the shapes of the ids are known"
        )
    else:
        why = "what is no EmbeddingBagCollection is spread over towers only with example_inputs="
        replicated = dict.fromkeys((call.parameter for call in certain), why)
        if replicated:
            listed = ", ".join(list(replicated)[:4]) + (", ..." if len(replicated) > 4 else "")
            warnings.warn(f"{len(replicated)} tables stay on every rank ({listed}): {why}(...)", stacklevel=4)
    replicated.update(plain_calls.no_parameters(flat))
    if not lookups.lookups and not replicated:
        _refuse(flat)
    layout = replace(layout, per_sample=_per_sample(flat.graph, layout))
    if inputs is not None:
        layout = replace(layout, places=_places(flat.graph, layout, inputs))
    return Analysis(in_rounds(flat.graph, lookups), replicated, layout, whole)


def record_shapes(flat: fx.GraphModule, root: nn.Module, inputs: Inputs, layout: Layout) -> Observed:
    """Run a graph on example inputs, and note at its nodes what shapes their values have and what memory they share."""
    observed = observe(flat, root, plain_calls.find_calls(flat), inputs, layout)
    for node in flat.graph.nodes:
        for key, found in ((SHAPE, observed.shapes), (STORAGE, observed.storage), (WRITES, observed.writes)):
            node.meta.pop(key, None)
            if node.name in found:
                node.meta[key] = found[node.name]
    return observed


def _per_sample(graph: fx.Graph, layout: Layout) -> tuple[tuple[object, ...], ...]:
    """The paths of the inputs' tensors that have a row for every sample, and not by chance one id in every bag."""
    ragged = {path for one in layout.ragged for path in (one.values, one.offsets, one.weights)}
    paths = (input_path(node) for node in graph.nodes if node.meta.get(SHAPE, ())[:1] == (PerSample(1, 0),))
    return tuple(dict.fromkeys(path for path in paths if path is not None and path not in ragged))


def _places(graph: fx.Graph, layout: Layout, inputs: Inputs) -> tuple[Place, ...]:
    args, kwargs = inputs
    unread = {(str(node.target),) for node in graph.nodes if node.op == "placeholder" and not node.users}
    ragged = [path for one in layout.ragged for path in (one.values, one.offsets, one.weights) if path is not None]
    paths = [path for path in (*layout.keys, *layout.per_sample, *ragged) if path not in unread]
    return places_read(by_name(args, kwargs, layout.names), paths)


def left_flat(replicated: Mapping[str, str]) -> str:
    """What to tell the user of a model all of whose tables stay replicated."""
    listed = "\n".join(f"  {name}: {why}" for name, why in list(replicated.items())[:_MOST_REASONS])
    more = f"\n  ... and {len(replicated) - _MOST_REASONS} more" if len(replicated) > _MOST_REASONS else ""
    return (
        f"none of the model's embedding lookups can be served by another rank:\n{listed}{more}\n"
        "Nothing is spread over towers, the model is left flat: every rank holds all of it, and the gradients of whole tables are "
        "averaged over the ranks in every step. To have tables spread, change what is named there (give a weight a parameter of "
        "its own, say)."
    )


def _refuse(flat: fx.GraphModule) -> NoReturn:
    places = plain_calls.kept_aside(flat)
    if places:
        listed = ", ".join(places[:_MOST_REASONS]) + (", ..." if len(places) > _MOST_REASONS else "")
        raise CaptureError(
            f"{listed}: ids are looked up in a tensor that is no parameter of the model, in a layer that could not be traced: "
            "register the table (an nn.Embedding in a plain list or dict belongs in a ModuleList or ModuleDict)"
        )
    selections = plain_calls.rows_of_computed(flat)
    if selections:
        listed = "\n".join(f"  {place}: from all of {_in_words(matrices)}" for place, matrices in selections[:_MOST_REASONS])
        raise CaptureError(
            f"no embedding lookup was found: ids of the batch take rows of what forward computes from whole tables.\n{listed}\n"
            "Each of these tables is read as a whole, and such a row may depend on every row of it, so that its owner could not "
            "look it up alone: take rows of the parameters themselves by ids, or train this model data-parallel"
        )
    # Whoever has no working torchrec should hear that first: the model may hold stand-ins for its modules.
    if versions.torchrec_installed():
        versions.require_torchrec()
    raise CaptureError(
        "no embedding lookup was found: the graph of the model calls no torchrec EmbeddingBagCollection or EmbeddingCollection, "
        "nn.Embedding or nn.EmbeddingBag, nor takes rows of a parameter by ids of the batch, so there is nothing to spread"
    )


def _in_words(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:_MOST_REASONS]) + (", ..." if len(names) > _MOST_REASONS else "")


_MOST_REASONS = 8
