"""Constant tensors that were written for a number of vectors: triangles of a table of products, as indices or as a mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch


@dataclass(frozen=True)
class Pattern:
    """How a constant follows from a number n: ``make(n)`` makes it, and its values are places among n (or, ``flat``, n * n).

    ``length`` is the number of places as an expression in :data:`ORDER`, None for a table of n x n.
    """

    order: int
    make: Callable[[int], torch.Tensor]
    length: sympy.Expr | None
    flat: bool = False


ORDER = sympy.Symbol("n", integer=True, positive=True)


def patterns_of(value: torch.Tensor) -> list[Pattern]:
    """The patterns that a constant may follow; several where it could have been written for different numbers."""
    if value.numel() == 0 or value.is_meta or value.is_complex():
        return []
    if value.dtype is torch.bool or value.is_floating_point():
        return _table(value)
    return _indices(value)


_TRIANGLES = [(torch.triu_indices, offset) for offset in (0, 1)] + [(torch.tril_indices, offset) for offset in (-1, 0)]


def _indices(value: torch.Tensor) -> list[Pattern]:
    found = []
    places = value.shape[-1]
    highest = int(value.max()) + 1
    for triangle, offset in _TRIANGLES:
        order = _order(places, offset)
        if order is None or order < 2:
            continue
        length = ORDER * (ORDER - 1) / 2 if offset else ORDER * (ORDER + 1) / 2
        both = triangle(order, order, offset).to(value.device, value.dtype)
        for pick in _PICKS:
            made = pick(both, order)
            if made.shape == value.shape and torch.equal(made, value):
                found.append(Pattern(order, partial(_triangle, triangle, offset, pick, value), length, pick in _PLACES))
    if value.dim() == 1 and highest == places > 1 and torch.equal(value, torch.arange(places).to(value)):
        found.append(Pattern(places, partial(_in_order, value), ORDER))
    return found


def _triangle(triangle: Any, offset: int, pick: Any, like: torch.Tensor, n: int) -> torch.Tensor:
    made: torch.Tensor = pick(triangle(n, n, offset), n)
    return made.to(like.device, like.dtype)


def _in_order(like: torch.Tensor, n: int) -> torch.Tensor:
    return torch.arange(n).to(like.device, like.dtype)


# Places in a table of n x n, counted row by row; and how else a triangle's rows and columns are written.
_PLACES: tuple[Callable[[torch.Tensor, int], torch.Tensor], ...] = (lambda t, n: t[0] * n + t[1], lambda t, n: t[1] * n + t[0])
_PICKS: tuple[Callable[[torch.Tensor, int], torch.Tensor], ...] = (
    *(lambda t, n: t, lambda t, n: t[[1, 0]], lambda t, n: t[0], lambda t, n: t[1]),
    *_PLACES,
)


def _order(places: int, offset: int) -> int | None:
    """n where n (n - 1) / 2 or, with the diagonal, n (n + 1) / 2 is ``places``."""
    n = 1
    while (count := n * (n - 1) // 2 if offset else n * (n + 1) // 2) < places:
        n += 1
    return n if count == places else None


def _table(value: torch.Tensor) -> list[Pattern]:
    if value.dim() < 2 or value.shape[-1] != value.shape[-2] or value.numel() != value.shape[-1] ** 2 or value.shape[-1] < 2:
        return []
    order, lead = value.shape[-1], value.shape[:-2]
    table = value.reshape(order, order)
    inside, outside = table[0, 1].clone(), table[1, 0].clone()
    diagonal = table[0, 0].clone()

    def make(n: int) -> torch.Tensor:
        made = torch.empty(n, n, dtype=value.dtype, device=value.device)
        rows, columns = torch.arange(n, device=value.device).unsqueeze(1), torch.arange(n, device=value.device)
        made[rows < columns], made[rows > columns], made[rows == columns] = inside, outside, diagonal
        return made.reshape(*lead, n, n)

    return [Pattern(order, make, None)] if torch.equal(make(order), value) else []
