"""Frozen and missing parts, evaluation, accumulation, random layers, meta-device models, tied tables, traffic, groups."""

from __future__ import annotations

import gc
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from distributed_cases import Tensors, build, copied, flat_step, gradients_of, inputs_of, merged, objective, tables_of
from ranks import Ranks
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.modules.embedding_configs import EmbeddingBagConfig

import dmt_compile
from dmt_compile import Topology
from dmt_compile.graphs import clone_with_parameters
from dmt_compile.runtime.ids import MakeRequest
from dmt_compile.runtime.pooled import Splits
from dmt_compile.verify.compare import bits_differ, furthest

pytestmark = pytest.mark.multi_rank

NAME = "two collections"
SIZES = [1, 3, 2, 4]
GRID = Topology(2, 2)


def _variant(kind: str) -> nn.Module:
    torch.manual_seed(4)
    if kind == "no dense":
        return models.PooledOnly(*(models.table(f"t{i}", [f"x{i}"], 4) for i in range(3)))
    if kind == "tied":
        spec = models.ModelSpec(
            ((models.TableSpec((0,), 4, False), models.TableSpec((1,), 4, False)), (models.TableSpec((2,), 4, False),)),
            (False, False),
            ((0, 0), (1, 0), (1, 0)),
            tied=True,
            alias=True,
        )
        return models.SpecModel(spec)
    model = build("learnt weights" if kind == "tables frozen, weights learnt" else NAME)
    for name, parameter in model.named_parameters():
        table = "embedding_bags" in name
        if kind.startswith("tables frozen") and table:
            parameter.requires_grad_(False)
        if kind == "dense frozen" and not table:
            parameter.requires_grad_(False)
        if kind == "one table frozen" and "c0t1" in name:
            parameter.requires_grad_(False)
    return model


def _inputs(kind: str, sizes: list[int] = SIZES) -> list[tuple[Any, ...]]:
    if kind == "no dense":
        return [(models.jagged(("x0", "x1", "x2"), size, seed=r),) for r, size in enumerate(sizes)]
    if kind == "tied":
        return [(models.jagged(("x0", "x1", "x2"), size, seed=r),) for r, size in enumerate(sizes)]
    return inputs_of("learnt weights" if "learnt" in kind else NAME, sizes)


def variant_on_ranks(kind: str) -> tuple[list[Tensors], Tensors, Tensors, list[str]]:
    module = dmt_compile.towerize(_variant(kind), GRID).distribute()
    given = _inputs(kind)[dist.get_rank()]
    outputs = []
    for _ in range(2):
        module.zero_grad()
        output = module(*given)
        objective(output).backward()
        outputs.append(copied(output))
    result = outputs, gradients_of(module), module.full_state_dict(), [n for n, _ in module.named_parameters()]
    module.close()
    return result


KINDS = [
    "tables frozen",
    "tables frozen, weights learnt",
    "dense frozen",
    "one table frozen",
    "no dense",
    "tied",
]


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_missing_and_tied_parts(ranks: Ranks, kind: str) -> None:
    found = ranks(4, variant_on_ranks, kind)
    model = _variant(kind)
    flat = flat_step(model, _inputs(kind), SIZES)
    for step in range(2):
        assert bits_differ([outputs[step] for outputs, *_ in found], flat.outputs) is None
    gradients = merged([part for _, part, *_ in found], tables_of(model))
    assert gradients.keys() == flat.gradients.keys()
    worst, name = furthest(gradients, flat.gradients)
    assert worst <= 1, (name, worst)
    expected = model.state_dict()
    for _, _, full, _ in found:
        assert list(full) == list(expected)
        assert all(torch.equal(full[key], expected[key]) for key in expected)
    if kind == "no dense":
        assert [] in [names for *_, names in found], "one of four ranks has no parameter at all"


# Evaluation, accumulation, several forwards


def backward_twice() -> list[str]:
    module = dmt_compile.towerize(build(NAME), GRID).distribute()
    given, found = inputs_of(NAME, SIZES)[dist.get_rank()], []
    for again in ("two forwards", "one forward"):
        losses = [objective(module(*given)) for _ in range(2 if again == "two forwards" else 1)]
        losses[0].backward(retain_graph=True)
        with pytest.raises(dmt_compile.DistributedError) as caught:
            losses[-1].backward()
        found.append(str(caught.value))
        module.zero_grad()
        # The next step is as good as ever.
        objective(module(*given)).backward()
    module.close()
    return found


def test_a_second_backward_is_refused(ranks: Ranks) -> None:
    """DistributedDataParallel would leave dense gradients that differ between ranks."""
    for messages in ranks(4, backward_twice):
        assert all("a second backward since the last forward" in message for message in messages)


