"""Numbers in a graph that are sizes: ``view(-1, 27, 128)`` of a value whose sizes are symbols."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from ..errors import at as at_node
from .symbols import Symbols, Unfit

_VIEWS = ("view", "reshape", "_unsafe_view", "view_copy", "unflatten", "_reshape_alias")
_SIZES = ("expand", "repeat", "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "rand", "randn")
_MATRICES = ("eye", "triu_indices", "tril_indices", "arange", "range", "layer_norm", "native_layer_norm", "rms_norm")
_PARTS = ("split", "split_with_sizes", "narrow", "slice", "getitem", "select", "unsafe_split", "chunk", "unsafe_chunk")
_MOST = 5000


def named(node: fx.Node) -> str:
    """The name of what a node does, however it is written."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket).rpartition(".")[2]
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


class Reader:
    """Finds, for the numbers in a node's arguments, the expressions that they stand for."""

    def __init__(self, symbols: Symbols, moving: Sequence[sympy.Symbol], eager: bool) -> None:
        self.symbols = symbols
        self.eager = eager
        # The number of vectors and their width, where they are symbols; and by node, the axes of its value that count the two.
        self.axes: tuple[sympy.Expr | None, sympy.Expr | None] = (None, None)
        self.layouts: Mapping[str, tuple[int | None, int | None]] = {}
        self.roots = list(moving)
        # By its value in the flat model, every expression that some dimension has had.
        self.pool: dict[int, list[sympy.Expr]] = {}
        # Of values that were put together along an axis, the sizes of the parts.
        self.parts: dict[fx.Node, tuple[int, tuple[sympy.Expr, ...]]] = {}
        # The parts of every size that was put together, in their order.
        self.orders: list[tuple[sympy.Expr, ...]] = []

    def moving(self, expression: sympy.Expr) -> bool:
        """Whether an expression changes with the vectors."""
        roots: set[Any] = set().union(*(self.symbols.now(root).free_symbols for root in self.roots))
        return bool(self.symbols.now(expression).free_symbols & roots)

    def saw(self, node: fx.Node, value: Any) -> None:
        """Remember the sizes of a value."""
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if not isinstance(tensor, torch.Tensor):
                continue
            sizes: list[Any] = list(tensor.shape)
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    expression = self.symbols.of(size)
                    known = self.pool.setdefault(self.symbols.value(expression), [])
                    if expression not in known:
                        known.append(expression)

    def inherit(self, node: fx.Node, value: Any, given: Sequence[tuple[fx.Node, Any]]) -> None:
        """A value whose axis is as long as that of what it is made of has its parts in the same places."""
        if node in self.parts or not isinstance(value, torch.Tensor):
            return
        for source, tensor in given:
            known = self.parts.get(source)
            if known is None or not isinstance(tensor, torch.Tensor) or tensor.dim() != value.dim():
                continue
            if self.symbols.of(tensor.shape[known[0]]) == self.symbols.of(value.shape[known[0]]):
                self.parts[node] = known
                return

    def joined(self, node: fx.Node, tensors: Sequence[Any], dim: int) -> None:
        """Remember what a value was put together from."""
        if all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            at = dim % tensors[0].dim()
            self.parts[node] = (at, tuple(self.symbols.of(tensor.shape[at]) for tensor in tensors))
            self.orders.append(self.parts[node][1])

    def order_of(self, size: sympy.Expr) -> tuple[sympy.Expr, ...]:
        """The parts that a size was put together from, down to those that were not."""
        for parts in self.orders:
            now = [self.symbols.now(part) for part in parts]
            if len(now) > 1 and sympy.expand(sum(now) - size) == 0:
                return tuple(inner for part in now for inner in (self.order_of(part) if part != size else (part,)))
        return (size,)

    def read(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, sympy.Expr]:
        """By the place of a number in ``args`` or ``kwargs`` (a path), the expression that it stands for, where it is one."""
        name = named(node)
        places = _numbers(args, kwargs)
        if not places:
            return {}
        if name in _VIEWS:
            return self._view(node, name, args, kwargs)
        if name in _PARTS:
            return self._bounds(node, name, args, kwargs, places)
        if name in (*_SIZES, *_MATRICES):
            return {path: found for path, number in places.items() if (found := self._size(name, number, args, path)) is not None}
        return {}

    def _size(self, name: str, number: int, args: tuple[Any, ...], path: Any) -> sympy.Expr | None:
        """The size of what is expanded, in its place; else, where nothing says more, the only size of this value that there is."""
        own = [self.symbols.of(size) for tensor in args if isinstance(tensor, torch.Tensor) for size in tensor.shape]
        if name == "expand":
            place = (path[-1] if len(path) > 1 else path[0] - 1) - (_rank(args[1:]) - len(own))
            if place >= 0 and own[place] != 1:
                return own[place] if self.moving(own[place]) else None
        elif name.endswith("_norm"):
            found = [e for e in own if self.symbols.value(e) == number and self.moving(e)]
            return self.symbols.now(found[0]) if found else None
        # A number may as well be one of its own: it is taken for a size only if nothing else does.
        known = list(dict.fromkeys(self.symbols.now(e) for e in self.pool.get(number, [])))
        return known[0] if self.eager and len(known) == 1 and self.moving(known[0]) else None

    def _view(self, node: fx.Node, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, sympy.Expr]:
        value = args[0]
        sizes = [self.symbols.of(size) for size in value.shape]
        wanted: Any = args[1:] if name != "unflatten" else args[2:]
        start: tuple[Any, ...] = (1,) if name != "unflatten" else (2,)
        if len(wanted) == 1 and isinstance(wanted[0], list | tuple):
            wanted, start = wanted[0], (*start, None)
        elif not wanted:
            wanted = next((v for k, v in kwargs.items() if k in ("shape", "size", "sizes")), ())
            start = (next((k for k in kwargs if k in ("shape", "size", "sizes")), ""), None)
        if name == "unflatten":
            dim = args[1]
            sizes = [sizes[dim]]
        moving = any(self.moving(size) for size in sizes)
        asked = any(isinstance(size, torch.SymInt) and self.moving(self.symbols.of(size)) for size in wanted)
        if not moving and not ((self.eager or asked) and any(size.is_Symbol for size in sizes)):
            return {}
        if not moving:
            return self._placed(self._filling_when_even(node, sizes, wanted), wanted, start)
        # Widths of layers that do not change may become numbers here.
        sizes = [size if self.moving(size) else sympy.Integer(self.symbols.value(size)) for size in sizes]
        total = sympy.expand(sympy.prod(sizes))
        choices: list[list[sympy.Expr]] = []
        for size in wanted:
            if isinstance(size, torch.SymInt):
                own = self.symbols.of(size)
                choices.append([own if self.moving(own) else sympy.Integer(self.symbols.value(own))])
            elif size == -1 or size in (0, 1):
                choices.append([sympy.Integer(size)])
            else:
                choices.append([*self._factors(sizes, int(size)), sympy.Integer(size)])
        chosen = self._filling(node, choices, total) or self._filling_when_even(node, sizes, wanted)
        return self._placed(chosen, wanted, start)

    @staticmethod
    def _placed(chosen: Sequence[sympy.Expr], wanted: Any, start: tuple[Any, ...]) -> dict[Any, sympy.Expr]:
        found = {}
        for place, expression in enumerate(chosen):
            if not isinstance(wanted[place], torch.SymInt) and expression.free_symbols:
                found[(*start[:-1], place) if start[-1] is None else (start[0] + place,)] = expression
        return found

    def _filling(self, node: fx.Node, choices: Sequence[Sequence[sympy.Expr]], total: sympy.Expr) -> tuple[sympy.Expr, ...]:
        """The sizes that hold ``total`` elements whatever the symbols are.

        Raises:
            Unfit: several do, because different things are equally many in the flat model.
        """
        if math.prod(map(len, choices)) > _MOST:
            return ()
        found = list(dict.fromkeys(chosen for chosen in itertools.product(*choices) if self._fills(chosen, total)))
        if len(found) > 1:
            found = [chosen for chosen in found if self._lies(node, chosen)]
            if len(found) != 1:
                raise Unfit(f"{at_node(node)}: numbers that are alike in the flat model could each be the one that is to change")
        return found[0] if found else ()

    def _lies(self, node: fx.Node, chosen: Sequence[sympy.Expr]) -> bool:
        """Whether the axes of vectors and of their columns, where these are known, get sizes that belong there."""
        places = self.layouts.get(node.name)
        if places is None:
            return False
        for place, foreign in zip(places, reversed(self.axes), strict=True):
            if place is None or place >= len(chosen):
                return False
            if foreign is not None and self.symbols.now(foreign).free_symbols & chosen[place].free_symbols:
                return False
        return True

    def _filling_when_even(self, node: fx.Node, sizes: Sequence[sympy.Expr], wanted: Sequence[Any]) -> tuple[sympy.Expr, ...]:
        """Vectors beside that of a layer, cut apart: the layer's outputs must be as many as a vector's columns.

        This is what a view of all of them as (vectors, columns) asks for, although no operator compares the two.
        """
        widths = [self.symbols.now(root) for root in self.roots]
        widths += [sympy.Integer(size) for size in wanted if not isinstance(size, torch.SymInt) and size > 1]
        for width in widths:
            wide = self.symbols.value(width)
            asked = [self.symbols.value(self.symbols.of(size)) for size in wanted]
            if not (width.is_Symbol or width.is_Integer) or wide not in asked:
                continue
            ties: dict[sympy.Symbol, sympy.Expr] = {}
            for size in sizes:
                for term in sympy.Add.make_args(size):
                    if term.is_Symbol and not self.moving(term) and self.symbols.value(term) % wide == 0:
                        ties[term] = width * (self.symbols.value(term) // wide)
            if not ties:
                continue
            even = [sympy.expand(size.xreplace(ties)) for size in sizes]
            choices = [
                [self.symbols.of(size)]
                if isinstance(size, torch.SymInt)
                else [sympy.Integer(size)]
                if size in (-1, 0, 1)
                else [*self._factors(even, int(size)), sympy.Integer(size)]
                for size in wanted
            ]
            chosen = self._filling(node, choices, sympy.expand(sympy.prod(even)))
            if chosen:
                for symbol, multiple in ties.items():
                    torch._check(self.symbols.node(symbol) == self.symbols.node(multiple))
                return chosen
        return ()

    def _factors(self, sizes: Sequence[sympy.Expr], number: int) -> list[sympy.Expr]:
        """Products of neighbouring sizes and factors of one that have this value, those that lie first first."""
        found: list[sympy.Expr] = []
        for start, end in itertools.combinations(range(len(sizes) + 1), 2):
            found.append(sympy.expand(sympy.prod(sizes[start:end])))
        # Heads: a width cut into equal parts.
        for size in sizes:
            whole = self.symbols.value(size)
            if size.is_Symbol and self.moving(size) and 0 < number < whole and whole % number == 0:
                found.append(size / (whole // number))
        for size in sizes:
            _, factors = sympy.factor_list(size)
            single = [base for base, power in factors for _ in range(power)]
            for count in range(1, len(single) + 1):
                found += [sympy.expand(sympy.prod(some)) for some in itertools.combinations(single, count)]
        found += self.pool.get(number, [])
        moving = [self.symbols.now(e) for e in found if self.symbols.value(e) == number]
        return [e for e in dict.fromkeys(moving) if self.moving(e)]

    def _fills(self, sizes: Sequence[sympy.Expr], total: sympy.Expr) -> bool:
        """Whether these sizes hold as many elements whatever the symbols are."""
        given = sympy.expand(sympy.prod([size for size in sizes if size != -1]))
        if -1 not in sizes:
            return bool(sympy.expand(given - total) == 0)
        if (total / given).atoms(sympy.Function):
            return False
        left = sympy.cancel(total / given)
        top, bottom = sympy.fraction(left)
        whole = bottom == 1 and all(c.is_Integer for c in sympy.Poly(top, *top.free_symbols).coeffs()) if top.free_symbols else True
        return bool(bottom == 1 and whole and (top.free_symbols or top.is_Integer))

    def _bounds(
        self, node: fx.Node, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], places: dict[Any, int]
    ) -> dict[Any, sympy.Expr]:
        """Bounds of parts: they stand between the parts that the value was put together from, or at its ends.

        Raises:
            Unfit: a bound stands inside of what changes.
        """
        value = args[0]
        if not isinstance(value, torch.Tensor):
            return {}
        source = node.args[0]
        found: dict[Any, sympy.Expr] = {}
        for path, number in places.items():
            dim = self._dim_of(name, args, kwargs, path)
            if dim is None or dim >= value.dim():
                continue
            size = self.symbols.of(value.shape[dim])
            if not self.moving(size):
                continue
            at, parts = self.parts.get(source, (-1, ())) if isinstance(source, fx.Node) else (-1, ())
            lengths = [self.symbols.now(part) for part in parts] if at == dim else [size]
            if name in ("chunk", "unsafe_chunk"):
                if not all(c.is_Integer for c in sympy.Poly(size / number, *size.free_symbols).coeffs()):
                    raise Unfit(f"{at_node(node)} takes vectors one by one, whose number is to change")
                continue
            if name in ("split", "split_with_sizes", "unsafe_split"):
                same = [part for part in (*lengths, size) if self.symbols.value(part) == number and self.moving(part)]
                if not same and not self._of_even(size, number):
                    raise Unfit(f"{at_node(node)} cuts a value of {self.symbols.value(size)} into parts of {number}")
                found[path] = same[0] if same else self._of_even(size, number)
                continue
            one = path[-1] not in ("start", "stop") and name in ("getitem", "select")
            found.update(self._bound(node, path, number, size, lengths, one))
        return found

    def _bound(self, node: fx.Node, path: Any, number: int, size: sympy.Expr, parts: list[sympy.Expr], one: bool) -> dict[Any, Any]:
        position = number if number >= 0 else number + self.symbols.value(size)
        before: sympy.Expr = sympy.Integer(0)
        for part in parts:
            start, length = self.symbols.value(before), self.symbols.value(part)
            inside = start <= position < start + length
            if position == start and not (one and self.moving(part)):
                break
            if inside and not self.moving(part):
                before = before + (position - start)
                break
            even = self._of_even(part, position - start) if inside and not one else None
            if even is not None:
                before = before + even
                break
            if inside:
                raise Unfit(f"{at_node(node)} takes what stands at place {number} of vectors that are replaced by others")
            before = sympy.expand(before + part)
        before = sympy.expand(before)
        exact = before if number >= 0 else sympy.expand(before - size)
        return {path: exact} if exact.free_symbols else {}

    def _of_even(self, size: sympy.Expr, number: int) -> sympy.Expr | None:
        """A part of a fixed number of vectors side by side, that begins or ends between two of them."""
        free = size.free_symbols
        if len(free) != 1:
            return None
        (width,) = free
        each = size / width
        wide = self.symbols.value(width)
        return width * (number // wide) if each.is_Integer and number % wide == 0 else None

    @staticmethod
    def _dim_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], path: Any) -> int | None:
        rank = args[0].dim()
        if name == "getitem":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            place = path[1] if isinstance(args[1], tuple) else 0
            if any(one is Ellipsis for one in index[:place]):
                return int(rank - len(index) + place)
            return int(place - sum(one is None for one in index[:place]))
        if name in ("slice", "narrow", "select"):
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            return int(dim) % rank if path[0] not in (1, "dim", "step") else None
        dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        return int(dim) % rank if path[0] != 2 and path[0] != "dim" else None


def _numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, int]:
    """All whole numbers in arguments that could be a size, by their path."""
    found: dict[Any, int] = {}

    def walk(value: Any, path: tuple[Any, ...]) -> None:
        if isinstance(value, bool | torch.SymInt):
            return
        if isinstance(value, int):
            if abs(value) < 2**40:
                found[path] = value
        elif isinstance(value, list | tuple):
            for place, one in enumerate(value):
                walk(one, (*path, place))
        elif isinstance(value, slice):
            for key in ("start", "stop"):
                walk(getattr(value, key), (*path, key))

    for place, value in enumerate(args):
        walk(value, (place,))
    for key, value in kwargs.items():
        walk(value, (key,))
    return found


def _rank(sizes: Sequence[Any]) -> int:
    return len(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else len(sizes)


def replaced(args: Any, found: dict[Any, Any], path: tuple[Any, ...] = ()) -> Any:
    """Arguments with others in the place of some of their numbers."""
    if path in found:
        return found[path]
    if isinstance(args, slice):
        start, stop = (replaced(getattr(args, key), found, (*path, key)) for key in ("start", "stop"))
        return slice(start, stop, args.step)
    if isinstance(args, tuple | list):
        parts = [replaced(one, found, (*path, place)) for place, one in enumerate(args)]
        return type(args)(parts) if type(args) in (tuple, list) else tuple(parts)
    if isinstance(args, dict):
        return {key: replaced(one, found, (*path, key)) for key, one in args.items()}
    return args
