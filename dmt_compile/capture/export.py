"""Capture with torch.export, for models that symbolic tracing cannot take.

The model is exported as a function of a flat list of tensors, with every batch dimension dynamic. Modules of torch.nn stay
whole (:mod:`kept`), so the graph looks as symbolic tracing would have left it, and layers go on looking at their own mode.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import OutputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_symbols, is_concrete_int

from ..adapters.torchrec_parts import IDS
from ..graphs import clone_sharing_tensors, deepcopy_values
from ..nested import Path, Template, take_apart
from .arguments import Arguments
from .backward import loses_on_tensors, refuse_backward
from .captured import WithoutMaxNorm
from .kept import Kept, Signature, kept_calls, signatures
from .sources import quoted, user_place


class ExportError(Exception):
    """torch.export took the model, but for fewer inputs than the flat model takes."""


@dataclass(frozen=True)
class Exported:
    """A model as torch.export sees it: a program from tensors to tensors, and the way from and to the user's values."""

    program: torch.export.ExportedProgram
    arguments: Arguments
    shapes: tuple[tuple[int | None, ...], ...]
    returned: Template
    kept: dict[int, Kept]


def export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    strict: bool = False,
    every_size: bool = False,
    whole: Collection[str] = (),
) -> Exported:
    """Export ``model``, which is a clone that may be changed, in the mode that it is in. Submodules in ``whole`` are kept whole.

    With ``strict``, Dynamo reads forward's code, and understands numpy and conversions of sizes, which running it does not; what
    forward returns, and what modules that stay whole are given, is then learnt from a run on the inputs.

    Only the first size of every tensor may be another one later than in the example; with ``every_size``, any that the model
    does not depend on, as for offsets of several features in one tensor, (F, B).

    Raises:
        ExportError: the exported program would not hold for every batch size.
        LostBackward: forward applies a torch.autograd.Function.
        Exception: what torch.export raises for what it cannot take.
    """
    given, arguments = Arguments.of(model, args, kwargs)
    leaves = _at_least_two(given, arguments)
    result: list[Template] = []
    seen = _run_once(model, arguments, given, result, whole) if strict else None
    wrapper = _Flat(model, arguments, result)
    auto = torch.export.Dim.AUTO
    free = [range(leaf.dim() if every_size else min(leaf.dim(), 1)) if isinstance(leaf, torch.Tensor) else () for leaf in leaves]
    dims = tuple(dict.fromkeys(sizes, auto) or None for sizes in free)
    # Dynamo takes Functions for what their forward computes, and the run before has met them.
    watched = contextlib.nullcontext() if strict else _watched(model)
    with _quiet(), watched, _without_cache(), kept_calls(model, seen, whole) as kept, _decisions() as decisions:
        program = torch.export.export(wrapper, tuple(leaves), dynamic_shapes=(dims,), strict=strict)
    shapes = _checked_shapes(program, arguments, leaves, decisions)
    returned = result[0] if strict else result[-1]
    if len(returned.paths) != sum(spec.kind is OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs):
        raise ExportError("forward returns a size of its inputs beside its tensors")
    return Exported(program, arguments, shapes, returned, kept)


def _without_cache() -> contextlib.AbstractContextManager[Any]:
    """Operators on fake tensors are not looked up by their arguments: keys of symbolic sizes cost more than what they save."""
    import torch._dynamo.config as dynamo

    patched: contextlib.AbstractContextManager[Any] = dynamo.patch(fake_tensor_cache_enabled=False)
    return patched


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[None]:
    with _sizes_stay_symbolic(model), refuse_backward(model, loses_on_tensors):
        yield


def _run_once(
    model: nn.Module, arguments: Arguments, leaves: list[Any], result: list[Template], whole: Collection[str]
) -> dict[str, Signature]:
    """Run a copy of the model, which says what forward returns, and what its modules are given and return."""
    copy = clone_sharing_tensors(model, copy_buffers=True)
    run = _Flat(copy, arguments, result)
    lost = refuse_backward(copy, loses_on_tensors)
    with _quiet(), torch.no_grad(), torch.random.fork_rng(devices=[]), WithoutMaxNorm(), lost:
        return signatures(copy, lambda: run(*deepcopy_values(leaves)), whole)


