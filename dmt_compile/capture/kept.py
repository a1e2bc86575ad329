"""Calls that stay whole while torch.export takes a model: each is one node of an operator of our own.

Modules of torch.nn and lookup collections stay whole, and so does ``embedding_bag``; :mod:`exported` turns the node back into
a call of the module.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from ..adapters import torchrec as torchrec_adapter
from ..adapters.torchrec_parts import pooled_like
from ..nested import Template, constants, take_apart
from .backward import kept_whole


@dataclass
class Kept:
    """One call that stays whole: the module's path or the function, what it is given, and the template of what it returns."""

    target: str | Callable[..., Any]
    given: Template
    run: Callable[..., Any]
    returned: Template | None = None


_KEPT: dict[int, Kept] = {}
_numbers = itertools.count()


@torch.library.custom_op("dmt_compile::keep", mutates_args=())
def _keep(key: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    raise RuntimeError("dmt_compile::keep stands in graphs only while they are captured")


@_keep.register_fake
def _(key: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    kept = _KEPT[key]
    args, kwargs = kept.given.build(tensors)
    with kept_whole():
        leaves, kept.returned = take_apart(kept.run(*args, **kwargs))
    # An operator may not return what it was given.
    return [leaf.clone() for leaf in leaves]


KEEP = torch.ops.dmt_compile.keep.default
# A module whose result is not used may still write to what it is given.
fx.node.has_side_effect(KEEP)


def is_kept(module: nn.Module) -> bool:
    """Whether symbolic tracing would keep a module whole."""
    if torchrec_adapter.is_collection(module) or torchrec_adapter.must_stay_whole(module):
        return True
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


StandIn = Callable[[str, Callable[..., Any]], Callable[..., Any]]
Signature = tuple[Template, Template]
"""What a call is given, and what it returns."""


@contextmanager
def kept_calls(
    model: nn.Module, signatures: Mapping[str, Signature] | None = None, whole: Collection[str] = ()
) -> Iterator[dict[int, Kept]]:
    """Let every call of a torch.nn module, and of those in ``whole``, become one node.

    With ``signatures``, calls of these modules, which all look alike.

    Python's code runs when torch.export traces, so a call can say what it is given. Dynamo reads the code instead: there each
    module has one number, and what its calls look like is known before.
    """
    book: dict[int, Kept] = {}
    try:
        if signatures is None:
            stand_in(model, lambda path, run: _noted(path, run, book), whole)
            with _KeepFunctions(book):
                yield book
        else:
            stand_in(model, lambda path, run: _known(path, run, book, signatures.get(path), path in whole), whole)
            yield book
    finally:
        for key in book:
            _KEPT.pop(key, None)


def signatures(model: nn.Module, call: Callable[[], object], whole: Collection[str] = ()) -> dict[str, Signature]:
    """What the calls of modules look like in ``call()``: of those that are always called alike."""
    seen: dict[str, list[Signature]] = {}

    def watched(path: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = take_apart((args, kwargs))[1]
            with kept_whole():
                result = run(*args, **kwargs)
            seen.setdefault(path, []).append((given, take_apart(result)[1]))
            return result

        return forward

    stand_in(model, watched, whole, real=True)
    call()
    alike = {path: found[0] for path, found in seen.items() if all(one == found[0] for one in found)}
    return {path: signature for path, signature in alike.items() if not _has_number(signature[0])}


def _has_number(given: Template) -> bool:
    """Whether a call is given a whole number, which may be a size of this batch."""
    return any(type(value) is int for value in constants(given.value))


def stand_in(model: nn.Module, make: StandIn, whole: Collection[str] = (), *, real: bool = False) -> None:
    """Replace the forward of every module that is kept whole; a collection's, unless ``real``, by one that knows only shapes."""
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if path and (is_kept(module) or path in whole) and module not in inside:
            inside.update(module.modules())
            # The call in the graph runs them.
            for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                getattr(module, name).clear()
            pooled = torchrec_adapter.is_collection(module) and not real
            module.__dict__["forward"] = make(path, functools.partial(pooled_like, module) if pooled else module.forward)


def _noted(target: str | Callable[..., Any], run: Callable[..., Any], book: dict[int, Kept]) -> Callable[..., Any]:
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


def _known(
    target: str, run: Callable[..., Any], book: dict[int, Kept], signature: Signature | None, whole: bool
) -> Callable[..., Any]:
    if signature is None and whole:
        return _refuse_calls
    if signature is None:
        # What only knows shapes must not be read as if it were the collection.
        return _refuse if isinstance(run, functools.partial) and run.func is pooled_like else run
    key, (given, returned) = next(_numbers), signature
    _KEPT[key] = book[key] = Kept(target, given, run, returned)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return returned.build(KEEP(key, take_apart((args, kwargs))[0]))

    return forward


def _refuse(*_args: Any, **_kwargs: Any) -> Any:
    raise TypeError("a collection is called with KeyedJaggedTensors of different keys")


def _refuse_calls(*_args: Any, **_kwargs: Any) -> Any:
    raise TypeError("a submodule that must stay whole is called with whole numbers, or with other arguments from call to call")


class _KeepFunctions(TorchFunctionMode):
    """Keeps ``embedding_bag``, whose operator returns more than the bags and takes ids in another form than the function."""

    def __init__(self, book: dict[int, Kept]) -> None:
        super().__init__()
        self.book = book

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.embedding_bag:
            return _noted(func, func, self.book)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
