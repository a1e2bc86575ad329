"""TorchRec's own models, and what a user may do with TorchRec's types, compiled unmodified and proved equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from models import (
    TORCHREC_MODELS,
    Net,
    PooledOnly,
    Shell,
    collection,
    dense,
    inputs,
    jagged,
    plain_collection,
    table,
    torchrec_batch,
    torchrec_inputs,
    torchrec_model,
    training_model,
)
from torch import nn
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.regroup import KTRegroupAsDict

from dmt_compile import Topology, towerize
from dmt_compile.verify.compare import bits_differ


@pytest.mark.parametrize("name", TORCHREC_MODELS)
def test_model(name: str) -> None:
    program = towerize(torchrec_model(name), Topology(3, 2))
    certificate = program.verify(*torchrec_inputs(13), steps=1)
    assert certificate.passed, str(certificate)
    assert program.leaves == {}
    assert [len(t.features) for t in program.plan.towers] == [2, 2, 1]


@pytest.mark.parametrize("name", TORCHREC_MODELS)
def test_training_model(name: str) -> None:
    program = towerize(training_model(name), Topology(2, 1), partition="strided")
    certificate = program.verify(torchrec_batch(8), steps=1)
    assert certificate.passed, str(certificate)
    assert certificate.batch_sizes == (4, 4)


@pytest.mark.parametrize("shape, towers", [((4, 2), 4), ((2, 4), 2), ((4, 2), 1), ((2, 4), 8)])
def test_dlrm_on_every_kind_of_grid(shape: tuple[int, int], towers: int) -> None:
    model = torchrec_model("DLRM")
    program = towerize(model, Topology(*shape), towers=towers)
    inputs = torchrec_inputs(5)
    found = program.simulate(*inputs)
    assert [part.shape[0] for part in found] == [1, 1, 1, 1, 1, 0, 0, 0]
    torch.testing.assert_close(torch.cat(found), model(*inputs))


@pytest.mark.parametrize("name", TORCHREC_MODELS)
def test_meta_device(name: str) -> None:
    program = towerize(torchrec_model(name, "meta"), Topology(4, 2))
    assert program.plan.hash == towerize(torchrec_model(name), Topology(4, 2)).plan.hash
    assert all(p.is_meta for n, p in program.named_parameters() if "embedding_bags" in n)


# What users do


class Base(nn.Module):
    """Collections a (features x, y) and b (feature z)."""

    def __init__(self, *, weighted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = collection(table("x", ["x"], 3), table("y", ["y"], 2, mean=not weighted), weighted=weighted)
        self.b = collection(table("z", ["z"], 3))
        self.top = nn.Linear(8, 2)


class Splits(Base):
    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        first, second = sparse.split([2, 1])[0], sparse.split([2, 1])[1]
        return self.top(torch.cat([self.a(first).values(), self.b(second).values()], dim=1))


class Regroups(Base):
    def forward(self, sparse: KeyedJaggedTensor) -> list[torch.Tensor]:
        groups = KeyedTensor.regroup([self.a(sparse), self.b(sparse)], [["z", "x"], ["y"]])
        return [groups[0] * 2, groups[1]]


class RegroupsAsDict(Base):
    def forward(self, sparse: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        return KeyedTensor.regroup_as_dict([self.a(sparse), self.b(sparse)], [["z", "x"], ["y"]], ["user", "item"])


class RegroupModule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.regroup = KTRegroupAsDict([["z", "x"], ["y"]], ["user", "item"])

    def forward(self, sparse: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        return self.regroup([self.a(sparse), self.b(sparse)])


class ByKey(Base):
    def forward(self, sparse: KeyedJaggedTensor) -> tuple[torch.Tensor, dict[str, torch.Tensor], KeyedTensor]:
        pooled = self.a(sparse)
        return pooled["x"] * 2, pooled.to_dict(), self.b(sparse)


class OneFeature(Base):
    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return self.a(sparse)["x"] + sparse["z"].lengths().unsqueeze(1)


class TwoInputs(Base):
    def forward(self, first: KeyedJaggedTensor, *, second: KeyedJaggedTensor) -> torch.Tensor:
        return self.top(torch.cat([self.a(first).values(), self.b(second).values()], dim=1))


class BuiltInside(Base):
    """Ids as a plain matrix, and weights that are learned."""

    def __init__(self) -> None:
        super().__init__(weighted=True)
        self.importance = nn.Parameter(torch.rand(12))

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        values = ids.t().reshape(-1)
        sparse = KeyedJaggedTensor(keys=["x", "y"], values=values, lengths=torch.ones_like(values), weights=self.importance[values])
        return self.a(sparse)["x"] * dense


class FromLengths(Base):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        sparse = KeyedJaggedTensor.from_lengths_sync(
            keys=["z"], values=batch["ids"].reshape(-1), lengths=torch.ones_like(batch["ids"]).reshape(-1)
        )
        return self.b(sparse).values()


class Sample(NamedTuple):
    dense: torch.Tensor
    sparse: KeyedJaggedTensor


@dataclasses.dataclass
class Scores:
    scores: torch.Tensor
    pooled: KeyedTensor


class DataclassOut(Base):
    def forward(self, sample: Sample) -> Scores:
        pooled = self.b(sample.sparse)
        return scores_of(pooled.values() * sample.dense, pooled)


@torch.fx.wrap
def scores_of(scores: torch.Tensor, pooled: KeyedTensor) -> Scores:
    return Scores(scores, pooled)


class Processed(nn.Module):
    """TorchRec's position weights in front of a collection."""

    def __init__(self) -> None:
        super().__init__()
        weighted = collection(table("x", ["x"], 3), table("y", ["y"], 2), weighted=True)
        self.fp = FeatureProcessedEmbeddingBagCollection(weighted, PositionWeightedModuleCollection({"x": 10, "y": 10}))

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return self.fp(sparse).values()


