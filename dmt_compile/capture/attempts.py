"""From a user's module to a flat torch.fx graph in which every node knows the user's file and line.

The graph runs over a clone of the module tree that shares all tensors with the model, so that nothing done to the graph,
and no tracing side effect, reaches the user's objects.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import FakeTensor

from ..adapters import plain_calls
from ..adapters import torchrec as torchrec_adapter
from ..errors import CaptureError, source_line, source_location
from ..graphs import EXTRAS, LOOKUPS, clone_sharing_tensors, graph_module_over
from ..hints import arrays
from ..verify.structure import by_name
from . import symbolic as tracing
from .arguments import argument_names
from .backward import LostBackward
from .captured import Captured, Inputs, disagrees, hides_a_lookup, run_once
from .sources import KEEPS, reason
from .symbolic import Traced

__all__ = ["Captured", "capture"]


def capture(model: nn.Module, inputs: Inputs | None = None) -> Captured:
    """Trace ``model`` symbolically, or export it with ``inputs`` (args, kwargs) if that fails. The model is left as it is.

    Tracing is tried first for any inputs, then for inputs of the structure of ``inputs``. Submodules that cannot be traced, or
    read ``self.training``, and hold no embedding lookup are kept whole and reported in ``leaves``. If code on the way to a lookup
    reads ``self.training``, there is a graph for each mode. No graph is taken that differs from the model on ``inputs``.

    Raises:
        CaptureError: the model is not a module, is already sharded or wrapped, or no front end can take it, in which case the
            message shows the user's line; or ``inputs`` hold numpy's arrays.
    """
    _check_model(model)
    if inputs is not None:
        _refuse_arrays(model, inputs)
        run_once(model, inputs)
    hiding: Captured | None = None
    symbolic: CaptureError | None = None
    for structure in (None, _structure(model, inputs)) if inputs is not None else (None,):
        if inputs is not None and structure is None and symbolic is not None:
            break
        try:
            captured = _capture_symbolically(model, structure)
            if inputs is None:
                return captured
            _refuse_other_results(captured, inputs)
            if not hides_a_lookup(captured, inputs):
                return captured
            hiding = hiding or captured
        except CaptureError as error:
            symbolic = error
    if inputs is None:
        raise CaptureError(f"{symbolic}\nWith example_inputs=(...) torch.export is tried as well, which takes more.") from symbolic
    try:
        return _capture_by_export(model, inputs)
    except CaptureError as error:
        if hiding is None:
            raise CaptureError(f"{symbolic}\n{error}") from error
        if not plain_calls.find_calls(hiding.flat) and not torchrec_adapter.find_collections(hiding.flat).lookups:
            whole = "\n".join(f"  {path}: {why}" for path, why in hiding.leaves.items())
            text = "could not be traced to its embedding lookups: they are in submodules that cannot be traced."
            raise CaptureError(f"{type(model).__name__} {text}\n{whole}\n{error}") from error
    return hiding


def _structure(model: nn.Module, inputs: Inputs) -> tracing.Structure | None:
    try:
        return tracing.structure_of(model, *inputs)
    except TypeError:
        # They do not fit forward, which is said where they are used.
        return None


def _refuse_other_results(captured: Captured, inputs: Inputs) -> None:
    difference = disagrees(captured, inputs)
    if difference is not None:
        raise CaptureError(
            f"{type(captured.root).__name__} was captured by {captured.front_end}, but not as it is.\n  {difference}"
        )


def _capture_symbolically(model: nn.Module, structure: tracing.Structure | None) -> Captured:
    whole: dict[str, str] = {}
    while True:
        mine = _trace(model, whole, _as_it_is, structure)
        # A graph would keep for ever the way that forward takes in the mode in which it is traced.
        other = _trace(model, whole, _flipped, structure)
        _adopt_constants(mine.root, other)
        node = _first_difference(mine.graph, other.graph)
        if node is None:
            return _captured(model, mine, {True: mine, False: mine}, "torch.fx")
        path = _innermost_without_lookup(node, mine, whole)
        if path is None:
            return _by_mode(model, mine, other, lambda prepare: _trace(model, whole, prepare, structure), "torch.fx")
        where = source_location(node) or type(model).__name__
        whole[path] = f"{where}: takes another way in training than in evaluation"


def _capture_by_export(model: nn.Module, inputs: Inputs) -> Captured:
    """Export ``model`` by running its forward, and if that fails, by Dynamo, which reads its code."""
    failure: CaptureError | None = None
    for strict in (False, True):
        try:
            captured = _capture_exported(model, *inputs, strict=strict)
            _refuse_other_results(captured, inputs)
            if captured.leaves and hides_a_lookup(captured, inputs):
                whole = "\n".join(f"  {path}: {why}" for path, why in captured.leaves.items())
                raise CaptureError(f"{type(model).__name__} could not be exported: what must stay whole holds a lookup.\n{whole}")
            return captured
        except CaptureError as error:
            if failure is not None and (further := _elsewhere(failure, error)):
                further += _advice(error.__cause__)
                raise CaptureError(f"{failure}\n  torch.export(strict=True) stops here:\n  {further}") from error
            failure = failure or error
    assert failure is not None
    raise failure


def _elsewhere(failure: CaptureError, further: CaptureError) -> str | None:
    """What a further attempt says of another line of the user's code; None if it stops where the one before has stopped."""
    first, second = (str(error).partition("\n")[2].strip() for error in (failure, further))
    place = _PLACE.match(second)
    return second.partition("\n")[0] if place is not None and not first.startswith(place[0]) else None


