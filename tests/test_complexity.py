"""``program.complexity()``: the paper's reported numbers of FLOPs, the models' own, and the bytes that ranks really send."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interaction_models import ZOO
from models import (
    FIVE,
    TORCHREC_MODELS,
    dense,
    jagged,
    plain_collection,
    torchrec_batch,
    torchrec_inputs,
    torchrec_model,
    training_model,
)
from plain_models import CASES
from ranks import Ranks
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchrec import EmbeddingBagCollection
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dmt_compile import CaptureError, Topology, TowerProgram, towerize
from dmt_compile.towers.modules import CrossTower, DLRMTower, PassThrough
from dmt_compile.verify.compare import tensors_in

# The models of the paper's tables of complexity: 26 tables of width 128, 13 dense features, bottom MLP 512-256-128.
TABLES, WIDTH, DENSE_FEATURES = 26, 128, 13
BOTTOM = [512, 256, WIDTH]
SHORT, LONG = [1024, 512, 256, 1], [1024, 1024, 512, 256, 1]


def wide_tables() -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=WIDTH, num_embeddings=1000, feature_names=[f"f{i}"]) for i in range(TABLES)
    ]
    return EmbeddingBagCollection(tables=configs, device=torch.device("meta"))


def dlrm(over: list[int]) -> nn.Module:
    return DLRM(wide_tables(), DENSE_FEATURES, BOTTOM, over, dense_device=torch.device("meta"))


def dcn(over: list[int]) -> nn.Module:
    with torch.device("meta"):
        return DLRM_DCN(wide_tables(), DENSE_FEATURES, BOTTOM, over, dcn_num_layers=3, dcn_low_rank_dim=512)


def megaflops(program: TowerProgram) -> tuple[float, float]:
    found = program.complexity()
    return found.flat.training_flops / 1e6, found.towers.training_flops / 1e6


def in_towers(model: nn.Module, towers: int, module: Any) -> TowerProgram:
    program = towerize(model, Topology(towers, 1), tower_module=module, partition="strided")
    assert {len(tower.features) for tower in program.plan.towers} == {TABLES // towers, -(-TABLES // towers)}
    return program


class TestReported:
    """MFlops of one training sample, as reported; within 0.1 of it."""

    @pytest.mark.parametrize(("make", "reported"), [(dlrm, 14.74), (dcn, 96.22)], ids=["DLRM", "DCN"])
    def test_flat(self, make: Callable[[list[int]], nn.Module], reported: float) -> None:
        flat, towers = megaflops(towerize(make(LONG), Topology(2, 1)))
        assert flat == pytest.approx(reported, abs=0.1)
        assert towers == flat

    # By how many towers the features are divided makes no difference to a layer for each of them.
    @pytest.mark.parametrize(
        ("towers", "dim", "reported"), [(2, 64, 8.95), (8, 64, 8.95), (4, 32, 7.93), (8, 16, 7.41), (26, 8, 7.16)]
    )
    def test_dlrm_with_a_vector_of_each_feature(self, towers: int, dim: int, reported: float) -> None:
        program = in_towers(dlrm(SHORT), towers, DLRMTower(c=1, p=0, dim=dim))
        assert megaflops(program)[1] == pytest.approx(reported, abs=0.1)

    def test_dlrm_with_a_vector_of_each_tower(self) -> None:
        program = in_towers(dlrm(SHORT), 16, DLRMTower(c=0, p=1, dim=128))
        assert sum(len(tower.features) == 1 for tower in program.plan.towers) == 6
        assert megaflops(program)[1] == pytest.approx(8.75, abs=0.1)

    @pytest.mark.parametrize(("towers", "reported"), [(2, 43.71), (4, 50.01), (8, 62.60), (16, 87.19)])
    def test_dcn_with_a_cross_network_in_each_tower(self, towers: int, reported: float) -> None:
        program = in_towers(dcn(LONG), towers, CrossTower(dim=128, layers=1, rank=512))
        assert megaflops(program)[1] == pytest.approx(reported, abs=0.1)

    def test_dcn_with_a_tower_for_every_feature(self) -> None:
        program = towerize(dcn(LONG), Topology(26, 1), partition="strided")
        assert megaflops(program)[1] == pytest.approx(96.22, abs=0.1)


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Fused kernels for attention and recurrent layers are no operators that torch's counter knows."""
    with ExitStack() as stack:
        # Torch warns of a switch for other hardware.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        yield