def modes_on_ranks() -> dict[str, Tensors]:
    module = dmt_compile.towerize(build(NAME), GRID).distribute()
    rank, found = dist.get_rank(), {}
    first, second = (inputs_of(NAME, SIZES, seed=seed)[rank] for seed in (1, 2))

    def take(name: str) -> None:
        found[name] = gradients_of(module)
        module.zero_grad()

    objective(module(*first)).backward()
    take("plain")
    with module.no_sync():
        objective(module(*first)).backward()
    objective(module(*second)).backward()
    take("accumulated")
    outputs = module(*first), module(*second)
    (objective(outputs[0]) + objective(outputs[1])).backward()
    take("two forwards")
    module.eval()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            output = module(*first)
            assert bits_differ(output, outputs[0]) is None
            assert not output["scores"].requires_grad
    assert not any(child.training for child in module.modules())
    module.train()
    assert all(child.training for child in module.modules())
    objective(module(*first)).backward()
    take("after evaluation")
    module.close()
    return found


def test_evaluation_and_accumulation(ranks: Ranks) -> None:
    found = ranks(4, modes_on_ranks)
    model = build(NAME)
    first, second = (flat_step(model, inputs_of(NAME, SIZES, seed=seed), SIZES).gradients for seed in (1, 2))
    both = {name: first[name] + second[name] for name in first}
    for name, expected in (("plain", first), ("accumulated", both), ("two forwards", both), ("after evaluation", first)):
        gradients = merged([part[name] for part in found], tables_of(model))
        worst, parameter = furthest(gradients, expected)
        assert worst <= 2, (name, parameter, worst)


class RandomLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.ebc = models.plain_collection()
        self.dense = nn.Sequential(nn.Linear(models.DENSE, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.top = nn.Sequential(nn.BatchNorm1d(48), nn.Dropout(0.5), nn.Linear(48, 1))

    def forward(self, dense: torch.Tensor, sparse: Any) -> torch.Tensor:
        return self.top(torch.cat([self.dense(dense), self.ebc(sparse).values()], dim=1))


def random_layers(distributed: bool, rank: int) -> tuple[list[torch.Tensor], Tensors]:
    """Outputs of two training steps and an evaluation, and the buffers, of a rank or of the flat model in its place."""
    model = clone_with_parameters(RandomLayers())
    module = dmt_compile.towerize(model, GRID).distribute() if distributed else model
    torch.manual_seed(rank)
    outputs = []
    for step in range(3):
        module.train(step < 2)
        outputs.append(module(*models.torchrec_inputs(3 + rank, seed=rank + step)))
    return [output.detach() for output in outputs], dict(module.named_buffers())


def random_layers_on_ranks() -> tuple[list[torch.Tensor], Tensors]:
    return random_layers(True, dist.get_rank())


def test_batch_norm_and_dropout(ranks: Ranks) -> None:
    for rank, (outputs, buffers) in enumerate(ranks(4, random_layers_on_ranks)):
        expected, statistics = random_layers(False, rank)
        assert bits_differ(outputs, expected) is None
        assert buffers.keys() == statistics.keys()
        assert bits_differ(buffers, statistics) is None


# Models on the meta device


def _fill(number: float) -> Any:
    return lambda weight: nn.init.constant_(weight, number)


class Meta(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=f"t{i}", embedding_dim=4, num_embeddings=10 + i, feature_names=[f"f{i}"], init_fn=_fill(i + 1.0)
            )
            for i in range(5)
        ]
        self.ebc = EmbeddingBagCollection(tables=configs, device=torch.device(device))
        self.norm = nn.BatchNorm1d(20, device=device)
        self.top = nn.Linear(20, 1, device=device)
        self.frozen = nn.Linear(1, 1, device=device).requires_grad_(False)

    def forward(self, sparse: Any) -> torch.Tensor:
        return self.frozen(self.top(self.norm(self.ebc(sparse).values())))


def _tables_in_memory() -> list[nn.Parameter]:
    return [t for t in gc.get_objects() if isinstance(t, nn.Parameter) and not t.is_meta and t.shape[-1:] == (4,)]


def meta_on_ranks() -> tuple[Tensors, Tensors]:
    # What earlier tests have left on this rank; held, so that nothing else gets their ids.
    before = _tables_in_memory()
    known = {id(t) for t in before}
    model = Meta("meta")
    module = dmt_compile.towerize(model, Topology(2, 2)).distribute(device="cpu")
    torch.stack([module(models.jagged(models.FIVE, 3, seed=dist.get_rank(), rows=10)).sum()]).sum().backward()
    assert all(tensor.is_meta for tensor in model.state_dict().values()), "the user's model was touched"
    made = [t for t in _tables_in_memory() if id(t) not in known]
    assert {id(t) for t in made} == {id(t) for t in module.table_parameters()}
    result = {name: p.detach().clone() for name, p in module.named_parameters()}, module.full_state_dict()
    module.close()
    return result


def test_a_meta_model_is_materialised_where_it_is_owned(ranks: Ranks) -> None:
    found = ranks(4, meta_on_ranks)
    tables = [name for own, _ in found for name in own if "embedding_bags" in name]
    assert sorted(tables) == sorted(tables_of(Meta("cpu")))
    for _, full in found:
        assert list(full) == list(Meta("cpu").state_dict())
        for i in range(5):
            assert torch.equal(full[f"ebc.embedding_bags.t{i}.weight"], torch.full((10 + i, 4), i + 1.0))
        # Each rank drew numbers of its own; all start with rank 0's.
        for name in ("top.weight", "frozen.weight"):
            assert torch.equal(full[name], found[0][1][name])


def loose_meta_tensor() -> None:
    model = Meta("meta")
    model.norm.extra = torch.zeros(2, device="meta")
    dmt_compile.towerize(model, Topology(2, 1)).distribute(device="cpu")


def test_a_meta_tensor_that_nothing_fills_is_named(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(2, loose_meta_tensor):
        assert outcome.error == "DistributedError", outcome.trace
        assert "norm.extra" in outcome.message


# Traffic


def traffic_on_ranks(name: str, grid: tuple[int, int, int], sizes: list[int]) -> list[tuple[int, int]]:
    """Bytes inside and across hosts: found with gradients, expected; found without, expected."""
    hosts, local, towers = grid
    topology, rank = Topology(hosts, local), dist.get_rank()
    module = dmt_compile.towerize(build(name), topology, towers=towers).distribute()
    given = inputs_of(name, sizes)[rank]
    requests: list[Any] = []
    request = next(m for m in module.graph_module.modules() if isinstance(m, MakeRequest))
    request.register_forward_hook(lambda _, __, result: requests.append(result))
    found = []
    for train in (True, False):
        module.traffic.reset()
        with torch.set_grad_enabled(train):
            output = module(*given)
        if train:
            objective(output).backward()
        found.append((module.traffic.inside_host, module.traffic.across_hosts))
        found.append(_expected_traffic(module, topology, rank, sizes, requests[-1], train))
    module.close()
    return found


def _expected_traffic(module: Any, topology: Topology, rank: int, sizes: list[int], request: Any, train: bool) -> tuple[int, int]:
    world = topology.world_size
    sent = torch.zeros(world, world, dtype=torch.long)
    exchanges = {m.exchange.axis: m.exchange for m in module.graph_module.modules() if isinstance(m, Splits)}
    assert exchanges.keys() == {"tower", "peer"}
    for exchange in exchanges.values():
        for source in range(world):
            for member, block in zip(exchange.members(source), exchange.sent(source), strict=True):
                count = sum(sizes[row] for row in block.rows) * sum(exchange.widths[owner] for owner in block.owners) * 4
                sent[source, member] += count
                if train:
                    sent[member, source] += count
    ids = module._run[1].get_submodule("dmt.counts").exchange
    weights = torch.zeros(world, world, dtype=torch.long)
    for member in range(world):
        start, end = ids.starts[member], ids.starts[member + 1]
        sent[rank, member] += 24 + (end - start) * sizes[rank] * 4 + int(request.lengths[start:end].sum()) * 4
        places = [start + place for place in ids.weighted_per_rank[member]]
        weights[rank, member] = int(request.lengths[places].sum()) * 4
    dist.all_reduce(weights)
    sent += weights
    if train and request.weights is not None and request.weights.requires_grad:
        sent += weights.t()
    others = [r for r in range(world) if r != rank]
    inside = sum(int(sent[rank, r]) for r in others if topology.host_of(r) == topology.host_of(rank))
    return inside, sum(int(sent[rank, r]) for r in others) - inside


@pytest.mark.parametrize("name", [NAME, "learnt weights"])
@pytest.mark.parametrize("grid", [(2, 4, 2), (4, 2, 2), (2, 2, 4)], ids=lambda grid: "x".join(map(str, grid)))
def test_traffic_is_what_the_records_say(ranks: Ranks, name: str, grid: tuple[int, int, int]) -> None:
    world = grid[0] * grid[1]
    sizes = [1 + (3 * rank) % 4 for rank in range(world)]
    for trained, expected, evaluated, expected_evaluated in ranks(world, traffic_on_ranks, name, grid, sizes):
        assert trained == expected
        assert evaluated == expected_evaluated
        assert sum(evaluated) < sum(trained)