_PLACE = re.compile(r"\S+:\d+: ")


def _capture_exported(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, strict: bool) -> Captured:
    def trace(prepare: Callable[[nn.Module], None]) -> Traced:
        return _export(model, prepare, args, kwargs, strict)

    mine, other = trace(_as_it_is), trace(_flipped)
    _adopt_constants(mine.root, other)
    if _first_difference(mine.graph, other.graph) is None:
        return _captured(model, mine, {True: mine, False: mine}, "torch.export")
    return _by_mode(model, mine, other, trace, "torch.export")


def _captured(model: nn.Module, main: Traced, graphs: Mapping[bool, Traced], front_end: str) -> Captured:
    made: dict[int, fx.GraphModule] = {}
    for traced in graphs.values():
        if id(traced) not in made:
            made[id(traced)] = graph_module_over(main.root, traced.graph, traced.extras, f"Flat{type(model).__name__}")
    leaves = {path: why for traced in graphs.values() for path, why in traced.leaves.items()}
    return Captured({mode: made[id(traced)] for mode, traced in graphs.items()}, main.root, leaves, front_end)


def _by_mode(
    model: nn.Module, mine: Traced, other: Traced, trace: Callable[[Callable[[nn.Module], None]], Traced], front_end: str
) -> Captured:
    """A graph for training and one for evaluation, over the clone of ``mine``.

    Raises:
        CaptureError: modules of the model are in different modes, and the graph of that mixture is neither of the two.
    """
    mode = model.training
    if all(module.training == mode for module in model.modules()):
        return _captured(model, mine, {mode: mine, not mode: other}, front_end)
    graphs = {training: trace(lambda root, training=training: _set(root, training)) for training in (True, False)}  # type: ignore[misc]
    for traced in graphs.values():
        _adopt_constants(mine.root, traced)
    node = _first_difference(mine.graph, graphs[mode].graph)
    if node is not None:
        raise CaptureError(
            f"{source_location(node) or type(model).__name__}: the way to a lookup depends on self.training, and some modules of "
            "the model are in training mode and some are not: call model.train() or model.eval() before it is compiled"
        )
    return _captured(model, mine, graphs, front_end)


def _as_it_is(root: nn.Module) -> None:
    pass


def _flipped(root: nn.Module) -> None:
    for module in root.modules():
        module.training = not module.training


def _set(root: nn.Module, training: bool) -> None:
    root.train(training)


def _export(
    model: nn.Module, prepare: Callable[[nn.Module], None], args: tuple[Any, ...], kwargs: dict[str, Any], strict: bool
) -> Traced:
    from . import export, exported

    failure: Exception | None = None
    whole: dict[str, str] = {}
    sizes = [False, True]
    while sizes:
        # The clone that is exported is changed and thrown away.
        root, thrown_away = clone_sharing_tensors(model), clone_sharing_tensors(model, copy_buffers=True)
        prepare(thrown_away)
        try:
            program = export.export(thrown_away, args, kwargs, strict=strict, every_size=sizes[0], whole=whole)
            graph, extras = exported.to_graph(program, root)
            return Traced(root, graph, extras, whole)
        except Exception as error:
            if isinstance(error, LostBackward) and error.path is not None and error.path not in whole:
                whole[error.path] = reason(error)
                continue
            failure = failure or error
            if not isinstance(error, export.ExportError):
                break
            sizes.pop(0)
    why = str(failure) if isinstance(failure, export.ExportError) else reason(failure)  # type: ignore[arg-type]
    text = f"{type(model).__name__} could not be exported with example_inputs either.\n  {why}{_advice(failure)}"
    raise CaptureError(text) from failure


def _adopt_constants(root: nn.Module, traced: Traced) -> None:
    """Let a graph that was traced on another clone read the constants that tracing made from ``root``.

    Raises:
        CaptureError: a constant has no values: forward has kept it from a call in which there were none.
    """
    for node in traced.graph.nodes:
        value = traced.root.__dict__.get(str(node.target)) if node.op == "get_attr" else None
        if isinstance(value, FakeTensor):
            where = source_line(node)
            raise CaptureError(f"{type(root).__name__} could not be captured.\n  {f'{where}: ' if where else ''}{KEEPS}")
        if isinstance(value, torch.Tensor):
            node.target = _place_of_constant(str(node.target), value, root)


