"""What the graph records of its tensors: shapes, as numbers and multiples of the number of samples, and what memory they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SHAPE = "dmt_shape"
"""Meta key of nodes whose value is a tensor: its :data:`Shape`, seen on example inputs."""


STORAGE = "dmt_storage"
"""Meta key of nodes whose value is a tensor: the number of its memory, which views of it share."""

WRITES = "dmt_writes"
"""Meta key of nodes that write to their arguments: the numbers of the memory that they write to."""


@dataclass(frozen=True)
class PerSample:
    """``times`` x the number of samples, and ``plus``."""

    times: int
    plus: int

    def at(self, batch: int) -> int:
        return self.times * batch + self.plus

    def __str__(self) -> str:
        return ("B" if self.times == 1 else f"{self.times}*B") + (f"{self.plus:+d}" if self.plus else "")


Shape = tuple[int | PerSample | None, ...]
"""None is a size that depends on more than the number of samples."""


def fit(seen: Sequence[tuple[int, Sequence[int]]]) -> Shape | None:
    """The shape that agrees with pairs of a batch size and a shape; None if not even the number of dimensions is the same."""
    if len({len(shape) for _, shape in seen}) != 1:
        return None
    batches = [batch for batch, _ in seen]
    return tuple(_fit(batches, sizes) for sizes in zip(*(shape for _, shape in seen), strict=True))


def _fit(batches: Sequence[int], sizes: Sequence[int]) -> int | PerSample | None:
    if len(set(sizes)) == 1:
        return sizes[0]
    other = next((index for index, batch in enumerate(batches) if batch != batches[0]), None)
    if other is None:
        return None
    times, left = divmod(sizes[other] - sizes[0], batches[other] - batches[0])
    size = PerSample(times, sizes[0] - times * batches[0])
    return size if not left and [size.at(batch) for batch in batches] == list(sizes) else None


def agrees(shape: Shape, found: Sequence[int], batch: int) -> bool:
    """Whether a tensor of ``found`` sizes is of ``shape`` where there are ``batch`` samples."""
    expected = [size.at(batch) if isinstance(size, PerSample) else size for size in shape]
    return len(expected) == len(found) and all(want in (None, size) for want, size in zip(expected, found, strict=True))


def text(shape: Shape) -> str:
    """As a reader writes it: ``(B, 4)``."""
    return f"({', '.join('?' if size is None else str(size) for size in shape)}{',' if len(shape) == 1 else ''})"


def in_order(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether what torch makes of a tensor, element by element, is contiguous.

    The new tensor's dimensions lie in memory in the order of the given one's strides. A stride of 0 leaves that open.
    """
    steps = [stride for size, stride in zip(sizes, strides, strict=True) if size > 1 and stride]
    return all(outer > inner for outer, inner in pairwise(steps))
