"""Where a model mixes its features, found by data flow: :func:`find_interactions` runs the flat graph on a few samples.

Names of classes and variables are never read. See :mod:`labels` for how elements are followed to the features that they come
from, and :mod:`recognise` for how what mixes them gets its kind.
"""

from __future__ import annotations

from .find import few_samples, find_interactions
from .records import Block, BlockInput, Interaction, Member

__all__ = ["Block", "BlockInput", "Interaction", "Member", "few_samples", "find_interactions"]
