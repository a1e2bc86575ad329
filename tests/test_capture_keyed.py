"""Models that read KeyedJaggedTensors and that symbolic tracing cannot take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from models import DENSE, collection, dense, jagged, table
from torch import nn
from torchrec import EmbeddingCollection, KeyedJaggedTensor, KeyedTensor
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.regroup import KTRegroupAsDict

from dmt_compile import InputError, Topology, TowerProgram, towerize
from dmt_compile.nested import take_apart

TOPOLOGY = Topology(2, 2)
KEYS = ("f0", "f1", "f2")
Inputs = tuple[Any, ...]


def keyed(batch: int, longest: int = 3, seed: int = 0) -> Inputs:
    return dense(batch), jagged(KEYS, batch, seed=seed, longest=longest)


def weighted(batch: int, longest: int = 3, seed: int = 0) -> Inputs:
    return *keyed(batch, longest, seed), jagged(["g0"], batch, seed=seed + 1, weighted=True, longest=longest)


def proved(model: nn.Module, make: Callable[..., Inputs], example: tuple[int, int] = (9, 3)) -> TowerProgram:
    """Compiled, verified and called with other numbers of samples, of ids, and of ids at all."""
    program = towerize(model, TOPOLOGY, example_inputs=make(*example))
    assert program._dmt.captured.front_end == "torch.export" and program.replicated == {}
    for batch, longest in ((13, 2), (3, 5), (25, 0), (1, 1)):
        certificate = program.verify(*make(batch, longest, 3), steps=1)
        assert certificate.passed, str(certificate)
        found, expected = (take_apart(run(*make(batch, longest, 3)))[0] for run in (program, model))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return program


class Bottom(nn.Module):
    """A dense part that looks at shapes, and makes sizes by numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DENSE, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x.shape) == 1:
            x = x.unsqueeze(1)
        width = int(np.prod([n for n in x.shape[1:]]))
        return self.layer(x.reshape(-1, width) if width != x.shape[-1] else x)


