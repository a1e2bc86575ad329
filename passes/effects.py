"""Which nodes may not change places: those that draw random numbers, and those that write to a tensor they are given."""

from __future__ import annotations

from torch import Tag, fx, nn
from torch._ops import OpOverload

from dmt_compile.graphs import EXTRAS
from dmt_compile.writes import changes_mode, may_write

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
    if changes_mode(node) or may_write(node):
        return "writes"
    if isinstance(node.target, OpOverload):
        return _operator_effect(node.target)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return "draws" if any(word in name for word in _RANDOM) else ""


def _operator_effect(target: OpOverload) -> str:
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
