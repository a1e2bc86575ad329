"""New sizes for the layers behind vectors that change in number or width."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.utils._sympy.functions import Mod

from ..errors import at
from ..graphs import graph_module_over, plain_attention
from .constants import ORDER
from .literals import Reader
from .run import Known, Runner
from .stand_ins import replace_layers
from .symbols import Symbols, Unfit, is_bare_norm, quiet_shapes, symbolic_parameters


@dataclass(frozen=True)
class Segment:
    """A run of an axis that changes from ``old`` to ``new`` elements: ``vectors`` side by side, 0 if it holds something else.

    With ``power`` 2 they are outer products of two vectors, flattened. ``every`` says that these are all the vectors that tower
    modules take, in the order of the first site.
    """

    old: int
    new: int
    vectors: int
    every: bool = False
    power: int = 1


@dataclass(frozen=True)
class NewSizes:
    """What changes: shapes of parameters and buffers by name, of norms that have none by the module's name, numbers in arguments of
    nodes by path, constants by place. ``axes`` say what the axes of a tensor that changes are made of.

    A constant's place is the target of a get_attr node, or a node and a path in its arguments.
    """

    tensors: Mapping[str, tuple[int, ...]]
    literals: Mapping[str, Mapping[Any, int]]
    constants: Mapping[Any, Any]
    norms: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    axes: Mapping[str, tuple[tuple[Segment, ...], ...]] = field(default_factory=dict)


class Derivation:
    """One run of a graph over ``root`` (a clone that may be changed) on tensors without values.

    In the shapes of values that bring vectors in, symbols stand for what changes. ``eager`` takes numbers in views of a layer's
    outputs for the width of a vector where they are equal.
    """

    def __init__(self, graph: fx.Graph, extras: Mapping[str, nn.Module], root: nn.Module, fixed: set[int], *, eager: bool) -> None:
        self.symbols = Symbols()
        self.root = root
        named_tensors = (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False))
        self.originals = {name: (id(tensor), tensor) for name, tensor in named_tensors}
        self.made = symbolic_parameters(root, self.symbols, fixed)
        replace_layers(root)
        self.module = graph_module_over(root, graph, extras, "Sized")
        self.known: dict[int, Known] = {}
        self.literals: dict[str, dict[Any, sympy.Expr]] = {}
        # Values are told apart by Python's id.
        self.alive: list[torch.Tensor] = []
        # How many vectors there are, their width and all columns side by side, as far as there is such a thing; and by node, the
        # axes of its value that count vectors and columns.
        self.number: Any = None
        self.width: Any = None
        self.layouts: Mapping[str, tuple[int | None, int | None]] = {}
        self.columns: Any = None
        self.eager = eager

    def run(self, given: Mapping[fx.Node, Any], roots: Mapping[sympy.Symbol, int]) -> NewSizes:
        """The sizes that follow where the symbols ``roots`` get new values; ``given`` are the values of nodes that are not run.

        Raises:
            Unfit: some size does not follow.
        """
        self.symbols.roots = set(roots)
        self.reader = Reader(self.symbols, list(roots), self.eager)
        self.reader.axes, self.reader.layouts = (self.number, self.width), self.layouts
        runner = Runner(self, given)
        with quiet_shapes(), plain_attention(), torch.no_grad():
            runner.run(enable_io_processing=False)
        return self._solved(roots)

    def check(self, node: fx.Node, roots: tuple[sympy.Symbol, ...]) -> None:
        for root in roots:
            left = self.symbols.now(root)
            if not left.free_symbols:
                raise Unfit(f"{at(node)} takes exactly {left} for a size that is to change")

    def _solved(self, roots: Mapping[sympy.Symbol, int]) -> NewSizes:
        values: dict[sympy.Symbol, sympy.Expr] = {}

        def becomes(expression: sympy.Expr, wanted: int) -> None:
            left = sympy.expand(self.symbols.now(expression).xreplace(values))
            if not left.free_symbols:
                if left != wanted:
                    raise Unfit(f"a size that stays {left} would have to become {wanted}")
                return
            symbol = min(left.free_symbols, key=str)
            solved = sympy.solve(left - wanted, symbol)
            if len(solved) != 1:
                raise Unfit(f"a size cannot become {wanted}")
            values[symbol] = solved[0]

        def number(expression: sympy.Expr, what: str) -> int:
            found = self._value_of(expression, values)
            if not found.is_Integer or found < 0:
                raise Unfit(f"{what} would have to be {found}")
            return int(found)

        for root, wanted in roots.items():
            becomes(root, wanted)
        constants: dict[Any, Any] = {}
        for known in self.known.values():
            pattern, order = known.chosen()
            if pattern is None:
                continue
            count = number(self.symbols.of(order), "the order of a constant")
            if pattern.length is not None:
                becomes(self.symbols.of(known.places), int(pattern.length.xreplace({ORDER: sympy.Integer(count)})))
            if known.kept is not None:
                becomes(self.symbols.of(known.kept), int(pattern.make(count).sum()))
            if count != pattern.order:
                for place in known.place if isinstance(known.place, list) else [known.place]:
                    constants[place] = pattern.make(count)
        tensors = {}
        for name, (identity, original) in self.originals.items():
            shape = tuple(number(self.symbols.of(size), f"a size of '{name}'") for size in self.made[identity].shape)
            if shape != tuple(original.shape) and name not in constants:
                if not isinstance(original, nn.Parameter) and not _of_a_norm(self.root, name):
                    raise Unfit(f"'{name}' is a constant of {tuple(original.shape)} that would have to be of {shape}")
                tensors[name] = shape
        literals = {
            name: {path: number(expression, f"a number in '{name}'") for path, expression in found.items()}
            for name, found in self.literals.items()
        }
        for left, right, where in self.symbols.equations:
            one, other = (self._value_of(side, values) for side in (left, right))
            if one != other and isinstance(left, sympy.Mod | Mod):
                size, by = (self._value_of(side, values) for side in left.args)
                raise Unfit(f"{where} needs a size that {by} divides, which would become {size}")
            if one != other:
                raise Unfit(f"{where} needs sizes that are equal, which would become {one} and {other}")
        axes = {}
        for name, (identity, original) in self.originals.items():
            sizes: list[Any] = list(self.made[identity].shape)
            moving = any(isinstance(size, torch.SymInt) and self.reader.moving(self.symbols.of(size)) for size in sizes)
            if original.is_floating_point() and (name in tensors or (moving and name not in constants)):
                axes[name] = tuple(self._segments(self.symbols.of(size), number) for size in sizes)
        norms = {}
        for name, module in self.root.named_modules():
            if is_bare_norm(module):
                layer: Any = module
                norms[name] = tuple(number(self.symbols.of(size), f"a size of '{name}'") for size in layer.normalized_shape)
        return NewSizes(tensors, {name: found for name, found in literals.items() if found}, constants, norms, axes)

    def _segments(self, size: sympy.Expr, number: Callable[[sympy.Expr, str], int]) -> tuple[Segment, ...]:
        width, columns = (self.symbols.now(one) if one is not None else None for one in (self.width, self.columns))
        found = []
        for part in self.reader.order_of(size):
            every = columns is not None and sympy.expand(part - columns) == 0
            vectors, power = 0, 1
            if width is not None and self.reader.moving(part):
                for power in (2, 1):
                    times, rest = sympy.fraction(sympy.cancel(part / width**power))
                    if rest == 1:
                        vectors = self.symbols.value(times)
                        break
            found.append(Segment(self.symbols.value(part), number(part, "a part of a size"), vectors, every, power))
        return tuple(found)

    def _value_of(self, expression: sympy.Expr, values: Mapping[sympy.Symbol, sympy.Expr]) -> sympy.Expr:
        """An expression where some symbols have new values and all others stay what they are."""
        left = sympy.expand(self.symbols.now(expression).xreplace(values))
        return left.xreplace({s: self.symbols.env.backed_var_to_val[s] for s in left.free_symbols})


def _of_a_norm(root: nn.Module, name: str) -> bool:
    module = root.get_submodule(name.rpartition(".")[0])
    return isinstance(module, nn.modules.batchnorm._NormBase)
