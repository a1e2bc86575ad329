"""What a summary says about tower modules: what each makes, which way the model was rewritten and why, what changed its shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from .words import counted, cut, short_places, span

if TYPE_CHECKING:
    from ..program import TowerProgram
    from ..towers.model import TowerModel
    from ..towers.record import TowerVectors

_MOST_TOWERS = 8
_MOST_TENSORS = 6
_MOST_UNDRAWN = 3
_REASON = 200


def tower_lines(program: TowerProgram) -> Iterator[str]:
    """The lines, most important first; their number is bounded. None for a program without tower modules."""
    made = program.tower_model
    if made is None:
        return
    taken, left = (sum(columns) for columns in zip(*((sum(one.widths), one.columns) for one in made.vectors), strict=True))
    yield f"{taken:,} columns become {left:,} before they cross hosts, ratio {taken / left:.2f}"
    beside = program.lookups.width - taken
    if beside:
        yield f"{counted(beside, 'column')} of other lookups {'goes' if beside == 1 else 'go'} through no module"
    if made.way == "re-sized":
        yield from _changed(program, made)
        yield from _resized(made.resized)
        if made.redrawn:
            yield f"not derived from the flat model's weights: {cut(', '.join(made.redrawn), _REASON)}"
        for name, why in list(made.undrawn.items())[:_MOST_UNDRAWN]:
            yield cut(f"'{name}' is drawn from a normal distribution: {why}", _REASON)
        if len(made.undrawn) > _MOST_UNDRAWN:
            yield f"... and {len(made.undrawn) - _MOST_UNDRAWN:,} more (program.tower_model.undrawn)"
    else:
        yield f"expanded behind the exchange, the interaction stays: {cut(short_places(made.why), _REASON)}"
    for one in made.vectors[:_MOST_TOWERS]:
        yield _tower(one, type(program.get_submodule(one.target)).__name__)
    if len(made.vectors) > _MOST_TOWERS:
        yield f"... and {len(made.vectors) - _MOST_TOWERS:,} more (program.tower_model.vectors)"


def _changed(program: TowerProgram, made: TowerModel) -> Iterator[str]:
    if not made.resized:
        yield "the interaction takes what they make as it is: nothing changes its shape"
        return
    tensors = dict((*program.named_parameters(remove_duplicate=False), *program.named_buffers(remove_duplicate=False)))
    # Lists of places (which products are kept, say) are made for the new sizes, and never drawn.
    drawn = sum(name not in tensors or tensors[name].is_floating_point() for name in made.resized)
    lists = len(made.resized) - drawn
    how = "with the flat model's weights as far as they can be kept" if made.kept else "their layers drawn anew"
    parts = [f"{counted(drawn, 'tensor')} of other shapes, {how}"] if drawn else []
    parts += [f"{counted(lists, 'index list')} for the new sizes"] if lists else []
    yield f"the interaction is re-sized: {'; '.join(parts)}"


def _resized(resized: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> Iterator[str]:
    for name, (old, new) in list(resized.items())[:_MOST_TENSORS]:
        yield f"  {name}: {_shape(old)} to {_shape(new)}"
    if len(resized) > _MOST_TENSORS:
        yield f"  ... and {len(resized) - _MOST_TENSORS:,} more (program.tower_model.resized)"


def _shape(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes)) or "a number"


def _tower(one: TowerVectors, module: str) -> str:
    widths = (min(one.widths), max(one.widths))
    given = f"{counted(len(one.lookups), 'vector')} of {span(widths)}"
    if one.passes:
        return f"tower {one.tower}: {given} pass through"
    return f"tower {one.tower}: {given} to {counted(one.vectors, 'vector')} of {one.width}, {module}"
