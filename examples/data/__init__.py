"""Data sets of the demo, all read into the same `RecDataset`."""

from examples.data.dataset import DataError, RecDataset, SparseFeature

__all__ = ["DataError", "RecDataset", "SparseFeature"]