class Model(nn.Module):
    """Two collections, the second weighted; ``read`` makes rows of what they return."""

    def __init__(self, read: Callable[[KeyedTensor, KeyedTensor], list[torch.Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bottom, self.read = Bottom(), read
        self.first = collection(table("t0", ["f0"]), table("t1", ["f1"], mean=True), table("t2", ["f0", "f2"]))
        self.second = collection(table("w0", ["g0"]), weighted=True)
        self.out = nn.Linear(6 * 8, 1)

    def forward(self, x: torch.Tensor, ids: KeyedJaggedTensor, more: KeyedJaggedTensor) -> torch.Tensor:
        if x.dim() == 2 and len(x.shape) == 2:
            return self.out(torch.cat([self.bottom(x), *self.read(self.first(ids), self.second(more))], 1))
        raise ValueError("a matrix is needed")


READS: dict[str, Callable[[KeyedTensor, KeyedTensor], list[torch.Tensor]]] = {
    "values": lambda a, b: [a.values(), b.values()],
    "key": lambda a, b: [*(a[key] for key in a.keys()), b["g0"]],  # noqa: SIM118  # no mapping
    "to_dict": lambda a, b: [*a.to_dict().values(), *b.to_dict().values()],
    "regroup": lambda a, b: list(KeyedTensor.regroup([a, b], [["f1", "g0"], ["f0@t0", "f2", "f0@t2"]])),
}


@pytest.mark.parametrize("read", ["key", "to_dict", "regroup"])
def test_two_collections(read: str) -> None:
    model = Model(READS[read])
    program = proved(model, weighted)
    assert [lookup.weighted for lookup in program.lookups.lookups] == [False] * 4 + [True]
    assert [source.label for source in program.lookups.sources] == ["ids", "more"]


@pytest.mark.parametrize("example", [(1, 1), (4, 0)])
def test_examples_with_few_ids(example: tuple[int, int]) -> None:
    """torch.export would take sizes of 0 and 1 for constants."""
    proved(Model(READS["values"]), weighted, example)


def test_as_many_ids_as_samples() -> None:
    """Sizes that happen to be equal in the example are not taken for one size."""

    def ones(batch: int, longest: int, seed: int = 0) -> Inputs:
        if batch != 9:
            return keyed(batch, longest, seed)
        lengths = torch.ones(3 * batch, dtype=torch.int32)
        return dense(batch), KeyedJaggedTensor(keys=list(KEYS), values=torch.arange(3 * batch) % 12, lengths=lengths)

    class One(Plain):
        def forward(self, x: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
            return self.out(self.rows(x, ids))

    proved(One(), ones)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bottom = Bottom()
        self.bags = collection(table("t0", ["f0"]), table("t1", ["f1", "f2"], mean=True))
        self.out = nn.Linear(4 * 8, 1)

    def rows(self, x: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
        if len(x.shape) != 2:
            raise ValueError
        return torch.cat([self.bottom(x), self.bags(ids).values()], 1)


@dataclass
class Batch:
    dense: torch.Tensor
    sparse: list[KeyedJaggedTensor]


def test_inside_other_inputs() -> None:
    """In a list in a dataclass; the KeyedTensor itself is also returned."""

    class Inside(Plain):
        def forward(self, batch: Batch) -> dict[str, Any]:
            return {"score": self.out(self.rows(batch.dense, batch.sparse[0])), "bags": self.bags(batch.sparse[0])}

    def batch(size: int, longest: int, seed: int = 0) -> Inputs:
        x, ids = keyed(size, longest, seed)
        return (Batch(x, [ids]),)

    program = proved(Inside(), batch)
    assert [source.label for source in program.lookups.sources] == ["batch.sparse[0]"]


def test_regroup_module() -> None:
    class Regroups(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.regroup = KTRegroupAsDict([["f0", "f2"], ["f1"]], ["some", "other"])

        def forward(self, x: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
            assert len(x.shape) == 2
            groups = self.regroup([self.bags(ids)])
            return self.out(torch.cat([self.bottom(x), groups["some"], groups["other"]], 1))

    proved(Regroups(), keyed)


@pytest.mark.parametrize("how", ["permuted", "changed", "made"])
def test_made_in_forward(how: str) -> None:
    class Makes(Plain):
        def forward(self, x: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
            if how == "permuted":
                ids = ids.permute([2, 1, 0])
            elif how == "changed":
                ids = KeyedJaggedTensor(keys=ids.keys(), values=ids.values() % 5, lengths=ids.lengths())
            else:
                column = (x[:, :1] * 10).abs().long().clamp(max=11)
                values, lengths = column.repeat(3, 1).reshape(-1), torch.ones(3 * x.shape[0], dtype=torch.int32)
                ids = KeyedJaggedTensor(keys=list(KEYS), values=values, lengths=lengths)
            return self.out(self.rows(x, ids))

    proved(Makes(), keyed)


def test_sequences() -> None:
    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bottom, self.out = Bottom(), nn.Linear(8, 1)
            tables = [EmbeddingConfig(12, 8, name="a", feature_names=["f0", "f1"])]
            self.rows = EmbeddingCollection(tables=[*tables, EmbeddingConfig(12, 8, name="b", feature_names=["f2"])])

        def forward(self, x: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
            assert len(x.shape) == 2
            found = self.rows(ids)
            padded = [found[key].to_padded_dense(3) for key in found]
            return self.out(self.bottom(x) + torch.stack(padded).max(2).values.sum(0))

    proved(Sequences(), keyed)


def test_dynamo_reads_collections_too() -> None:
    class Positions(Plain):
        def __init__(self) -> None:
            super().__init__()
            # Dynamo makes no size of what numpy returns for a list of sizes.
            self.bottom = nn.Linear(DENSE, 8)  # type: ignore[assignment]

        def forward(self, x: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
            places = torch.LongTensor(np.tile(np.arange(x.shape[1]), [x.shape[0], 1]))
            return self.out(self.rows(x, ids)) + (places * x).sum(1, keepdim=True)

    proved(Positions(), keyed)


def test_other_inputs() -> None:
    class Reads(Plain):
        def forward(self, x: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
            return self.out(self.rows(x, ids))

    program = proved(Reads(), keyed)
    x, _ = keyed(4)
    five, ones = torch.arange(5), torch.ones(5, dtype=torch.int64)
    for given, why in (
        (jagged(["f0", "f2", "f1"], 4), r"ids.keys\(\)\[1\] is 'f2', not 'f1'"),
        (jagged(KEYS, 4, weighted=True), r"ids.weights\(\) is a tensor, not None"),
        (torch.ones(4, 3), "ids is a tensor, not a KeyedJaggedTensor"),
        (
            KeyedJaggedTensor(keys=list(KEYS), values=five, lengths=ones, stride_per_key_per_rank=[[2], [2], [1]]),
            r"ids.variable_stride_per_key\(\) is True, not False",
        ),
        (KeyedJaggedTensor(keys=list(KEYS), values=five, lengths=ones), r"'ids.lengths\(\)' is of shape \(5,\)"),
    ):
        with pytest.raises(InputError, match=why):
            program(x, given)
    looked_at = jagged(KEYS, 4)
    looked_at.offsets()
    looked_at.to_dict()
    assert program(x, looked_at).shape == (4, 1), "what it has computed so far is no part of it"