def sparse(seed: int = 0, weighted: bool = False) -> KeyedJaggedTensor:
    return jagged(["x", "y", "z"], 13, seed=seed, weighted=weighted)


def matrix(columns: int) -> torch.Tensor:
    return torch.randint(0, 12, (13, columns), generator=torch.Generator().manual_seed(3))


USES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "split": (Splits, (sparse(),), {}),
    "split, by keyword": (Splits, (), {"sparse": sparse()}),
    "regroup": (Regroups, (sparse(),), {}),
    "regroup as dict": (RegroupsAsDict, (sparse(),), {}),
    "regroup module": (RegroupModule, (sparse(),), {}),
    "by key": (ByKey, (sparse(),), {}),
    "one feature of the batch": (OneFeature, (sparse(),), {}),
    "two inputs": (TwoInputs, (sparse(),), {"second": sparse(1)}),
    "ids built inside": (BuiltInside, (matrix(2), dense(13, 3)), {}),
    "from lengths, dict batch": (FromLengths, ({"ids": matrix(1)},), {}),
    "named tuple in, dataclass out": (DataclassOut, (Sample(dense(13, 3), sparse()),), {}),
    "feature processor": (Processed, (jagged(["x", "y"], 13),), {}),
}


@pytest.mark.parametrize("use", USES)
def test_use(use: str) -> None:
    make, args, kwargs = USES[use]
    model = make()
    program = towerize(model, Topology(3, 2))
    certificate = program.verify(*args, steps=1, **kwargs)
    assert certificate.passed, str(certificate)
    assert bits_differ(program(*args, **kwargs), model(*args, **kwargs)) is None


def test_nothing_of_torchrec_is_left_uncalled() -> None:
    """The flat graph of a compiled model still calls every collection; later stages call none."""
    program = towerize(torchrec_model("DLRM"), Topology(2, 2))
    called = {name: [str(n.target) for n in stage.graph.nodes if n.op == "call_module"] for name, stage in program.stages.items()}
    assert "sparse_arch.embedding_bag_collection" in called["flat"]
    assert all("sparse_arch.embedding_bag_collection" not in called[name] for name in ("towers", "classic", "sptt", "lowered"))


def plain() -> nn.Module:
    return PooledOnly(*plain_collection().embedding_bag_configs())


@pytest.mark.parametrize("model", [lambda: torchrec_model("DLRM_DCN"), plain])
def test_node_count_does_not_depend_on_the_number_of_ranks(model: Callable[[], nn.Module]) -> None:
    counts = set()
    for shape in ((1, 2), (2, 1), (4, 2), (2, 8), (16, 8)):
        stages = towerize(model(), Topology(*shape)).stages
        counts.add(tuple(len(stages[name].graph.nodes) for name in ("classic", "sptt", "lowered")))
    assert len(counts) == 1


# A graph holds one way only, so code that reads self.training is kept whole or refused


class ByMode(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


class HoldsByMode(Net):
    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 5), ByMode(), ByMode().eval())


class TwoWays(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            x = x + torch.rand_like(x)
        return x * 2


class HoldsTwoWays(Net):
    def make(self) -> nn.Module:
        return TwoWays()


class LooksAtItsMode(Net):
    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        columns = self.ebc(sparse).values()
        return nn.functional.dropout(columns, 0.5, self.training)


@pytest.mark.parametrize("kind, leaves", [(HoldsByMode, ["extra.1", "extra.2"]), (HoldsTwoWays, ["extra"])])
@pytest.mark.parametrize("training", [True, False])
def test_submodule_that_reads_its_mode(kind: type[Net], leaves: list[str], training: bool) -> None:
    program = towerize(kind().train(training), Topology(4, 2))
    assert list(program.leaves) == leaves
    assert all("test_torchrec_models.py" in why and "in training than in evaluation" in why for why in program.leaves.values())
    for mode in (training, not training):
        assert program.train(mode).verify(*inputs(), steps=1).passed


@pytest.mark.parametrize("wrap", [lambda m: m, Shell])
def test_lookup_module_that_reads_its_mode(wrap: Any) -> None:
    program = towerize(wrap(LooksAtItsMode()), Topology(4, 2))
    assert program.leaves == {}
    for training in (True, False):
        assert program.train(training).verify(*inputs(), steps=1).passed