def _place_of_constant(name: str, value: torch.Tensor, root: nn.Module) -> str:
    held, candidate, number = root.__dict__.get(name), name, 0
    while held is not None and not _same_tensor(held, value):
        number += 1
        candidate = f"{name}_{number}"
        held = root.__dict__.get(candidate)
    root.__dict__.setdefault(candidate, value)
    return candidate


def _same_tensor(a: Any, b: torch.Tensor) -> bool:
    if not isinstance(a, torch.Tensor) or (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return a is b or (not a.is_meta and bool(torch.equal(a, b)))


def _trace(
    model: nn.Module,
    whole: Mapping[str, str],
    prepare: Callable[[nn.Module], None],
    structure: tracing.Structure | None,
) -> Traced:
    try:
        return tracing.trace(model, whole, prepare, structure)
    except Exception as error:
        raise _explain(error, model) from error


def _first_difference(a: fx.Graph, b: fx.Graph) -> fx.Node | None:
    """The first node of either graph that has no equal in the other."""
    place: dict[fx.Node, int] = {}
    pairs: list[tuple[fx.Node | None, fx.Node | None]] = list(zip_longest(a.nodes, b.nodes))
    for index, (mine, theirs) in enumerate(pairs):
        if mine is None or theirs is None:
            return mine or theirs
        place[mine] = place[theirs] = index
        if (mine.op, mine.target) != (theirs.op, theirs.target):
            return mine
        if _plain((mine.args, mine.kwargs), place) != _plain((theirs.args, theirs.kwargs), place):
            return mine
    return None


def _plain(value: Any, place: Mapping[fx.Node, int]) -> Any:
    """Arguments of a node in a form that can be compared between two graphs."""
    if isinstance(value, fx.Node):
        return ("node", place[value])
    if isinstance(value, list | tuple):
        return [_plain(item, place) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, place) for key, item in value.items()}
    if isinstance(value, slice):
        return [_plain(item, place) for item in (value.start, value.stop, value.step)]
    return value if isinstance(value, int | float | str | None) and value == value else type(value)


def _innermost_without_lookup(node: fx.Node, traced: Traced, whole: Mapping[str, str]) -> str | None:
    for path, _ in reversed(list(node.meta.get("nn_module_stack", {}).values())):
        if path and path not in whole and not _holds_lookup(str(path), traced):
            return str(path)
    return None


def _holds_lookup(path: str, traced: Traced) -> bool:
    module = traced.root.get_submodule(path)
    if torchrec_adapter.holds_collection(module) or plain_calls.holds_lookup(module):
        return True
    functional = (node for node in traced.graph.nodes if node.target in LOOKUPS)
    return any(path == inner for node in functional for inner, _ in node.meta.get("nn_module_stack", {}).values())


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise CaptureError(f"towerize takes an nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise CaptureError(
            f"the model is already wrapped in {type(model).__name__}: pass the module inside it (model.module); "
            "program.distribute() synchronises the dense gradients itself"
        )
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise CaptureError("the model is the result of torch.compile: pass the module it was made from (model._orig_mod)")
    torchrec_adapter.check_model(model)
    if torchrec_adapter.has_hooks(model) or type(model).__call__ is not nn.Module.__call__:
        raise CaptureError(
            f"{type(model).__name__} has hooks or a __call__ of its own, which the compiled program would not run: "
            "remove them and put them on the program, or move the model into a module around it"
        )
    if EXTRAS in model._modules:
        raise CaptureError(f"the model has a submodule called '{EXTRAS}', a name that the compiled program uses: rename it")


def _refuse_arrays(model: nn.Module, inputs: Inputs) -> None:
    found = arrays(by_name(*inputs, argument_names(inspect.signature(model.forward))))
    if found:
        raise CaptureError(
            f"example_inputs hold arrays of numpy, which are no inputs of a graph: {', '.join(found)}. Give tensors "
            "(torch.as_tensor), and let forward work on them by operators of torch"
        )


def _explain(error: Exception, model: nn.Module) -> CaptureError:
    why = f"{reason(error)}{_advice(error) or _BRANCHES}"
    return CaptureError(f"{type(model).__name__} could not be traced to its embedding lookups.\n  {why}")


def _advice(error: BaseException | None) -> str:
    return f"\n{error.advice}" if isinstance(error, LostBackward) else ""


_BRANCHES = (
    "\nCode outside submodules without lookups must not branch or loop on tensor values: move such code out of forward, "
    "or into a submodule that holds no lookup (it is then kept whole)."
)
