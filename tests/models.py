"""Models and batches that the tests compile: TorchRec's own, a user's own, and random ones from a description."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.models.experimental.transformerdlrm import DLRM_Transformer
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType

from dmt_compile.graphs import clone_sharing_tensors, copy_graph, extras_of, graph_module_over
from dmt_compile.stage import Stage
from dmt_compile.verify.cluster import simulate

# Tensors here are tiny: more threads only wait for each other, many times longer when other tests run beside.
torch.set_num_threads(1)

ROWS = 12
DENSE = 4


def table(
    name: str, features: Sequence[str], dim: int = 8, *, mean: bool = False, half: bool = False, rows: int = ROWS
) -> EmbeddingBagConfig:
    """A table's configuration."""
    return EmbeddingBagConfig(
        name=name,
        embedding_dim=dim,
        num_embeddings=rows,
        feature_names=list(features),
        pooling=PoolingType.MEAN if mean else PoolingType.SUM,
        data_type=DataType.FP16 if half else DataType.FP32,
    )


def collection(*tables: EmbeddingBagConfig, weighted: bool = False, device: str | None = None) -> EmbeddingBagCollection:
    """A collection of these tables."""
    return EmbeddingBagCollection(
        tables=list(tables), is_weighted=weighted, device=torch.device(device) if device is not None else None
    )


def plain_collection(count: int = 5, dim: int = 8, device: str | None = None) -> EmbeddingBagCollection:
    """``count`` tables t0, t1, ... of one feature f0, f1, ... each, sum and mean pooling in turn."""
    return collection(*(table(f"t{i}", [f"f{i}"], dim, mean=i % 2 == 1) for i in range(count)), device=device)


def jagged(
    features: Sequence[str],
    batch: int,
    *,
    seed: int = 0,
    weighted: bool = False,
    ids: torch.dtype = torch.int64,
    longest: int = 3,
    rows: int = ROWS,
) -> KeyedJaggedTensor:
    """Random bags of 0 to ``longest`` ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (len(features) * batch,), generator=generator, dtype=torch.int32)
    count = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.randint(0, rows, (count,), generator=generator).to(ids),
        lengths=lengths,
        weights=torch.rand(count, generator=generator) if weighted else None,
        stride=batch,
    )


def dense(batch: int, width: int = DENSE, seed: int = 1) -> torch.Tensor:
    """Random dense features."""
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(seed))


# TorchRec's own models


def torchrec_model(name: str, device: str | None = None) -> nn.Module:
    """A small instance of one of TorchRec's models; they read five features f0..f4."""
    torch.manual_seed(0)
    ebc = plain_collection(device=device)
    where: dict[str, Any] = {} if device is None else {"dense_device": torch.device(device)}
    if name == "DLRM":
        return DLRM(ebc, DENSE, [8, 8], [8, 1], **where)
    if name == "DLRM_Projection":
        branches = {"interaction_branch1_layer_sizes": [16], "interaction_branch2_layer_sizes": [16]}
        return DLRM_Projection(ebc, DENSE, [8, 8], [8, 1], **branches, **where)
    if name == "DLRM_DCN":
        return DLRM_DCN(ebc, DENSE, [8, 8], [8, 1], dcn_num_layers=2, dcn_low_rank_dim=4, **where)
    if name == "DLRM_Transformer":
        return DLRM_Transformer(ebc, DENSE, [8, 8], [8, 1], nhead=2, ntransformer_layers=1, **where)
    assert name == "SimpleDeepFMNN"
    return SimpleDeepFMNN(num_dense_features=DENSE, embedding_bag_collection=ebc, hidden_layer_size=8, deep_fm_dimension=4)


TORCHREC_MODELS = ("DLRM", "DLRM_Projection", "DLRM_DCN", "DLRM_Transformer", "SimpleDeepFMNN")
FIVE = tuple(f"f{i}" for i in range(5))


def torchrec_inputs(batch: int, seed: int = 0) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """What TorchRec's models take."""
    return dense(batch, seed=seed + 1), jagged(FIVE, batch, seed=seed)


def torchrec_batch(batch: int, seed: int = 0) -> Batch:
    """What ``DLRMTrain`` takes."""
    labels = torch.arange(batch) % 2
    return Batch(*torchrec_inputs(batch, seed), labels)


class DeepFMTrain(nn.Module):
    """What DLRMTrain is to DLRM, for SimpleDeepFMNN, which gives probabilities."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = nn.BCELoss()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        scores = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = self.loss_fn(scores, batch.labels.float())
        return loss, (loss.detach(), scores.detach(), batch.labels.detach())


def training_model(name: str) -> nn.Module:
    """A TorchRec model with its loss."""
    model = torchrec_model(name)
    return DLRMTrain(model) if isinstance(model, DLRM) else DeepFMTrain(model)


# A user's model from a description


@dataclass(frozen=True)
class TableSpec:
    """One table; ``features`` are numbers into the pool of features."""

    features: tuple[int, ...]
    dim: int
    mean: bool
    half: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A model of several collections over a pool of features.

    ``calls`` are (collection, input) pairs in the order of the calls: a pair may come twice. ``tied`` makes the first table of
    the last collection the same parameter as the first table of the first collection.
    """

    collections: tuple[tuple[TableSpec, ...], ...]
    weighted: tuple[bool, ...]
    calls: tuple[tuple[int, int], ...]
    inputs: int = 1
    tied: bool = False
    alias: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        used = {number for tables in self.collections for spec in tables for number in spec.features}
        return tuple(f"x{number}" for number in sorted(used))


