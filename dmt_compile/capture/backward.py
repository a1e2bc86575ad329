"""Backward code of the user's own, in a ``torch.autograd.Function``: a graph has what forward computes, and would lose it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from ..adapters import plain_calls
from ..adapters import torchrec as torchrec_adapter

# Every Function's ``apply`` goes through that of this class, also one that was looked up before (``relu = MyRelu.apply``).
_BASE: Any = torch.autograd.Function.__base__
_whole = 0


class LostBackward(TypeError):
    """Forward applies a Function where a graph would lose its backward.

    ``path`` is a submodule to keep whole for it, if any, and ``advice`` what the user can do.
    """

    def __init__(self, kind: type, path: str | None) -> None:
        super().__init__(f"forward applies {kind.__name__}, a torch.autograd.Function, whose backward a graph would lose")
        self.path = path
        self.advice = "Apply it in a submodule of its own that holds no lookup (it is then kept whole)."
        if kind is checkpoint.CheckpointFunction:
            self.advice = "Checkpoint with use_reentrant=False."


@contextmanager
def kept_whole() -> Iterator[None]:
    """What runs here is called by the graph as it is, with its backward."""
    global _whole
    _whole += 1
    try:
        yield
    finally:
        _whole -= 1


@contextmanager
def refuse_backward(root: nn.Module, loses: Callable[[type, list[Any]], bool]) -> Iterator[None]:
    """Let forward apply no Function while ``root`` is captured, if ``loses`` says so of its class and of what it is given.

    Raises:
        LostBackward: forward applies one, where there are gradients.
    """
    before, grad = _BASE.__dict__.get("apply"), torch.is_grad_enabled()

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        # Under the user's own no_grad there is no backward to lose.
        trained = torch.is_grad_enabled() or not grad
        if trained and not _whole and loses(cls, tree_leaves((args, kwargs))):
            raise LostBackward(cls, _innermost_without_lookup(sys._getframe(1), root))
        return super(_BASE, cls).apply(*args, **kwargs)

    _BASE.apply = classmethod(apply)
    try:
        yield
    finally:
        if before is None:
            del _BASE.apply
        else:
            _BASE.apply = before


def loses_on_tensors(kind: type, given: list[Any]) -> bool:
    """Whether a Function computes something that could be trained. torch's machinery applies Functions of private modules."""
    private = kind.__module__.startswith("torch._")
    return not private and any(isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) for x in given)


def _innermost_without_lookup(frame: FrameType | None, root: nn.Module) -> str | None:
    """The path of the innermost module whose call is running and that holds no lookup; None if that is no submodule."""
    paths = {module: path for path, module in root.named_modules()}
    while frame is not None:
        module = frame.f_locals["self"] if frame.f_code is nn.Module._call_impl.__code__ else None
        if module is not None and module in paths:
            lookup = torchrec_adapter.holds_collection(module) or plain_calls.holds_lookup(module)
            return None if lookup else paths[module] or None
        frame = frame.f_back
    return None
