"""What has to change behind the places where tower modules come in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx, nn

from ..adapters import torchrec as torchrec_adapter
from ..graphs import clone_sharing_tensors, closure
from ..interactions.block import laid
from ..interactions.tape import Tape
from ..lookups import LookupSet
from ..nested import take_apart
from ..resize import Derivation, NewSizes, Unfit
from .insert import Inserted, pieces_of
from .record import EXPANSIONS, HOLDER, TowerVectors
from .sites import Site, Sites


@dataclass(frozen=True)
class Found:
    """What is known of one graph: a run of it, and where its vectors lie together."""

    flat: fx.GraphModule
    lookups: LookupSet
    tape: Tape
    sites: Sites | None


def new_sizes(root: nn.Module, found: Found, inserted: Inserted, vectors: Sequence[TowerVectors], *, kept: bool) -> NewSizes:
    """What has to change behind the sites of a graph over ``root``; with ``kept`` also what is made of vectors whose sizes stay.

    Numbers in views of a layer's outputs are taken for the width of a vector only where nothing follows otherwise.

    Raises:
        Unfit: some size does not follow.
    """
    try:
        return _new_sizes(root, found, inserted, vectors, eager=False, kept=kept)
    except Unfit as reason:
        try:
            return _new_sizes(root, found, inserted, vectors, eager=True, kept=kept)
        except Unfit:
            raise reason from None


def _new_sizes(
    flat: nn.Module, found: Found, inserted: Inserted, vectors: Sequence[TowerVectors], *, eager: bool, kept: bool
) -> NewSizes:
    lookups = found.lookups
    root = clone_sharing_tensors(flat, copy_buffers=True).eval()
    tables = {id(root.get_parameter(table.parameter)) for table in lookups.tables}
    for holder in (HOLDER, EXPANSIONS):
        root.add_module(holder, nn.Module())
    derivation = Derivation(inserted.graph, inserted.extras, root, tables, eager=eager)
    symbols = derivation.symbols
    widths = [lookups.lookup[name].dim for one in vectors for name in one.lookups]
    made = [width for _, _, width in pieces_of(vectors, [name for one in vectors for name in one.lookups])]
    roots: dict[sympy.Symbol, int] = {}

    def size(old: int, new: int) -> Any:
        if old == new and not kept:
            return old
        symbol = symbols.fresh(old)
        if isinstance(symbol, int):
            raise Unfit(f"a size of {old} cannot be told from others")
        roots[symbol.node.expr] = new
        return symbol

    even = len(set(widths)) == 1 and len(set(made)) == 1
    number: Any = size(len(widths), len(made)) if even else None
    width: Any = size(widths[0], made[0]) if even else None
    columns = number * width if even else size(sum(widths), sum(made))
    derivation.number = number.node.expr if isinstance(number, torch.SymInt) else None
    derivation.layouts = _layouts(found.tape)
    derivation.width = sympy.sympify(width.node.expr if isinstance(width, torch.SymInt) else width) if even else None
    derivation.columns = sympy.sympify(columns.node.expr if isinstance(columns, torch.SymInt) else columns)
    given = _given(derivation, found, inserted)
    for node, site in inserted.laid.items():
        if not even and "vectors" in site.axes:
            raise Unfit(f"vectors of widths {sorted(set(made))} do not fit where the model has them in one axis")
        sizes: dict[str, Any] = {"batch": found.tape.batch, "vectors": number, "width": width, "columns": columns}
        if len(site.lookups) < len(widths):
            # One vector for each of some.
            sizes["vectors"] = len(site.lookups)
            sizes["columns"] = len(site.lookups) * width if even else _columns(site, lookups, vectors, size)
        dtype = lookups.lookup[site.lookups[0]].dtype
        given[node] = symbols.empty([sizes[axis] if isinstance(axis, str) else axis for axis in site.axes], dtype)
    if not roots:
        return NewSizes({}, {}, {})
    return derivation.run(given, roots)


def _layouts(tape: Tape) -> dict[str, tuple[int | None, int | None]]:
    """By node whose value holds the vectors of several features, the axes that count vectors and columns."""
    found = {}
    for node, number in tape.held.items():
        labels = tape.values[number].labels
        if labels is not None and len(tape.own(number)) > 1 and not tape.mixed(number) and node not in tape.several:
            places = laid(tape, number)
            found[node.name] = (places.vector_axis, places.width_axis)
    return found


def _columns(site: Site, lookups: LookupSet, vectors: Sequence[TowerVectors], size: Callable[[int, int], Any]) -> Any:
    """Columns of vectors of different widths, one for each of some lookups."""
    old = sum(lookups.lookup[name].dim for name in site.lookups)
    return size(old, sum(width for _, _, width in pieces_of(vectors, site.lookups)))


def _given(derivation: Derivation, found: Found, inserted: Inserted) -> dict[fx.Node, Any]:
    """Values, without contents, of the nodes that need not be run: inputs, lookups, and what only these need."""
    tape, lookups = found.tape, found.lookups
    held = {node.name: value for node, value in tape.given.items()}
    shapes = {node.name: tape.values[number].shape for node, number in tape.held.items()}
    outputs = {output.node: output for output in lookups.outputs}
    given: dict[fx.Node, Any] = {}

    def empty(value: torch.Tensor) -> torch.Tensor:
        return derivation.symbols.empty(value.shape, value)

    for node in inserted.graph.nodes:
        if node.name in held:
            tensors, template = take_apart(held[node.name])
            given[node] = template.build([empty(one) if isinstance(one, torch.Tensor) else one for one in tensors])
        elif node.name in outputs:
            output = outputs[node.name]
            served = [lookups.lookup[name] for name in output.lookups]
            if output.shape is None and output.like is None:
                values = derivation.symbols.empty([tape.batch, sum(one.dim for one in served)], served[0].dtype)
                given[node] = torchrec_adapter.make_output(output.keys, [one.dim for one in served], values)
            else:
                given[node] = derivation.symbols.empty(shapes[node.name], served[0].dtype)
    stop = {*given, *inserted.laid}
    needed = closure([node for node in inserted.graph.nodes if node.op == "output"], stop=stop)
    for node in inserted.graph.nodes:
        if node not in needed and node not in stop:
            given[node] = None
    return given