@dataclass(frozen=True)
class BatchSpec:
    """A batch dealt by hand: ``sizes`` are the samples of every rank."""

    sizes: tuple[int, ...]
    ids: torch.dtype = torch.int64
    longest: int = 3
    seed: int = 0


class SpecModel(nn.Module):
    """The model that a :class:`ModelSpec` describes: all pooled columns, and a layer over them."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.spec = spec
        for number, tables in enumerate(spec.collections):
            configs = [
                table(f"c{number}t{i}", [f"x{f}" for f in t.features], t.dim, mean=t.mean, half=t.half)
                for i, t in enumerate(tables)
            ]
            setattr(self, f"c{number}", collection(*configs, weighted=spec.weighted[number]))
        last = len(spec.collections) - 1
        if spec.tied:
            getattr(self, f"c{last}").embedding_bags[f"c{last}t0"].weight = self.c0.embedding_bags["c0t0"].weight
        if spec.alias:
            self.other_name = getattr(self, f"c{last}")
        width = sum(t.dim * len(t.features) for number, _ in spec.calls for t in spec.collections[number])
        self.top = nn.Linear(width, 2)

    def forward(self, *inputs: KeyedJaggedTensor) -> dict[str, Any]:
        last = len(self.spec.collections) - 1
        pooled = []
        for number, source in self.spec.calls:
            name = "other_name" if self.spec.alias and number == last else f"c{number}"
            pooled.append(getattr(self, name)(inputs[source]))
        columns = torch.cat([kt.values() for kt in pooled], dim=1)
        return {"pooled": pooled, "columns": columns, "scores": self.top(columns)}

    def inputs(self, batch: BatchSpec) -> list[tuple[KeyedJaggedTensor, ...]]:
        """The inputs of every rank."""
        needs = any(self.spec.weighted)
        return [
            tuple(
                jagged(
                    self.spec.features,
                    size,
                    seed=100 * batch.seed + 10 * rank + source,
                    weighted=needs,
                    ids=batch.ids,
                    longest=batch.longest,
                )
                for source in range(self.spec.inputs)
            )
            for rank, size in enumerate(batch.sizes)
        ]


class PooledOnly(nn.Module):
    """The smallest model: what one collection returns, as a tensor."""

    def __init__(self, *tables: EmbeddingBagConfig, weighted: bool = False) -> None:
        super().__init__()
        self.ebc = collection(*tables, weighted=weighted)

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return self.ebc(sparse).values()


def line_of(function: Any, text: str) -> int:
    """The line of the one line of a function that holds ``text``."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [first + i for i, line in enumerate(lines) if text in line]
    return found


BATCH = 11


class Net(nn.Module):
    """A user's model with everything that a module may carry."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = collection(table("a", ["x"], 3), table("b", ["y"], 2))
        self.bottom = nn.Linear(DENSE, 5)
        self.extra = self.make()
        self.register_buffer("scale", torch.full((5,), 2.0))
        self.register_buffer("never_read", torch.arange(3))
        self.register_buffer("not_saved", torch.ones(5), persistent=False)
        self.plain_tensor = torch.full((5,), 0.5)
        self.note = {"anything": [1, 2]}

    def make(self) -> nn.Module:
        return nn.Identity()

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        columns = self.ebc(sparse).values()
        mixed = self.extra(self.bottom(dense)) * self.scale
        return columns + mixed + self.plain_tensor * self.not_saved


def inputs(batch: int = BATCH) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    return dense(batch), jagged(["x", "y"], batch)


class Shell(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return self.inner(dense, sparse)


def golden_model() -> PooledOnly:
    """One table per rank, one column each; row r of table k holds the number 4r + k (dmt.md, section 2)."""
    model = PooledOnly(*(table(f"t{k}", [f"f{k}"], 1, rows=4) for k in range(4)))
    with torch.no_grad():
        for k in range(4):
            model.ebc.embedding_bags[f"t{k}"].weight.copy_(torch.arange(4.0).unsqueeze(1) * 4 + k)
    return model


def golden_inputs() -> list[tuple[KeyedJaggedTensor]]:
    """One sample per rank: rank r's sample has id r for every feature."""
    keys = [f"f{k}" for k in range(4)]
    return [(KeyedJaggedTensor(keys=keys, values=torch.full((4,), r), lengths=torch.ones(4, dtype=torch.int32)),) for r in range(4)]


def cut_at(stage: Stage, node_name: str) -> Stage:
    """The stage's own graph, ending with the value of one of its nodes."""
    graph = copy_graph(stage.graph)
    nodes = {node.name: node for node in graph.nodes}
    nodes["output"].args = (nodes[node_name],)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)
    module = graph_module_over(stage.root, graph, extras_of(stage.graph_module), "Cut")
    return dataclasses.replace(stage, graph_module=module)


def run_ranks(stage: Stage, inputs: Sequence[tuple[Any, ...]], seed: int | None = None) -> list[Any]:
    """A stage on all ranks in lock-step, each on its own inputs."""
    roots = [clone_sharing_tensors(stage.root, copy_buffers=True) for _ in inputs]
    return simulate(stage, [(tuple(given), {}) for given in inputs], roots, seed)
