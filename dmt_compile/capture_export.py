"""Capture with torch.export, for models that symbolic tracing cannot take.

The model is exported as a function of a flat list of tensors, with every batch dimension dynamic. Modules of torch.nn stay
whole, and so does ``embedding_bag``: each call of one is a single node of an operator of our own, which
:mod:`exported` turns back into a call of the module. So the graph looks as symbolic tracing would have left it, and layers go on
looking at their own mode.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_symbols, is_concrete_int
from torch.overrides import TorchFunctionMode

from .adapters import torchrec as torchrec_adapter
from .adapters.torchrec_parts import IDS, pooled_like
from .arguments import Arguments
from .nested import Path, Template, take_apart
from .sources import quoted, user_frame


class ExportError(Exception):
    """torch.export took the model, but for fewer inputs than the flat model takes."""


@dataclass
class Kept:
    """One call that stays whole: the module's path or the function, what it is given, and the template of what it returns."""

    target: str | Callable[..., Any]
    given: Template
    run: Callable[..., Any]
    returned: Template | None = None


@dataclass(frozen=True)
class Exported:
    """A model as torch.export sees it: a program from tensors to tensors, and the way from and to the user's values."""

    program: torch.export.ExportedProgram
    arguments: Arguments
    shapes: tuple[tuple[int | None, ...], ...]
    returned: Template
    kept: dict[int, Kept]


_KEPT: dict[int, Kept] = {}
_numbers = itertools.count()


