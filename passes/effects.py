"""Which nodes may not change places: those that draw random numbers, and those that write to a tensor they are given."""

from __future__ import annotations

import inspect

from torch import Tag, fx, nn
from torch._ops import OpOverload, OpOverloadPacket

from dmt_compile.graphs import EXTRAS

from .base import Draft

# torch.nn modules that draw nothing and write nothing, unless they are made with inplace=True.
_PURE = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Identity,
    nn.Linear,
    nn.Bilinear,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.Conv1d,
    nn.Conv2d,
    nn.Flatten,
    nn.Unflatten,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.PReLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softplus,
    nn.Softmax,
    nn.LogSoftmax,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.CrossEntropyLoss,
    nn.MSELoss,
)
# torch.nn modules that draw random numbers while training, or keep statistics of their own, but leave their input alone.
_DRAWING = (
    nn.modules.dropout._DropoutNd,
    nn.modules.batchnorm._BatchNorm,
    nn.MultiheadAttention,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)
# Attention draws when it is given a dropout probability.
_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal", "poisson", "rrelu", "gumbel", "attention")
# Functions that keep running statistics in tensors they are given.
_KEEPING = ("batch_norm", "instance_norm")


def effect_of(draft: Draft, node: fx.Node) -> str:
    """ "draws" for a node that draws random numbers or keeps state of its own, "writes" for one that may also change a tensor
    that another node reads, "" for one without either."""
    if node.op == "call_module":
        if str(node.target).startswith(f"{EXTRAS}."):
            return ""
        module = draft.module(node)
        if getattr(module, "inplace", False) and _only_reader_of_a_fresh_tensor(draft, node):
            return "draws" if isinstance(module, _DRAWING) else ""
        return max((_module_effect(child) for child in module.modules()), key=_STRENGTH.index)
    if node.op not in ("call_function", "call_method"):
        return ""
    if isinstance(node.target, OpOverload):
        return _operator_effect(node.target)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    if node.op == "call_function" and not _is_library(node.target):
        return "writes"
    if _inplace(node) or node.kwargs.get("out") is not None or _writes(name) or _mutable(node.target):
        return "writes"
    return "draws" if any(word in name for word in _RANDOM) else ""


def _operator_effect(target: OpOverload) -> str:
    if target._schema.is_mutable:
        return "writes"
    name = target._schema.name
    # Batch norm writes to the statistics that it is given without saying so.
    draws = Tag.nondeterministic_seeded in target.tags or any(word in name for word in (*_RANDOM, "batch_norm", "instance_norm"))
    return "draws" if draws else ""


_STRENGTH = ["", "draws", "writes"]


def _only_reader_of_a_fresh_tensor(draft: Draft, node: fx.Node) -> bool:
    """Whether what ``node`` writes to was made by a layer for it alone, as in Linear, ReLU(inplace=True)."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source.op != "call_module" or len(source.users) != 1:
        return False
    return isinstance(draft.module(source), nn.Linear | nn.LayerNorm | nn.modules.batchnorm._BatchNorm)


def _module_effect(module: nn.Module) -> str:
    if getattr(module, "inplace", False):
        return "writes"
    if type(module) in _PURE:
        return ""
    return "draws" if isinstance(module, _DRAWING) else "writes"


def _is_library(function: object) -> bool:
    """Whether a function is torch's or Python's own; a user's may do anything."""
    home = getattr(function, "__module__", None) or "builtins"
    return home.partition(".")[0] in ("torch", "torchrec", "_operator", "operator", "math", "builtins")


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


def _writes(name: str) -> bool:
    """By torch's naming: ``add_``; by the operator module's: ``iadd``, ``setitem``; and by the functions that keep statistics."""
    if any(word in name for word in _KEEPING):
        return True
    if name.endswith("_") and not name.endswith("__"):
        return True
    return name in ("setitem", "delitem") or (name.startswith("i") and name[1:] in _INPLACE)


_INPLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
