"""Re-sizing what stands behind vectors that change in number or width: sizes as algebra, no knowledge of layers or interactions."""

from __future__ import annotations

from .apply import apply_sizes
from .derive import Derivation, NewSizes, Segment
from .symbols import Unfit

__all__ = ["Derivation", "NewSizes", "Segment", "Unfit", "apply_sizes"]
