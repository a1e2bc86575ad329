"""Rounds that several lookups share, each with a number of ids or bags of its own."""

from __future__ import annotations

import random
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from distributed_cases import copied, gradients_of, objective
from mutants import Mutant, remade
from ranks import Ranks
from torch import nn
from torchrec import EmbeddingCollection, KeyedJaggedTensor
from torchrec.modules.embedding_configs import EmbeddingConfig

from dmt_compile import InputError, Topology, TowerProgram, VerificationError, towerize
from dmt_compile.exchange import Exchange
from dmt_compile.runtime.pooled import ExchangeRows
from dmt_compile.verify.compare import bits_differ
from dmt_compile.verify.layout import check_layout

ROWS = 13
FOUR = Topology(2, 2)

Lengths = tuple[int, int, int]


class Uneven(nn.Module):
    """Three padded histories that are looked at row by row, one table twice; pairs of ids as bags, weighted or not; an item."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.item, self.other = nn.Embedding(ROWS, 3, padding_idx=0), nn.Embedding(ROWS, 2, sparse=True)
        self.pairs, self.weighed = nn.EmbeddingBag(ROWS, 3, mode="max"), nn.EmbeddingBag(ROWS, 2, mode="sum")
        self.top = nn.Linear(3 + 3 + 2 + 3 + 2, 1)

    def forward(self, seen: torch.Tensor, liked: torch.Tensor, pairs: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        gate = self.item(item)
        read = [self.item(seen).tanh().sum(1), self.other(liked).tanh().sum(1)]
        two, batch = pairs.reshape(-1, 2), item.shape[0]
        weights = torch.softmax(two.float() + self.top.weight[0, 0], 1)
        read += [self.pairs(two).view(batch, pairs.shape[1] // 2, 3).sum(1)]
        read += [self.weighed(two, per_sample_weights=weights).view(batch, pairs.shape[1] // 2, 2).sum(1)]
        return self.top(torch.cat([gate, *read], dim=1))


def uneven(batch: int, lengths: Lengths, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    seen, liked, pairs = lengths
    shapes = ((batch, seen), (batch, liked), (batch, 2 * pairs), (batch,))
    return tuple(torch.randint(0, ROWS, shape, generator=generator) for shape in shapes)


def program(lengths: Lengths = (6, 4, 3), topology: Topology = FOUR) -> TowerProgram:
    return towerize(Uneven(), topology, example_inputs=uneven(6, lengths), dynamic_ids=True)


def rounds_of(program: TowerProgram) -> list[set[str]]:
    return [{x.table.rpartition(".")[2] for x in one.lookups} for one in program.lookups.rounds]


def test_lookups_with_about_as_many_rows_share_a_round() -> None:
    """Those that have at least half as many ids, or bags, as the longest."""
    assert rounds_of(program((6, 4, 3))) == [{"item"}, {"item", "other", "pairs", "weighed"}]
    assert rounds_of(program((7, 4, 3))) == [{"item"}, {"item", "other"}, {"pairs", "weighed"}]
    assert rounds_of(program((2, 9, 2))) == [{"item"}, {"item", "pairs", "weighed"}, {"other"}]
    assert [one.unit for one in program((7, 4, 3)).lookups.rounds] == ["sample", "id", "bag"]
    assert [one.unit for one in program((6, 4, 3)).lookups.rounds] == ["sample", "bag"]


@pytest.mark.parametrize("seed", range(6))
def test_any_numbers_of_rows(seed: int) -> None:
    """Also other numbers than the example's, none of one kind, and fewer samples than ranks."""
    draw = random.Random(seed)
    compiled = program(topology=draw.choice([Topology(2, 2), Topology(1, 3), Topology(3, 2)]))
    for step in range(3):
        lengths = (draw.randint(0, 9), draw.randint(0, 9), draw.randint(0, 9) * (step != 1))
        certificate = compiled.verify(*uneven(draw.randint(1, 9), lengths, seed), steps=int(step == 0))
        assert certificate.passed, f"{lengths}\n{certificate}"


@pytest.mark.parametrize("given", ["output_1", None])
@pytest.mark.parametrize("stage", ["sptt", "lowered"])
def test_rows_that_are_cut_by_another_lookup_are_refuted(stage: str, given: str | None) -> None:
    compiled = program()
    nodes = {node.name: node for node in compiled.stages[stage].graph.nodes}

    def spoil(m: Mutant) -> None:
        m.set_args("round_1_output_0", _2=m.nodes[given].args[2] if given else None)

    if given:
        given = f"round_1_{given}"
        assert nodes[given].args[2] is not nodes["round_1_output_0"].args[2]
    check_layout(compiled.stages[stage])
    with pytest.raises(VerificationError, match=r"does not keep as many rows as '\w+' has (id|bag)s of its own"):
        check_layout(remade(compiled.stages[stage], spoil))


def test_a_bad_id_is_named_by_its_own_place() -> None:
    seen, liked, pairs, item = uneven(4, (6, 1, 2))
    liked[3] = ROWS
    with pytest.raises(InputError, match=rf"feature 'liked' has id {ROWS}, outside .*table 'other', id 1 of the batch"):
        program(topology=Topology(2, 1)).verify(seen, liked, pairs, item)


