"""TorchRec's EmbeddingCollection: rows that are not pooled, as many as every sample has ids."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from distributed_cases import copied, gradients_of, objective
from ranks import Ranks
from torch import nn
from torchrec import EmbeddingCollection, KeyedJaggedTensor
from torchrec.modules.embedding_configs import EmbeddingConfig

from dmt_compile import Topology, towerize
from dmt_compile.verify.compare import bits_differ

LONGEST = 4


class Sequences(nn.Module):
    """Two features of one table and one of another, padded into an RNN, pooled, and returned; beside a pooled collection."""

    def __init__(self, need_indices: bool = False) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(name="t_items", embedding_dim=4, num_embeddings=models.ROWS, feature_names=["history", "liked"]),
            EmbeddingConfig(name="t_words", embedding_dim=4, num_embeddings=models.ROWS, feature_names=["title"]),
        ]
        self.ec = EmbeddingCollection(tables=tables, need_indices=need_indices)
        self.ebc = models.collection(models.table("users", ["user"], 3))
        self.gru, self.top = nn.GRU(4, 3, batch_first=True), nn.Linear(3 + 4 + 3, 1)

    def forward(self, sparse: KeyedJaggedTensor) -> tuple[torch.Tensor, Any]:
        rows = self.ec(sparse)
        read = self.gru(rows["history"].to_padded_dense(LONGEST))[0][:, -1]
        liked = rows["liked"].to_padded_dense(LONGEST).sum(1)
        return self.top(torch.cat([read, liked, self.ebc(sparse).values()], dim=1)), rows["title"]


def _model(need_indices: bool = False) -> Sequences:
    torch.manual_seed(0)
    return Sequences(need_indices)


def _batch(size: int, seed: int = 0) -> KeyedJaggedTensor:
    return models.jagged(["history", "user", "liked", "title"], size, seed=seed)


@pytest.mark.parametrize("need_indices", [False, True])
@pytest.mark.parametrize(("topology", "batch"), [(Topology(2, 2), 9), (Topology(3, 2), 4), (Topology(1, 1), 3)])
def test_verify(need_indices: bool, topology: Topology, batch: int) -> None:
    """With fewer samples than ranks too, so that some ranks have none."""
    program = towerize(_model(need_indices), topology, example_inputs=(_batch(6),))
    certificate = program.verify(_batch(batch, seed=1))
    assert certificate.passed, str(certificate)
    assert {lookup.feature for lookup in program.lookups.lookups} == {"history", "liked", "title", "user"}
    assert not program.replicated
    assert not program.leaves


def test_one_id_per_sample_by_chance() -> None:
    """The number of ids in the example says nothing about that of other batches."""
    lengths = torch.ones(4 * 5, dtype=torch.int32)
    ones = KeyedJaggedTensor(keys=["history", "user", "liked", "title"], values=torch.arange(20) % models.ROWS, lengths=lengths)
    program = towerize(_model(), Topology(2, 2), example_inputs=(ones,))
    certificate = program.verify(_batch(9, seed=1), steps=0)
    assert certificate.passed, str(certificate)


def test_a_hook_on_a_collection_runs() -> None:
    model = _model()
    seen = []
    model.ec.register_forward_hook(lambda module, given, output: {**output, "liked": output["history"], "seen": seen.append(1)})
    program = towerize(model, Topology(2, 2), example_inputs=(_batch(6),))
    assert seen
    certificate = program.verify(_batch(9, seed=1), steps=0)
    assert certificate.passed, str(certificate)


def train_on_ranks(sizes: list[int]) -> tuple[Any, Any]:
    """Runs on a rank: the output of one step and the gradients of what this rank holds."""
    module = towerize(_model(), Topology(2, 2), example_inputs=(_batch(6),)).distribute()
    rank = dist.get_rank()
    output = module(_batch(sizes[rank], seed=rank))
    objective(output).backward()
    result = copied(output), gradients_of(module)
    module.close()
    return result


@pytest.mark.multi_rank
def test_on_ranks(ranks: Ranks) -> None:
    sizes = [3, 1, 2, 4]
    found = ranks(4, train_on_ranks, sizes)
    model = _model()
    terms = []
    for rank, size in enumerate(sizes):
        output = model(_batch(size, seed=rank))
        assert bits_differ(found[rank][0], copied(output)) is None
        terms.append(objective(output))
    (torch.stack(terms).sum() / len(sizes)).backward()
    seen = set()
    for _, gradients in found:
        for name, gradient in gradients.items():
            seen.add(name)
            torch.testing.assert_close(gradient, model.get_parameter(name).grad)
    assert seen == {name for name, _ in model.named_parameters()}
