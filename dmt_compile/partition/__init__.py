"""Ways to divide a model's tables over towers and ranks."""

from .assign import make_plan

__all__ = ["make_plan"]
