"""Sizes as algebra: which sizes in a graph follow from the number and the width of its vectors.

Every dimension of every parameter becomes a symbol of its own, and the vectors that are to change bring theirs. The graph then runs
on tensors without values, and whatever two sizes an operator needs to be equal, torch's symbolic shapes make equal: the number of
inputs of a layer becomes 27 * N because 27 vectors of N columns are given to it, the bottom layer's outputs become N because its
vector is put beside them. Numbers that the graph holds itself (``view(-1, 27, 128)``) are read as sizes in the same way, see
:mod:`literals`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

Size = int | torch.SymInt


class Unfit(Exception):
    """A size that does not follow from those of the vectors; says where."""


class Symbols:
    """Symbolic sizes with the values that they have in the flat model."""

    def __init__(self) -> None:
        self.env = ShapeEnv(duck_shape=False, specialize_zero_one=True)
        self.mode = FakeTensorMode(shape_env=self.env)
        # Every size is a symbol of its own here: nothing is asked twice, and keys of symbolic sizes are dear.
        self.mode.cache_enabled = False
        # What had to be equal, and where.
        self.equations: list[tuple[sympy.Expr, sympy.Expr, str]] = []
        self.where = ""
        self._count = 0
        self._read = 0
        self._equal: dict[sympy.Symbol, sympy.Expr] = {}
        # Symbols that others are expressed in, where there is a choice.
        self.roots: set[sympy.Symbol] = set()

    def fresh(self, value: int) -> Size:
        """A symbol that is ``value`` in the flat model; sizes 0 and 1 are no symbols, because torch takes them for others."""
        if value < 2:
            return value
        self._count += 1
        symbol = self.env.create_symbol(value, ConstantSource(f"size{self._count}"), DimDynamic.DYNAMIC, None)
        made: Size = self.env.create_symintnode(symbol, hint=value, source=None)
        return made

    def node(self, expression: sympy.Expr | int) -> Size:
        """An expression as a size."""
        expression = self.now(expression)
        if expression.is_Integer:
            return int(expression)
        made: Size = self.env.create_symintnode(expression, hint=self.value(expression), source=None)
        return made

    def of(self, size: Size) -> sympy.Expr:
        """A size as an expression in the symbols that are left after all that had to be equal was made equal."""
        if isinstance(size, int):
            return sympy.Integer(size)
        return self.now(size.node.expr)

    def now(self, expression: sympy.Expr) -> sympy.Expr:
        """An expression in the symbols that are left."""
        self._absorb()
        return self._reduced(expression)

    def _reduced(self, expression: sympy.Expr) -> sympy.Expr:
        left = sympy.expand(self.env.replace(sympy.sympify(expression)))
        while left.free_symbols & self._equal.keys():
            left = sympy.expand(left.xreplace(self._equal))
        return left

    def _absorb(self) -> None:
        """Take over what operators needed to be equal since the last time; torch itself solves the simplest of these equations."""
        guards = self.env.guards
        while self._read < len(guards):
            guard = guards[self._read].expr
            self._read += 1
            if not isinstance(guard, sympy.Eq):
                continue
            self.equations.append((guard.lhs, guard.rhs, self.where))
            left, right = self._reduced(guard.lhs), self._reduced(guard.rhs)
            for one, other in ((left, right), (right, left)):
                if one.is_Symbol and one not in other.free_symbols and (one not in self.roots or not other.free_symbols):
                    self._equal[one] = other
                    # Torch simplifies sizes of its own by these.
                    self.env.replacements.setdefault(one, other)
                    break

    def value(self, expression: sympy.Expr | int) -> int:
        """What an expression is in the flat model."""
        expression = sympy.sympify(expression)
        return int(expression.xreplace({symbol: self.env.backed_var_to_val[symbol] for symbol in expression.free_symbols}))

    def empty(self, sizes: Any, like: torch.Tensor | torch.dtype) -> torch.Tensor:
        """A tensor without values."""
        dtype = like if isinstance(like, torch.dtype) else like.dtype
        with self.mode:
            return torch.empty(list(sizes), dtype=dtype, device="cpu")


@contextmanager
def quiet_shapes() -> Iterator[None]:
    """Without what torch's symbolic shapes log."""
    loggers = [logging.getLogger(name) for name in ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def symbolic_parameters(root: nn.Module, symbols: Symbols, fixed: set[int]) -> dict[int, torch.Tensor]:
    """Put a tensor without values in the place of each of ``root``'s parameters and buffers, with a symbol for every size.

    Those of ``fixed``, by Python's id, keep their sizes as numbers. Returns the replacements, by the id of the original.
    """
    made: dict[int, torch.Tensor] = {}

    def replaced(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            sizes = tensor.shape if id(tensor) in fixed else [symbols.fresh(size) for size in tensor.shape]
            made[id(tensor)] = symbols.empty(sizes, tensor)
        return made[id(tensor)]

    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = replaced(parameter)  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = replaced(buffer)
    for module in root.modules():
        _symbolic_attributes(module, symbols)
    return made


def _symbolic_attributes(module: nn.Module, symbols: Symbols) -> None:
    """Sizes that a layer keeps beside its parameters and compares with them."""
    for name, size in sizes_kept(module).items():
        setattr(module, name, size)
    if is_bare_norm(module):
        layer: Any = module
        layer.normalized_shape = tuple(symbols.fresh(size) for size in layer.normalized_shape)


def is_bare_norm(module: nn.Module) -> bool:
    """Whether a layer norm has no parameters, so that its size stands in an attribute alone."""
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) and not module.elementwise_affine


def sizes_kept(module: nn.Module) -> dict[str, Any]:
    """The attributes in which a torch layer keeps sizes, as its parameters have them."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.MultiheadAttention):
        width = module.out_proj.weight.shape[0]
        sizes = {"embed_dim": width, "head_dim": width // module.num_heads}
        if module._qkv_same_embed_dim:
            return {**sizes, "kdim": width, "vdim": width}
        return {**sizes, "kdim": module.k_proj_weight.shape[1], "vdim": module.v_proj_weight.shape[1]}
    if isinstance(module, nn.RNNBase):
        return {"input_size": module._parameters["weight_ih_l0"].shape[1]}  # type: ignore[union-attr]
    if not isinstance(weight, torch.Tensor):
        return {}
    if isinstance(module, nn.Linear):
        return {"out_features": weight.shape[0], "in_features": weight.shape[1]}
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return {"normalized_shape": tuple(weight.shape)}
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return {"num_features": weight.shape[0]}
    if isinstance(module, nn.Bilinear):
        return {"out_features": weight.shape[0], "in1_features": weight.shape[1], "in2_features": weight.shape[2]}
    if isinstance(module, nn.modules.conv._ConvNd) and not module.transposed:
        return {"out_channels": weight.shape[0], "in_channels": weight.shape[1] * module.groups}
    if isinstance(module, nn.PReLU):
        return {"num_parameters": weight.shape[0]}
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return {"embedding_dim": weight.shape[1]}
    return {}