def own_flops(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], samples: int) -> tuple[float, float]:
    """What torch counts while the model itself runs, forward and with backward, per sample."""
    counter = FlopCounterMode(display=False)
    with plain_kernels(), counter:
        made = [tensor for _, tensor in tensors_in(model(*args, **kwargs)) if tensor.requires_grad]
        forward = counter.get_total_flops()
        torch.autograd.backward(made, [torch.ones_like(tensor) for tensor in made])
    return forward / samples, counter.get_total_flops() / samples


def assert_own(program: TowerProgram, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    found = program.complexity()
    expected = own_flops(model, args, kwargs, 3)
    assert (found.flat.forward_flops, found.flat.training_flops) == pytest.approx(expected)
    assert found.towers.training_flops == found.flat.training_flops


class TestTheModelsOwn:
    """What torch counts while the unmodified model runs on three samples, its lookups with it."""

    @pytest.mark.parametrize("name", list(ZOO)[::6])
    def test_interactions(self, name: str) -> None:
        entry = ZOO[name]
        model = entry.build()
        program = towerize(model, Topology(2, 1), example_inputs=entry.inputs())
        assert_own(program, model, entry.inputs(3), {})

    @pytest.mark.parametrize("name", list(CASES)[::6])
    def test_plain_lookups(self, name: str) -> None:
        case = CASES[name]
        model = case.build()
        program = towerize(model, Topology(2, 1), example_inputs=case.example(3))
        assert_own(program, model, *case.batch(3, seed=99))

    @pytest.mark.parametrize("name", TORCHREC_MODELS)
    def test_torchrec(self, name: str) -> None:
        model = torchrec_model(name)
        assert_own(towerize(model, Topology(2, 1)), model, torchrec_inputs(3), {})
        losing = training_model(name)
        program = towerize(losing, Topology(2, 1), example_inputs=(torchrec_batch(3),))
        assert_own(program, losing, (torchrec_batch(3),), {})

    def test_frozen_layers(self) -> None:
        model = torchrec_model("DLRM")
        model.dense_arch.requires_grad_(False)
        program = towerize(model, Topology(2, 1))
        assert_own(program, model, torchrec_inputs(3), {})
        assert (
            program.complexity().flat.training_flops
            < towerize(torchrec_model("DLRM"), Topology(2, 1)).complexity().flat.training_flops
        )

    def test_sizes_that_the_data_decides(self) -> None:
        model = Picked()
        given = (torch.tensor([[0, 1], [2, 3], [4, 0]]), torch.tensor([[1.0, 0.0], [0.5, 2.0], [0.0, 0.0]]))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        program = towerize(model, Topology(2, 1), example_inputs=given)
        found = program.complexity()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert (found.flat.forward_flops, found.flat.training_flops) == pytest.approx(own_flops(model, given, {}, 3))


class Picked(nn.Module):
    """The samples' values that are not zero go through a layer, however many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(5, 2), nn.Embedding(5, 2, max_norm=0.1)
        self.kept = nn.Embedding(2, 2, max_norm=0.1)
        self.layer, self.top = nn.Linear(1, 3), nn.Linear(6, 1)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        picked = self.layer(x.flatten()[x.flatten().nonzero().squeeze(1)].unsqueeze(1)).sum()
        kept = self.kept(torch.arange(1)).expand(len(ids), 2)
        return self.top(torch.cat([self.a(ids[:, 0]), self.b(ids[:, 1]), kept], dim=1)) + picked


class TestWithoutValues:
    def test_everything_on_the_meta_device(self) -> None:
        with torch.device("meta"):
            model = DLRM(plain_collection(), 4, [8, 8], [8, 1])
        expected = own_flops(torchrec_model("DLRM"), torchrec_inputs(3), {}, 3)
        found = towerize(model, Topology(2, 1)).complexity().flat
        assert (found.forward_flops, found.training_flops) == pytest.approx(expected)

    def test_nothing_is_written(self) -> None:
        model = torchrec_model("DLRM_DCN")
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        program = towerize(model, Topology(2, 1), tower_module=CrossTower(dim=8, rank=4))
        state = torch.random.get_rng_state()
        assert program.complexity() == program.complexity()
        assert torch.equal(state, torch.random.get_rng_state())
        assert all(parameter.grad is None and not parameter.is_meta for parameter in program.parameters())
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())

    def test_inputs_that_nothing_tells(self) -> None:
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.ebc = plain_collection()
                self.top = nn.Linear(42, 1)

            def forward(self, dense: torch.Tensor, sparse: Any) -> torch.Tensor:
                extra = dense.view(dense.shape[0], 2).flip(1)
                return self.top(torch.cat([self.ebc(sparse).values(), extra], dim=1))

        with pytest.raises(CaptureError, match="example_inputs"):
            towerize(Odd(), Topology(2, 1)).complexity()
        given = (dense(3, 2), jagged(FIVE, 3))
        assert towerize(Odd(), Topology(2, 1), example_inputs=given).complexity().flat.forward_flops == 2 * 42


class TestParameters:
    def test_apart(self) -> None:
        model = torchrec_model("DLRM")
        program = towerize(model, Topology(2, 1), tower_module=DLRMTower(c=1, p=0, dim=4))
        found = program.complexity()
        tables = 5 * 12 * 8
        assert found.flat.parameters.tables == found.towers.parameters.tables == tables
        assert found.flat.parameters.dense == sum(p.numel() for p in model.parameters()) - tables
        assert found.flat.parameters.tower_modules == 0
        assert found.towers.parameters.tower_modules == 2 * (8 * 4 + 4)
        assert found.towers.parameters.total == sum(p.numel() for p in program.parameters())

    def test_tables_that_stay_replicated_are_dense(self) -> None:
        model = Picked()
        given = (torch.tensor([[0, 1], [2, 3], [4, 0]]), torch.ones(3, 2))
        found = towerize(model, Topology(2, 1), example_inputs=given).complexity().flat.parameters
        assert (found.tables, found.dense) == (20, 4 + 6 + 7)


class TestBytes:
    def test_without_modules(self) -> None:
        # Each of four ranks owns one table of 8 columns; the fifth table is rank 0's.
        program = towerize(torchrec_model("DLRM"), Topology(2, 2), partition="strided")
        found = program.complexity()
        # A column goes to every other rank: one inside the owner's host, two across; forward, and its gradient back.
        assert found.flat.rows.inside_host == 2 * 40 * 4 / 4
        assert found.flat.rows.across_hosts == 2 * 2 * 40 * 4 / 4
        # As many columns cross hosts; inside, each goes for the samples of two ranks.
        assert found.towers.rows.across_hosts == found.flat.rows.across_hosts
        assert found.towers.rows.inside_host == 2 * found.flat.rows.inside_host
        assert found.towers.ids == found.flat.ids

    def test_towers_with_modules(self) -> None:
        bare = towerize(torchrec_model("DLRM"), Topology(2, 2)).complexity()
        program = towerize(torchrec_model("DLRM"), Topology(2, 2), tower_module=[DLRMTower(0, 3, 4), DLRMTower(0, 1, 4)])
        found = program.complexity()
        # Tower 0 makes 12 columns, tower 1 makes 4; every rank sends its tower's to one other host.
        assert found.towers.rows.across_hosts == 2 * (12 + 12 + 4 + 4) * 4 / 4
        assert found.towers.rows.inside_host == bare.towers.rows.inside_host
        assert found.flat == bare.flat
        passed = towerize(torchrec_model("DLRM"), Topology(2, 2), tower_module=PassThrough()).complexity()
        assert passed.towers.rows == bare.towers.rows

    def test_ids(self) -> None:
        lengths = torch.tensor([2, 2, 0, 0, 1, 3, 1, 1, 1, 1])
        ids = torch.zeros(int(lengths.sum()), dtype=torch.long)
        batch = jagged(FIVE, 2)
        batch = type(batch)(keys=list(FIVE), values=ids, lengths=lengths.int(), stride=2)
        program = towerize(torchrec_model("DLRM"), Topology(2, 1), towers=[list(FIVE[:2]), list(FIVE[2:])])
        assumed = program.complexity()
        assert not assumed.ids_seen
        # A length and an id, 4 bytes each, for the features of the other rank's tables.
        assert assumed.towers.ids.across_hosts == (2 * 8 + 3 * 8) / 2
        assert assumed.towers.ids.inside_host == 0
        given = (dense(2), batch)
        program = towerize(torchrec_model("DLRM"), Topology(2, 1), towers=[list(FIVE[:2]), list(FIVE[2:])], example_inputs=given)
        seen = program.complexity()
        assert seen.ids_seen
        assert seen.towers.ids.across_hosts == ((2 * 4 + 2 * 4) + (3 * 4 + 4 * 4)) / 2


BATCH = 3


def sent_on_ranks(name: str, grid: tuple[int, int, int]) -> tuple[int, int]:
    """The bytes that this rank sends in one step."""
    program, given = compiled(name, grid)
    module = program.distribute()
    made = [tensor for _, tensor in tensors_in(module(*given[0], **given[1])) if tensor.requires_grad]
    torch.autograd.backward(made, [torch.ones_like(tensor) for tensor in made])
    found = (module.traffic.inside_host, module.traffic.across_hosts)
    module.close()
    dist.barrier()
    return found


def compiled(name: str, grid: tuple[int, int, int]) -> tuple[TowerProgram, Any]:
    hosts, local, towers = grid
    topology = Topology(hosts, local)
    if name == "DLRM":
        given = torchrec_inputs(BATCH)
        return towerize(torchrec_model(name), topology, towers=towers, example_inputs=given), (given, {})
    case = CASES[name]
    return towerize(case.build(), topology, towers=towers, example_inputs=case.example(BATCH)), case.batch(BATCH, seed=99)


@pytest.mark.multi_rank
@pytest.mark.parametrize(("name", "grid"), [("DLRM", (2, 3, 2)), ("offsets", (3, 2, 6)), ("ragged", (3, 2, 6))])
def test_bytes_that_ranks_send(ranks: Ranks, name: str, grid: tuple[int, int, int]) -> None:
    program, _ = compiled(name, grid)
    found = program.complexity()
    assert found.ids_seen
    hosts, local, _ = grid
    world = hosts * local
    sent = ranks(world, sent_on_ranks, name, grid)
    # Each step of each round also announces three numbers of 8 bytes to every rank.
    announced = 24 * len(program.lookups.rounds)
    inside = sum(one[0] for one in sent) / world - announced * (local - 1)
    across = sum(one[1] for one in sent) / world - announced * (world - local)
    cost = found.towers
    assert (cost.rows.inside_host + cost.ids.inside_host) * BATCH == pytest.approx(inside)
    assert (cost.rows.across_hosts + cost.ids.across_hosts) * BATCH == pytest.approx(across)


class TestPrinted:
    def test_table(self) -> None:
        program = in_towers(dcn(LONG), 2, CrossTower(dim=128, layers=1, rank=512))
        text = str(program.complexity())
        lines = text.split("\n")
        assert all(len(line) <= 80 for line in lines) and text.isascii()
        (training,) = [line.split() for line in lines if line.startswith("    training")]
        assert training == ["training", "96.17", "43.68"]
        assert "one id per bag" in text
        assert text == str(program.complexity())

    def test_small_and_large_numbers_keep_their_columns(self) -> None:
        text = str(towerize(torchrec_model("DLRM"), Topology(2, 2)).complexity())
        (training,) = [line.split() for line in text.split("\n") if line.startswith("    training")]
        # 6 for each multiplication with its addition in 4 x 8, 8 x 8, 23 x 8, 8 x 1 and 6 x 6 x 8, less the dense inputs' gradient.
        assert training[1:] == ["0.00339", "0.00339"]
        assert max(map(len, text.split("\n"))) <= 80
