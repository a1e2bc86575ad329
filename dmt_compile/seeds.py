"""Seeds as torch takes them."""

from __future__ import annotations

import operator
from typing import Any

from .errors import DmtError


def whole_seed(seed: Any, error: type[DmtError]) -> int:
    """A seed as a Python number, with room for the small numbers that are added to it for towers, layers and ranks.

    Raises:
        DmtError: an ``error``: it is no whole number, or none of 63 bits and a sign.
    """
    try:
        number = operator.index(seed)
    except (TypeError, ValueError, RuntimeError):
        raise error(f"seed must be a whole number, got {type(seed).__name__} {seed!r}") from None
    if not -(2**63) <= number < 2**63:
        raise error(f"seed must be from -2**63 to 2**63 - 1, got {number}")
    return number
