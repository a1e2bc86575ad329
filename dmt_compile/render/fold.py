"""What makes long lists short: repeated patterns, and the fewest nodes that must move to turn one order into another."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_LONGEST_PATTERN = 8
_FEWEST_REPEATS = 3


@dataclass(frozen=True)
class Run(Generic[T]):
    """``pattern`` stands ``repeats`` times in a row; ``last`` is its last occurrence."""

    pattern: tuple[T, ...]
    last: tuple[T, ...]
    repeats: int


def fold(items: Sequence[T], shapes: Sequence[Hashable]) -> list[Run[T]]:
    """Consecutive repeats of up to eight items of equal shapes as one run each, in linear time.

    Something is folded only if that saves at least two items.
    """
    runs: list[Run[T]] = []
    start = 0
    while start < len(items):
        length, repeats = _pattern_at(shapes, start)
        end = start + length * repeats
        runs.append(Run(tuple(items[start : start + length]), tuple(items[end - length : end]), repeats))
        start = end
    return runs


def _pattern_at(shapes: Sequence[Hashable], start: int) -> tuple[int, int]:
    """Length and repeats of the pattern at ``start`` that covers most; (1, 1) if nothing repeats often enough."""
    best = (1, 1)
    for length in range(1, min(_LONGEST_PATTERN, (len(shapes) - start) // _FEWEST_REPEATS) + 1):
        pattern = shapes[start : start + length]
        repeats, at = 1, start + length
        while shapes[at : at + length] == pattern:
            repeats += 1
            at += length
        saved = length * (repeats - 1)
        if repeats >= _FEWEST_REPEATS and saved > 2 and length * repeats > best[0] * best[1]:
            best = (length, repeats)
    return best


def moved(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """The fewest of ``after``'s names that must move to turn one order into the other, in ``after``'s order.

    Both hold the same names. All but a longest increasing subsequence, in O(n log n).
    """
    position = {name: index for index, name in enumerate(before)}
    places = [position[name] for name in after]
    tails: list[int] = []  # tails[k]: the smallest end of an increasing subsequence of length k + 1
    tail_at: list[int] = []
    previous: list[int] = []
    for index, value in enumerate(places):
        length = bisect_left(tails, value)
        previous.append(tail_at[length - 1] if length else -1)
        if length == len(tails):
            tails.append(value)
            tail_at.append(index)
        else:
            tails[length], tail_at[length] = value, index
    kept: set[int] = set()
    index = tail_at[-1] if tail_at else -1
    while index >= 0:
        kept.add(index)
        index = previous[index]
    return [name for index, name in enumerate(after) if index not in kept]