def draw_steps(seed: int, world: int) -> list[list[tuple[int, Lengths]]]:
    """By step, every rank's number of samples and lengths: some ranks have no samples, or none of some ids."""
    draw = random.Random(seed)

    def one() -> tuple[int, Lengths]:
        return draw.choice([0, 1, 3, 5]), (draw.choice([0, 1, 8]), draw.choice([0, 2, 9]), draw.choice([0, 1, 6]))

    special = [(2, (9, 0, 0)), (2, (0, 0, 9)), (0, (5, 5, 5)), (3, (0, 9, 0))]
    return [special[:world], [one() for _ in range(world)], [one() for _ in range(world)]]


def steps_on_ranks(seed: int) -> list[tuple[Any, dict[str, torch.Tensor], bool]]:
    """Runs on a rank: of every step the output, the gradients, and whether the bytes counted are those of the records."""
    module = program().distribute()
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for step, sizes in enumerate(draw_steps(seed, world)):
        module.zero_grad()
        before = module.traffic.inside_host + module.traffic.across_hosts
        with torch.no_grad():
            module(*uneven(*sizes[rank], seed=step * world + rank))
        after = module.traffic.inside_host + module.traffic.across_hosts
        output = module(*uneven(*sizes[rank], seed=step * world + rank))
        objective(output).backward()
        found.append((copied(output), gradients_of(module), after - before >= rows_sent(rank, sizes)))
    module.close()
    return found


def rows_sent(rank: int, sizes: list[tuple[int, Lengths]]) -> int:
    """The bytes of rows that a rank sends forward: those of the lookup with the most ids or bags, for all of its round."""
    compiled = program()
    batches = ([batch for batch, _ in sizes], [batch * max(lengths) for batch, lengths in sizes])
    stage = compiled.stages["sptt"]
    modules = [stage.module(node) for node in stage.graph.nodes if node.op == "call_module"]
    exchanges: list[Exchange] = [module.exchange for module in modules if isinstance(module, ExchangeRows)]
    assert len(exchanges) == 4
    return sum(sum(one.traffic(rank, compiled.topology, batches[one.round])) for one in exchanges)


@pytest.mark.multi_rank
@pytest.mark.parametrize("seed", [0, 1])
def test_on_ranks_of_other_numbers(ranks: Ranks, seed: int) -> None:
    found = ranks(4, steps_on_ranks, seed)
    for step, sizes in enumerate(draw_steps(seed, 4)):
        model, terms = Uneven(), []
        for rank, (batch, lengths) in enumerate(sizes):
            output = model(*uneven(batch, lengths, seed=step * 4 + rank))
            assert bits_differ(found[rank][step][0], copied(output)) is None, (sizes, rank)
            terms.append(objective(output))
        (torch.stack(terms).sum() / 4).backward()
        for rank in range(4):
            assert found[rank][step][2]
            for name, gradient in found[rank][step][1].items():
                expected = model.get_parameter(name).grad
                assert expected is not None
                expected = expected.to_dense() if expected.is_sparse else expected
                torch.testing.assert_close(gradient.to_dense() if gradient.is_sparse else gradient, expected)


class Collection(nn.Module):
    """Rows of three features of one TorchRec collection, and of a feature of another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        one = EmbeddingConfig(name="t_one", embedding_dim=4, num_embeddings=models.ROWS, feature_names=["a", "b"])
        two = EmbeddingConfig(name="t_two", embedding_dim=4, num_embeddings=models.ROWS, feature_names=["c"])
        more = EmbeddingConfig(name="t_more", embedding_dim=4, num_embeddings=models.ROWS, feature_names=["a"])
        self.first, self.second = EmbeddingCollection(tables=[one, two]), EmbeddingCollection(tables=[more])

    def forward(self, x: KeyedJaggedTensor, y: KeyedJaggedTensor) -> tuple[Any, Any]:
        return self.first(x), self.second(y)


def jagged(keys: list[str], lengths: list[list[int]]) -> KeyedJaggedTensor:
    values = torch.randint(0, models.ROWS, (sum(map(sum, lengths)),), generator=torch.Generator().manual_seed(0))
    return KeyedJaggedTensor(keys=keys, values=values, lengths=torch.tensor(lengths).flatten())


def test_the_features_of_a_jagged_input_share_a_round() -> None:
    """Whatever their numbers are in the example: other ranks' examples have other numbers, and must lead to the same rounds."""
    for lengths in ([[1, 1], [9, 8], [0, 0]], [[1, 1], [1, 1], [1, 1]], [[0, 5], [1, 0], [7, 9]]):
        inputs = (jagged(["a", "b", "c"], lengths), jagged(["a"], [[2, 1]]))
        compiled = towerize(Collection(), Topology(2, 1), example_inputs=inputs)
        assert rounds_of(compiled) == [{"t_one", "t_two"}, {"t_more"}], lengths
        certificate = compiled.verify(*inputs, steps=1)
        assert certificate.passed, str(certificate)
    for lengths in ([[0, 0, 0], [4, 0, 0], [0, 9, 1]], [[3, 3, 0], [0, 0, 0], [0, 0, 0]]):
        certificate = compiled.verify(jagged(["a", "b", "c"], lengths), jagged(["a"], [[0, 0, 1]]), steps=0)
        assert certificate.passed, str(certificate)
