"""Which nodes of a graph write to what they are given, and which change how all nodes behind them run."""

from __future__ import annotations

import inspect

from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket


def may_write(node: fx.Node) -> bool:
    """Whether a call of a function or method may write to its arguments. A user's own function may do anything."""
    if node.op not in ("call_function", "call_method"):
        return False
    target = node.target
    if isinstance(target, OpOverload):
        return bool(target._schema.is_mutable)
    if node.op == "call_function" and not _is_library(target):
        return True
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return _inplace(node) or node.kwargs.get("out") is not None or _writes_by_name(name) or _mutable(target)


def returns(node: fx.Node) -> fx.Node | None:
    """The argument that a call writes to and returns, as ``x.add_(1)``, ``x += 1``, ``relu(x, inplace=True)`` and ``out=`` do."""
    if not may_write(node):
        return None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if isinstance(node.target, OpOverload):
        name = node.target._schema.name
    found = node.kwargs.get("out")
    if found is None and _is_library(node.target) and (_inplace(node) or _writes_its_own(name)):
        found = node.args[0] if node.args else node.kwargs.get("input")
    return found if isinstance(found, fx.Node) else None


def changes_mode(node: fx.Node) -> bool:
    """Whether a node enters or leaves a mode, such as autocast, in which the nodes behind it run."""
    if node.op != "call_function" or isinstance(node.target, OpOverload | OpOverloadPacket | HigherOrderOperator):
        return False
    name, home = getattr(node.target, "__name__", ""), getattr(node.target, "__module__", None) or ""
    return name.startswith(("_enter_", "_exit_")) or home.startswith(("torch._C._functorch", "torch._functorch"))


# Functions that keep running statistics in tensors they are given.
_KEEPING = ("batch_norm", "instance_norm")


def _is_library(function: object) -> bool:
    """Whether a function is torch's, Python's or this package's own; a user's may do anything."""
    home = getattr(function, "__module__", None) or "builtins"
    return home.partition(".")[0] in ("torch", "torchrec", "_operator", "operator", "math", "builtins", "dmt_compile")


def _inplace(node: fx.Node) -> bool:
    if node.kwargs.get("inplace"):
        return True
    if node.op != "call_function" or not callable(node.target):
        return False
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return False  # Built in: nothing there has such an argument.
    return given.arguments.get("inplace") is True


def _mutable(target: object) -> bool:
    """Whether a packet of operators has one whose schema says that it writes to an argument."""
    if isinstance(target, OpOverloadPacket):
        return any(getattr(target, overload)._schema.is_mutable for overload in target.overloads())
    return False


def _writes_by_name(name: str) -> bool:
    """By torch's naming: ``add_``; by the operator module's: ``iadd``, ``setitem``; and by the functions that keep statistics."""
    return _writes_its_own(name) or name.strip("_") in ("setitem", "delitem") or any(word in name for word in _KEEPING)


def _writes_its_own(name: str) -> bool:
    """Whether what is called so writes to its first argument and returns it."""
    if name.startswith("__"):
        name = name.strip("_")
    elif name.endswith("_"):
        return True
    return name.startswith("i") and name[1:] in _INPLACE


_INPLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