def _at_least_two(leaves: list[Any], arguments: Arguments) -> list[Any]:
    """Batches of one sample doubled, and ids of a KeyedJaggedTensor filled up: torch.export takes sizes of 0 and 1 for constants.

    It sees no values, so the ids need not fit their lengths.
    """
    tensors = [isinstance(leaf, torch.Tensor) and leaf.dim() > 0 for leaf in leaves]
    ids = [_is_ids(path) for path in arguments.template.paths]
    alone = {leaf.shape[0] for leaf, tensor, many in zip(leaves, tensors, ids, strict=True) if tensor and not many} == {1}
    return [
        leaf.new_zeros(max(2, len(leaf))) if many else torch.cat([leaf, leaf]) if tensor and alone else leaf
        for leaf, tensor, many in zip(leaves, tensors, ids, strict=True)
    ]


def _is_ids(path: Path) -> bool:
    return path[-1].by_attribute and path[-1].key in IDS


class _Flat(nn.Module):
    """The model as a function of a flat list of tensors that returns one."""

    def __init__(self, model: nn.Module, arguments: Arguments, result: list[Template]) -> None:
        super().__init__()
        self.model = model
        self._call = (arguments, result)

    def forward(self, *leaves: torch.Tensor) -> list[Any]:
        arguments, result = self._call
        bound = arguments.bind(leaves)
        found, returned = take_apart(self.model(*bound.args, **bound.kwargs))
        result.append(returned)
        return found


@dataclass(frozen=True)
class _Decision:
    """A line of the user's code that has asked for more than torch.export knows about a size."""

    symbols: frozenset[Any]
    line: str
    expression: Any
    result: Any

    def fails_for(self, symbol: Any) -> int | None:
        """A size for which the code would have decided otherwise, if only this one size decides."""
        if self.symbols != {symbol} or self.result not in (True, False):
            return None
        return next((size for size in _TRIED if _decided(self.expression, symbol, size) is (not self.result)), None)


def _decided(expression: Any, symbol: Any, size: int) -> bool | None:
    """What code would decide for a size; None where the expression has no value."""
    try:
        found = expression.subs(symbol, size)
    except ZeroDivisionError:
        return None
    return bool(found) if found in (True, False) else None


_TRIED = (*range(5, 34), 64, 100, 1000, 4097, 1 << 20)


@contextlib.contextmanager
def _decisions() -> Iterator[list[_Decision]]:
    """Note every decision about a size: an exported program tells what it took for granted, but not where."""
    found: list[_Decision] = []
    evaluate = ShapeEnv.evaluate_expr

    def watched(self: ShapeEnv, expr: Any, *args: Any, **kwargs: Any) -> Any:
        before = self._version_counter, len(self.guards)
        result = evaluate(self, expr, *args, **kwargs)
        if (self._version_counter, len(self.guards)) != before:
            place = user_place(sys._getframe(1))
            if place is not None:
                found.append(_Decision(frozenset(expr.free_symbols), quoted(*place), expr, result))
        return result

    ShapeEnv.evaluate_expr = watched  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        ShapeEnv.evaluate_expr = evaluate  # type: ignore[method-assign]


def _line(symbols: Iterable[Any], decisions: Sequence[_Decision]) -> str:
    """The decision about a size of these symbols that tells most, the first of its kind, as the start of a message."""
    wanted = _compared(set(symbols), decisions)
    alone = [d for d in decisions if d.symbols & wanted and len(d.symbols) == 1]
    # That a size is not 0 or 1 is decided in passing.
    deciding = [d for d in alone if d.fails_for(*d.symbols) is not None]
    found = deciding or alone or [d for d in decisions if d.symbols & wanted] or [d for d in decisions if len(d.symbols) == 1]
    return f"{found[0].line}: " if found else "forward "


def _compared(symbols: set[Any], decisions: Sequence[_Decision]) -> set[Any]:
    """Sizes of several inputs are compared with each other, and what is then decided about one of them holds for all."""
    while more := {s for d in decisions if d.symbols & symbols for s in d.symbols} - symbols:
        symbols = symbols | more
    return symbols


class _IntType(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and isinstance(args[0], torch.SymInt) else int(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, int)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, int)


class _Int(int, metaclass=_IntType):
    """``int``, but a symbolic integer stays one."""


