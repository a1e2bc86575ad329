"""The interactions of a flat graph, from a few samples of the example inputs or from made-up ones."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from ..errors import first_line
from ..graphs import INPUT, attribute_of, clone_sharing_tensors, extras_of, graph_module_over, input_path, plain_attention
from ..lookups import LookupSet
from ..verify.cluster import placeholders
from ..verify.deal import Layout, batch_size, deal_sizes
from .recognise import recognise
from .records import Block, Interaction
from .tape import Tape
from .trace import Recorder, Runner, materialise

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
T = TypeVar("T")
# An odd number that few models have of anything, so that the axis of the batch is told from others.
_SAMPLES = 3


def few_samples(args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout) -> Inputs | None:
    """The first samples of a batch, which are enough to follow features; None if it cannot be cut."""
    try:
        batch = batch_size(args, kwargs, layout)
        few, named = args, kwargs
        if batch > _SAMPLES:
            few, named = deal_sizes(args, kwargs, [_SAMPLES, batch - _SAMPLES], layout)[0]
        # A part of the batch would keep all of it alive.
        cloned: Inputs = tree_map_only(torch.Tensor, _copied, (few, named))
        return cloned
    except Exception:
        return None


def _copied(value: torch.Tensor) -> torch.Tensor:
    return torch.zeros(value.shape, dtype=value.dtype) if value.is_meta else value.detach().clone()


def find_interactions(
    flat: fx.GraphModule, root: nn.Module, lookups: LookupSet, inputs: Inputs | None, layout: Layout
) -> tuple[Interaction, ...]:
    """Where a flat graph mixes features, in order; one record of kind "unknown" with the reason if it cannot be run.

    ``inputs`` are a few samples, or None: then they are made up. Nothing of the model is changed and no table is read.
    """
    try:
        return recognise(follow(flat, root, lookups, inputs, layout))
    except Exception as error:
        reason = first_line(error) if inputs is not None else f"give example_inputs to see it ({first_line(error)})"
        return (Interaction("unknown", reason, Block(()), "", (), None),)


def follow(flat: fx.GraphModule, root: nn.Module, lookups: LookupSet, inputs: Inputs | None, layout: Layout) -> Tape:
    """A run of a flat graph on a few samples, as for :func:`find_interactions`; raises whatever the graph raises."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), quiet(), plain_attention():
        return _run(flat, root, lookups, inputs, layout)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep back what a model says when it runs, and the code that a failing GraphModule prints."""
    logger = logging.getLogger("torch.fx._symbolic_trace")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _run(flat: fx.GraphModule, root: nn.Module, lookups: LookupSet, inputs: Inputs | None, layout: Layout) -> Tape:
    tables = {id(root.get_parameter(table.parameter)) for table in lookups.tables}
    # Layers such as BatchNorm refuse to train on one sample, and dropout would only disturb.
    clone = clone_sharing_tensors(root, copy_buffers=True).eval()
    materialise(clone, tables)
    module = graph_module_over(clone, flat.graph, extras_of(flat), "Followed")
    return with_inputs(module, lookups, inputs, layout, lambda given, batch: _follow(module, lookups, given, batch))


def with_inputs(
    module: fx.GraphModule,
    lookups: LookupSet,
    inputs: Inputs | None,
    layout: Layout,
    attempt: Callable[[Mapping[fx.Node, Any], int], T],
) -> T:
    """What ``attempt`` makes of the values of input nodes and their number of samples.

    Without ``inputs`` values are made up. Where nothing says how wide they are, more than one is tried: ``attempt`` is to run the
    graph and to raise what its operators raise.
    """
    if inputs is not None:
        return attempt(placeholders(module.graph, *inputs), batch_size(*inputs, layout))
    given, unknown = _made_up(module, lookups, _SAMPLES)
    shapes: list[tuple[int, ...]] = [(), (1,)]
    while True:
        shape = shapes.pop(0)
        given.update({node: torch.rand(_SAMPLES, *shape) for node in unknown})
        try:
            return attempt(given, _SAMPLES)
        except RuntimeError as error:
            sizes = next(filter(None, (pattern.search(str(error)) for pattern in _MISMATCH)), None)
            missing = int(sizes[2]) - int(sizes[1]) if sizes is not None else 0
            if shape == (1,) and len(unknown) == 1 and missing > 0:
                shapes = [(1 + missing,)]
            elif not unknown or not shapes:
                raise
        except IndexError:
            if not unknown or not shapes:
                raise


# What a layer says that is given too few columns, with values and without.
_MISMATCH = (re.compile(r"\(\d+x(\d+) and (\d+)x\d+\)"), re.compile(r"\[\d+, (\d+)\] X \[(\d+), \d+\]"))


def _follow(module: fx.GraphModule, lookups: LookupSet, given: Mapping[fx.Node, Any], batch: int) -> Tape:
    recorder = Recorder(batch)
    recorder.tape.given = dict(given)
    runner = Runner(module, recorder, lookups, given)
    with recorder:
        runner.run(enable_io_processing=False)
    return recorder.tape


def _made_up(module: fx.GraphModule, lookups: LookupSet, batch: int) -> tuple[dict[fx.Node, Any], list[fx.Node]]:
    """Random dense inputs as wide as the first layer that takes them, and those of which that is not known.

    Ids are not needed, as lookups are not run.
    """
    ids = {node for source in lookups.sources for node in source.nodes}
    given: dict[fx.Node, Any] = {}
    unknown: list[fx.Node] = []
    for node in module.graph.nodes:
        if node.op != "placeholder" and input_path(node) is None:
            continue
        inner = [user for user in node.users if input_path(user) is not None and INPUT not in user.meta]
        if node.name in ids or len(inner) == len(node.users):
            given[node] = None
        else:
            width = _width(module, node)
            if width is None:
                unknown.append(node)
            else:
                given[node] = torch.rand(batch, width)
    return given, unknown


def _width(module: fx.GraphModule, start: fx.Node) -> int | None:
    """How many columns the first layer takes that is reached from an input through operators of nothing else."""
    waiting, seen = [start], {start}
    while waiting:
        for user in waiting.pop(0).users:
            if user in seen:
                continue
            seen.add(user)
            sizes: Mapping[str, Any] = {}
            if user.op == "call_module":
                sizes = vars(module.get_submodule(str(user.target)))
            found = next((sizes[name] for name in ("in_features", "num_features", "normalized_shape") if name in sizes), None)
            if found is not None:
                return int(found if isinstance(found, int) else found[-1])
            weights = [used for used in user.all_input_nodes if used.op == "get_attr"]
            shapes = [tuple(attribute_of(module, str(used.target)).shape) for used in weights]
            if user.target is nn.functional.linear and shapes and len(shapes[0]) == 2:
                return int(shapes[0][1])
            if len(user.all_input_nodes) - len(weights) == 1:
                waiting.append(user)
    return None
