"""From a module to a graph for each of its modes: by symbolic tracing, or by torch.export where that fails."""

from .attempts import capture
from .captured import Captured

__all__ = ["Captured", "capture"]