def _len(value: Any) -> Any:
    """``len``, but the length of a tensor stays symbolic."""
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else len(value)


@contextlib.contextmanager
def _sizes_stay_symbolic(model: nn.Module) -> Iterator[None]:
    """Replace ``len`` and ``int`` where the model's classes are defined: Python makes constants of what they return."""
    spaces: dict[int, dict[str, Any]] = {}
    for kind in {cls for module in model.modules() for cls in type(module).__mro__ if cls.__module__.partition(".")[0] != "torch"}:
        for function in vars(kind).values():
            space = getattr(function, "__globals__", None)
            if space is not None:
                spaces[id(space)] = space
    replaced = [(space, name) for space in spaces.values() for name in ("len", "int") if name not in space]
    for space, name in replaced:
        space[name] = _len if name == "len" else _Int
    try:
        yield
    finally:
        for space, name in replaced:
            del space[name]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what torch.export says about the clone."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        # Before an error it prints the graph that it has so far.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _checked_shapes(
    program: torch.export.ExportedProgram, arguments: Arguments, leaves: Sequence[Any], decisions: Sequence[_Decision]
) -> tuple[tuple[int | None, ...], ...]:
    """The sizes that the program holds for, None for any.

    Raises:
        ExportError: it holds for some batch sizes only.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    found = [values[str(name)] for name in program.graph_signature.user_inputs]
    sizes_of = [tuple(value.shape) if isinstance(value, torch.Tensor) else () for value in found]
    given = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else () for leaf in leaves]
    shapes = [tuple(int(size) if is_concrete_int(size) else None for size in sizes) for sizes in sizes_of]
    ids = [_is_ids(path) for path in arguments.template.paths]
    # Of a size that stands beside others that may change, only the example tells whether it is the batch's.
    samples = [size[0] for size, many in zip(given, ids, strict=True) if size and not many]
    alone = [size[0] for size, shape, many in zip(given, shapes, ids, strict=True) if _is_batch(shape) and not many]
    batch = set(alone or samples)
    constrained = {
        symbol: allowed
        for symbol, allowed in program.range_constraints.items()
        if symbol.is_Symbol and not (allowed.lower <= 2 and allowed.upper > 2**31)
    }
    for index, (shape, sizes, path, many) in enumerate(zip(shapes, sizes_of, arguments.template.paths, ids, strict=True)):
        for place, (size, symbolic) in enumerate(zip(shape, sizes, strict=True)):
            first = place == 0 and (many or given[index][0] in batch or shape.count(None) == (size is None))
            if size is not None:
                if first:
                    label = arguments.names[path[0].key] + "".join(map(str, path[1:]))
                    # What it was before it became a constant.
                    symbols = getattr(getattr(symbolic, "node", None), "_expr", None)
                    where = _line(getattr(symbols, "free_symbols", ()), decisions)
                    raise ExportError(f"{where}takes the {_COUNTED[many][0]} of '{label}' for the constant {size}: {_HINT}")
                continue
            for symbol in free_symbols(symbolic):
                other = next(filter(None, (decision.fails_for(symbol) for decision in decisions)), None)
                if symbol not in constrained and other is None:
                    continue
                if first and symbol not in constrained:
                    raise ExportError(f"{_line({symbol}, decisions)}takes another way for {other} {_COUNTED[many][1]}: {_SAME}")
                if first:
                    allowed = constrained[symbol]
                    upper = f" to {allowed.upper}" if allowed.upper < 2**31 else " or more"
                    where = _line({symbol}, decisions)
                    held = f"{allowed.lower}{upper} {_COUNTED[many][1]}"
                    raise ExportError(f"{where}takes another way for batches that are not of {held}: {_SAME}")
                # It holds for this size.
                shapes[index] = (*shapes[index][:place], given[index][place], *shapes[index][place + 1 :])
    return tuple(shapes)


_HINT = "loops over it, comparisons with a number, numpy and lists make a number of it, operators of torch do not"
_SAME = "forward has to take the same way for any number"
_COUNTED = {False: ("batch size", "samples"), True: ("number of ids", "ids")}


def _is_batch(shape: tuple[int | None, ...]) -> bool:
    return shape[:1] == (None,) and shape.count(None) == 1
