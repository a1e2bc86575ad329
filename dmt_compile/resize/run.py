"""Running a graph on tensors without values, with sizes read out of its numbers and constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx, nn

from ..errors import at, first_line
from ..graphs import attribute_of
from .constants import ORDER, Pattern, patterns_of
from .literals import named, replaced
from .symbols import Unfit

if TYPE_CHECKING:
    from .derive import Derivation

_CATS = ("cat", "concat", "concatenate")
_CARRYING = ("getitem", "select", "unbind", "to", "long", "int", "_to_copy", "contiguous", "clone", "detach", "lift_fresh_copy")
_INDEXING = ("getitem", "index", "index_select", "gather", "take", "take_along_dim")


@dataclass
class Known:
    """A constant that may follow from a number: where it stands, and its last size, ``places``.

    As a mask it keeps as many elements as it has ``marked`` in the flat model, which then are the size ``kept``.
    """

    place: Any
    patterns: list[Pattern]
    places: Any
    order: Any = None
    pattern: Pattern | None = None
    kept: Any = None
    marked: int = 0

    def chosen(self) -> tuple[Pattern | None, Any]:
        if self.pattern is None and len(self.patterns) == 1 and self.patterns[0].length in (None, ORDER):
            # A table, or places in their order: its own size is the number.
            return self.patterns[0], self.places
        return self.pattern, self.order


class Runner(fx.Interpreter):
    def __init__(self, derivation: Derivation, given: Mapping[fx.Node, Any]) -> None:
        super().__init__(derivation.module, garbage_collect_values=False)
        self.d = derivation
        self.given = given
        self.roots = tuple(derivation.reader.roots)

    def run_node(self, n: fx.Node) -> Any:
        d = self.d
        if n in self.given:
            d.reader.saw(n, self.given[n])
            return self.given[n]
        if n.op == "output":
            self._refuse_changed_results(n)
        if n.op in ("placeholder", "output"):
            return None
        d.symbols.now(sympy.Integer(0))
        d.symbols.where = at(n)
        try:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            if n.op == "get_attr":
                value = self._constant(n)
            elif named(n) in ("triu_indices", "tril_indices") and args[:1] == args[1:2] and isinstance(args[0], int):
                value = self._triangle(n, args, kwargs)
            else:
                lists = self._lists(n, args)
                with d.symbols.mode:
                    value = self._value(n, args, kwargs, lists)
        except Unfit:
            raise
        except Exception as error:
            raise Unfit(f"{at(n)}: {first_line(error)}") from error
        d.check(n, self.roots)
        d.reader.saw(n, value)
        d.reader.inherit(n, value, [(used, self.env.get(used)) for used in n.all_input_nodes])
        return value

    def _refuse_changed_results(self, n: fx.Node) -> None:
        for used in n.all_input_nodes:
            value = self.env.get(used)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                sizes = tensor.shape if isinstance(tensor, torch.Tensor) else ()
                if any(self.d.reader.moving(self.d.symbols.of(size)) for size in sizes):
                    raise Unfit(f"the model returns vectors of its features ({at(used)}), which must stay what they are")

    def _value(self, n: fx.Node, args: Any, kwargs: Any, lists: Mapping[int, torch.Tensor]) -> Any:
        if n.op == "call_module":
            return self.call_module(n.target, args, kwargs)
        if named(n) in _INDEXING:
            args = self._indexed(n, args, lists)
        found = self.d.reader.read(n, args, kwargs)
        if found:
            self.d.literals[n.name] = found
            sizes = {path: self.d.symbols.node(expression) for path, expression in found.items()}
            args = replaced(args, {path: size for path, size in sizes.items() if isinstance(path[0], int)})
            kwargs = replaced(kwargs, {path: size for path, size in sizes.items() if isinstance(path[0], str)})
        value = getattr(self, n.op)(n.target, args, kwargs)
        if named(n) in _CARRYING and args and id(args[0]) in self.d.known:
            # A row of both indices, or a cast of them.
            for one in value if isinstance(value, list | tuple) else (value,):
                self.d.known[id(one)] = self.d.known[id(args[0])]
        if named(n) in _CATS and isinstance(args[0] if args else kwargs.get("tensors"), list | tuple):
            tensors = args[0] if args else kwargs["tensors"]
            dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
            self.d.reader.joined(n, tensors, dim)
        return value

    def _constant(self, n: fx.Node) -> Any:
        """A parameter's stand-in, or one for a constant whose sizes follow a pattern."""
        d = self.d
        name = str(n.target)
        original = d.originals[name][1] if name in d.originals else attribute_of(d.module, name)
        if isinstance(original, nn.Parameter):
            return d.made[d.originals[name][0]]
        if not isinstance(original, torch.Tensor):
            return original
        value = self._stand_in(name, original)
        if value is None:
            return d.made[d.originals[name][0]] if name in d.originals else d.symbols.empty(original.shape, original)
        if name in d.originals:
            d.made[d.originals[name][0]] = value
        return value

    def _stand_in(self, place: Any, real: torch.Tensor) -> torch.Tensor | None:
        """A tensor without values whose size is a symbol, for a constant that follows a pattern."""
        d = self.d
        patterns = patterns_of(real)
        if not patterns:
            return None
        places = d.symbols.fresh(real.shape[-1])
        table = patterns[0].length is None
        value = d.symbols.empty([*real.shape[:-2], places, places] if table else [*real.shape[:-1], places], real)
        d.known[id(value)] = Known(place, patterns, places, marked=int(real.sum()) if real.dtype is torch.bool else 0)
        d.alive.append(value)
        if isinstance(places, torch.SymInt):
            d.reader.roots.append(places.node.expr)
        return value

    def _triangle(self, n: fx.Node, args: Any, kwargs: Any) -> torch.Tensor:
        """Indices that the graph makes: their number is no size that torch would follow."""
        real = getattr(super(), n.op)(n.target, args, kwargs)
        value = self._stand_in([(n.name, (0,)), (n.name, (1,))], real)
        if value is None:
            return self.d.symbols.empty(real.shape, real)
        known = self.d.known[id(value)]
        known.patterns = [replace(pattern, make=_itself) for pattern in known.patterns]
        return value

    def _lists(self, n: fx.Node, args: Any) -> dict[int, torch.Tensor]:
        """Stand-ins for lists of whole numbers that index, by their place."""
        if named(n) != "getitem" or not isinstance(args[0], torch.Tensor):
            return {}
        found = {}
        for place, index in enumerate(args[1] if isinstance(args[1], tuple) else (args[1],)):
            if isinstance(index, list) and index and all(isinstance(one, int) and not isinstance(one, bool) for one in index):
                real = torch.tensor(index)
                path = (1, place) if isinstance(args[1], tuple) else (1,)
                made = self._stand_in((n.name, path), real)
                if made is not None:
                    known = self.d.known[id(made)]
                    known.patterns = [_listed(pattern) for pattern in known.patterns]
                found[place] = made if made is not None else self.d.symbols.empty(real.shape, real)
        return found

    def _indexed(self, n: fx.Node, args: Any, lists: Mapping[int, torch.Tensor]) -> Any:
        """Tie constant indices to the size of what they index; a mask becomes indices of as many elements."""
        d = self.d
        value, name = args[0], named(n)
        if not isinstance(value, torch.Tensor) or id(value) in d.known:
            return args
        if name in ("gather", "take", "take_along_dim", "index_select"):
            index = args[2] if name in ("gather", "index_select") and len(args) > 2 else args[1]
            if isinstance(index, torch.Tensor):
                self._tie(n, value.shape[args[1]] if name in ("gather", "index_select") else None, index)
            return args
        indices = args[1] if isinstance(args[1], list | tuple) else (args[1],)
        made: list[Any] = []
        dim = 0
        for place, index in enumerate(indices):
            index = lists.get(place, index)
            if index is Ellipsis:
                dim = value.dim() - sum(one is not None for one in indices[place + 1 :])
            elif isinstance(index, torch.Tensor) and index.dtype is torch.bool and index.dim() > 1:
                made += self._masked(n, value, dim, index)
                dim += index.dim()
                continue
            elif isinstance(index, torch.Tensor):
                self._tie(n, value.shape[dim], index)
            made.append(index)
            dim += Ellipsis is not index and (index is not None or name != "getitem")
        whole = type(args[1])(made) if isinstance(args[1], list | tuple) else made[0] if len(made) == 1 else tuple(made)
        return (value, whole)

    def _masked(self, n: fx.Node, value: torch.Tensor, dim: int, mask: torch.Tensor) -> list[Any]:
        d = self.d
        known = d.known.get(id(mask))
        if known is None or mask.dim() != 2:
            raise Unfit(f"{at(n)} picks by a mask that follows no known pattern")
        for place in (dim, dim + 1):
            torch._check(value.shape[place] == known.places)
        if known.kept is None:
            known.kept = d.symbols.fresh(known.marked)
            if isinstance(known.kept, torch.SymInt):
                d.reader.roots.append(known.kept.node.expr)
        return [d.symbols.empty([known.kept], torch.long)] * 2

    def _tie(self, n: fx.Node, size: Any, index: torch.Tensor) -> None:
        d = self.d
        known = d.known.get(id(index))
        moves = isinstance(size, torch.SymInt) and d.reader.moving(d.symbols.of(size))
        if known is None:
            if moves and not index.is_floating_point():
                raise Unfit(f"{at(n)} picks among vectors that are replaced by others, by indices that follow no known pattern")
            return
        for pattern in known.patterns:
            order = size
            if pattern.flat and size is not None:
                root = sympy.sqrt(sympy.factor(d.symbols.of(size)))
                if not root.is_polynomial(*root.free_symbols) or not (root.free_symbols or root.is_Integer):
                    continue
                order = d.symbols.node(sympy.expand(root))
            if order is None or d.symbols.value(d.symbols.of(order)) != pattern.order:
                continue
            if known.pattern is None:
                known.pattern, known.order = pattern, order
            elif known.pattern is pattern:
                torch._check(known.order == order)
            return
        if moves:
            raise Unfit(f"{at(n)} picks among vectors that are replaced by others, by indices for another number of them")


def _listed(pattern: Pattern) -> Pattern:
    def make(count: int) -> Any:
        return pattern.make(count).tolist()

    return replace(pattern, make=make)


def _itself(count: int) -> Any:
    return count