@torch.library.custom_op("dmt_compile::keep", mutates_args=())
def _keep(key: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    raise RuntimeError("dmt_compile::keep stands in graphs only while they are captured")


@_keep.register_fake
def _(key: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    kept = _KEPT[key]
    args, kwargs = kept.given.build(tensors)
    leaves, kept.returned = take_apart(kept.run(*args, **kwargs))
    # An operator may not return what it was given.
    return [leaf.clone() for leaf in leaves]


KEEP = torch.ops.dmt_compile.keep.default
# A module whose result is not used may still write to what it is given.
fx.node.has_side_effect(KEEP)


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, every_size: bool = False) -> Exported:
    """Export ``model``, which is a clone that may be changed, in the mode that it is in.

    Only the first size of every tensor may be another one later than in the example; with ``every_size``, any that the model
    does not depend on, as for offsets of several features in one tensor, (F, B).

    Raises:
        ExportError: the exported program would not hold for every batch size.
        Exception: what torch.export raises for what it cannot take.
    """
    leaves, arguments = Arguments.of(model, args, kwargs)
    leaves = _at_least_two(leaves, arguments)
    result: list[Template] = []
    wrapper = _Flat(model, arguments, result)
    auto = torch.export.Dim.AUTO
    free = [range(leaf.dim() if every_size else min(leaf.dim(), 1)) if isinstance(leaf, torch.Tensor) else () for leaf in leaves]
    dims = tuple(dict.fromkeys(sizes, auto) or None for sizes in free)
    kept: dict[int, Kept] = {}
    _keep_modules(model, kept)
    try:
        with _quiet(), _sizes_stay_symbolic(model), _KeepFunctions(kept), _decisions() as decisions:
            program = torch.export.export(wrapper, tuple(leaves), dynamic_shapes=(dims,), strict=False)
        shapes = _checked_shapes(program, arguments, decisions)
        return Exported(program, arguments, shapes, result[-1], kept)
    finally:
        for key in kept:
            _KEPT.pop(key, None)


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


def is_kept(module: nn.Module) -> bool:
    """Whether symbolic tracing would keep a module whole."""
    if torchrec_adapter.is_collection(module) or torchrec_adapter.must_stay_whole(module):
        return True
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def _keep_modules(model: nn.Module, book: dict[int, Kept]) -> None:
    """Let every call of a torch.nn module become one node."""
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if path and is_kept(module) and module not in inside:
            inside.update(module.modules())
            # The call in the graph runs them.
            for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                getattr(module, name).clear()
            run = functools.partial(pooled_like, module) if torchrec_adapter.is_collection(module) else module.forward
            module.__dict__["forward"] = _stand_in(path, run, book)


def _stand_in(target: str | Callable[..., Any], run: Callable[..., Any], book: dict[int, Kept]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors, given = take_apart((args, kwargs))
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return run(*args, **kwargs)
        key = next(_numbers)
        _KEPT[key] = book[key] = kept = Kept(target, given, run)
        found = KEEP(key, tensors)
        assert kept.returned is not None
        return kept.returned.build(found)

    return forward


class _KeepFunctions(TorchFunctionMode):
    """Keeps ``embedding_bag``, whose operator returns more than the bags and takes ids in another form than the function."""

    def __init__(self, book: dict[int, Kept]) -> None:
        super().__init__()
        self.book = book

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.embedding_bag:
            return _stand_in(func, func, self.book)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Decision:
    """A line of the user's code that has asked for more than torch.export knows about a size."""

    symbols: frozenset[Any]
    line: str


@contextlib.contextmanager
def _decisions() -> Iterator[list[_Decision]]:
    """Note every decision about a size: an exported program tells what it took for granted, but not where."""
    found: list[_Decision] = []
    evaluate = ShapeEnv.evaluate_expr

    def watched(self: ShapeEnv, expr: Any, *args: Any, **kwargs: Any) -> Any:
        before = self._version_counter, len(self.guards)
        result = evaluate(self, expr, *args, **kwargs)
        if (self._version_counter, len(self.guards)) != before:
            place = user_frame(sys._getframe(1))
            if place is not None:
                found.append(_Decision(frozenset(expr.free_symbols), quoted(place[0].co_filename, place[1])))
        return result

    ShapeEnv.evaluate_expr = watched  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        ShapeEnv.evaluate_expr = evaluate  # type: ignore[method-assign]


def _line(symbols: Iterable[Any], decisions: Sequence[_Decision]) -> str:
    """The first decision about a size of these symbols, as the start of a message."""
    wanted = set(symbols)
    # Sizes of several inputs are compared with each other, too.
    alone = [d.line for d in decisions if d.symbols & wanted and len(d.symbols) == 1]
    lines = alone or [d.line for d in decisions if d.symbols & wanted] or [d.line for d in decisions if len(d.symbols) == 1]
    return f"{lines[0]}: " if lines else "forward "


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
    program: torch.export.ExportedProgram, arguments: Arguments, decisions: Sequence[_Decision]
) -> tuple[tuple[int | None, ...], ...]:
    """The sizes that the program holds for, None for any.

    Raises:
        ExportError: it holds for some batch sizes only.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    found = [values[str(name)] for name in program.graph_signature.user_inputs]
    sizes_of = [tuple(value.shape) if isinstance(value, torch.Tensor) else () for value in found]
    shapes = tuple(tuple(int(size) if is_concrete_int(size) else None for size in sizes) for sizes in sizes_of)
    for shape, sizes, path in zip(shapes, sizes_of, arguments.template.paths, strict=True):
        if shape and shape[0] is not None and not any(size is None for size in shape):
            label = arguments.names[path[0].key] + "".join(map(str, path[1:]))
            # What it was before it became a constant.
            symbols = getattr(getattr(sizes[0], "node", None), "_expr", None)
            where = _line(getattr(symbols, "free_symbols", ()), decisions)
            what = "number of ids" if _is_ids(path) else "batch size"
            raise ExportError(f"{where}takes the {what} of '{label}' for the constant {int(sizes[0])}")
    # A size that stands beside others that may change need not be the batch's.
    alone = [sizes[0] for shape, sizes in zip(shapes, sizes_of, strict=True) if shape[:1] == (None,) and shape.count(None) == 1]
    others = free_symbols(sizes_of) - free_symbols(alone)
    ids = free_symbols([sizes for sizes, path in zip(sizes_of, arguments.template.paths, strict=True) if _is_ids(path)])
    for symbol, allowed in program.range_constraints.items():
        if symbol.is_Symbol and symbol not in others and not (allowed.lower <= 2 and allowed.upper > 2**31):
            upper = f" to {allowed.upper}" if allowed.upper < 2**31 else " or more"
            where = _line({symbol}, decisions)
            what = "ids" if symbol in ids else "samples"
            raise ExportError(f"{where}takes another way for batches that are not of {allowed.lower}{upper} {what}")
    return shapes
