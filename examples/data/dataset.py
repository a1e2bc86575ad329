"""A recommender data set in memory, and its deterministic global batches.

Shapes: N samples, K dense features, F sparse features, B samples in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class DataError(ValueError):
    """Input that cannot be used; the message says where and what was expected."""


@dataclass(frozen=True)
class SparseFeature:
    """One categorical feature, one bag of ids per sample.

    Attributes:
        name: the feature's key in the `KeyedJaggedTensor`.
        rows: size of its table; every id is in `[0, rows)`.
        values: ids of all bags one after the other, int64 `(nnz,)`.
        offsets: bag n is `values[offsets[n]:offsets[n + 1]]`, int64 `(N + 1,)`.
    """

    name: str
    rows: int
    values: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        if self.offsets.numel() == 0 or int(self.offsets[-1]) != self.values.numel():
            raise DataError(f"feature {self.name!r}: the last offset must be {self.values.numel()}")
        if self.values.numel() and not 0 <= int(self.values.min()) <= int(self.values.max()) < self.rows:
            raise DataError(f"feature {self.name!r}: ids must be in [0, {self.rows})")

    @classmethod
    def single(cls, name: str, rows: int, ids: Tensor) -> SparseFeature:
        """Exactly one id per sample; `ids` is int64 `(N,)`."""
        return cls(name, rows, ids, torch.arange(ids.numel() + 1))

    @classmethod
    def bags(cls, name: str, rows: int, bags: Sequence[Sequence[int]]) -> SparseFeature:
        """Any number of ids per sample, none included."""
        lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
        values = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)
        return cls(name, rows, values, _offsets(lengths))

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def multi_hot(self) -> bool:
        """Whether any sample has a number of ids other than one."""
        return bool((self.offsets.diff() != 1).any())

    def gather(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Ids `(nnz,)` and bag lengths `(B,)` of the `samples`, int64 `(B,)`."""
        starts = self.offsets[samples]
        lengths = self.offsets[samples + 1] - starts
        offsets = _offsets(lengths)
        shift = torch.repeat_interleave(starts - offsets[:-1], lengths)
        return self.values[torch.arange(int(offsets[-1])) + shift], lengths

    def take(self, samples: Tensor) -> SparseFeature:
        """The same feature with one bag per entry of `samples`; repeats are allowed."""
        values, lengths = self.gather(samples)
        return SparseFeature(self.name, self.rows, values, _offsets(lengths))


@dataclass(frozen=True)
class RecDataset:
    """Labelled samples with dense and sparse features.

    Attributes:
        title: what the demo calls the data.
        dense_names: K names.
        dense: float32 `(N, K)`.
        sparse: F features of N bags each.
        labels: 0 or 1, float32 `(N,)`.
    """

    title: str
    dense_names: tuple[str, ...]
    dense: Tensor
    sparse: tuple[SparseFeature, ...]
    labels: Tensor

    def __post_init__(self) -> None:
        samples = self.labels.numel()
        if samples == 0:
            raise DataError(f"{self.title}: no samples")
        if self.dense.shape != (samples, len(self.dense_names)):
            raise DataError(
                f"{self.title}: dense features have shape {tuple(self.dense.shape)}, expected {(samples, len(self.dense_names))}"
            )
        for feature in self.sparse:
            if len(feature) != samples:
                raise DataError(f"{self.title}: feature {feature.name!r} has {len(feature)} bags, expected {samples}")

    def __len__(self) -> int:
        return self.labels.numel()

    @property
    def table_sizes(self) -> dict[str, int]:
        """Rows of the table of every sparse feature, in feature order."""
        return {feature.name: feature.rows for feature in self.sparse}

    def take(self, samples: Tensor) -> RecDataset:
        """The data set of the given samples, int64 `(M,)`, in that order."""
        return RecDataset(
            self.title,
            self.dense_names,
            self.dense[samples],
            tuple(feature.take(samples) for feature in self.sparse),
            self.labels[samples],
        )

    def split(self, test_fraction: float = 0.2, seed: int = 0) -> tuple[RecDataset, RecDataset]:
        """Train and test part of a seeded shuffle."""
        tests = round(len(self) * test_fraction)
        if not 0 < tests < len(self):
            raise DataError(
                f"{self.title}: {len(self)} samples cannot be split into a train and a test part with test fraction {test_fraction}"
            )
        order = _shuffle(len(self), seed)
        return self.take(order[tests:]), self.take(order[:tests])

    def batch(self, samples: Tensor) -> Batch:
        """Samples int64 `(B,)` as dense `(B, K)`, a `KeyedJaggedTensor` of F keys, labels `(B,)`."""
        gathered = [feature.gather(samples) for feature in self.sparse]
        return Batch(
            dense_features=self.dense[samples],
            sparse_features=KeyedJaggedTensor(
                keys=[feature.name for feature in self.sparse],
                values=torch.cat([values for values, _ in gathered]),
                lengths=torch.cat([lengths for _, lengths in gathered]),
            ),
            labels=self.labels[samples],
        )

    def batches(self, batch_size: int, seed: int, *, epoch: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """This rank's share of every global batch of one epoch.

        The order depends on `seed` and `epoch` alone, so that runs of any world size see the same
        global batches. The ragged tail of the epoch is dropped: every rank then has the same number
        of samples in every step, and the mean over ranks of their mean losses is the mean over the
        global batch.
        """
        if batch_size % world_size:
            raise DataError(f"batch size {batch_size} is not divisible by {world_size} ranks")
        order = _shuffle(len(self), seed * 1_000_003 + epoch + 1)
        for step in range(len(self) // batch_size):
            yield self.batch(deal(order[step * batch_size : (step + 1) * batch_size], rank, world_size))


def deal(samples: Tensor, rank: int, world_size: int) -> Tensor:
    """The contiguous share `(B / world_size,)` of a global batch of samples `(B,)` for one rank."""
    share, rest = divmod(samples.numel(), world_size)
    if rest:
        raise DataError(f"{samples.numel()} samples cannot be dealt evenly to {world_size} ranks")
    return samples[rank * share : (rank + 1) * share]


def _shuffle(samples: int, seed: int) -> Tensor:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed))


def _offsets(lengths: Tensor) -> Tensor:
    """Lengths `(B,)` to offsets `(B + 1,)`."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
