"""The worked example of SPTT, value by value after every step, from the graphs that the passes made."""

from __future__ import annotations

import pytest
import torch
from models import PooledOnly, cut_at, golden_inputs, golden_model, run_ranks, table
from torchrec import KeyedJaggedTensor

from dmt_compile import Topology, TowerProgram, towerize

# After each step, per rank, by blocks; number 4r + k is sample r, feature k. One block where the step gives one tensor.
STEPS = {
    "c": [[[0, 8, 4, 12]], [[1, 9, 5, 13]], [[2, 10, 6, 14]], [[3, 11, 7, 15]]],
    "d": [[[0, 8], [1, 9]], [[4, 12], [5, 13]], [[2, 10], [3, 11]], [[6, 14], [7, 15]]],
    "e": [[[0, 1, 8, 9]], [[4, 5, 12, 13]], [[2, 3, 10, 11]], [[6, 7, 14, 15]]],
    "g": [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]], [[12, 13], [14, 15]]],
}
NODES = {
    "sptt": {"c": "permute", "d": "exchange_tower", "e": "shuffle", "g": "exchange_peer"},
    "lowered": {"c": "permute", "d": "tower_unpack", "e": "shuffle", "g": "peer_unpack"},
}


@pytest.fixture(scope="module")
def program() -> TowerProgram:
    features = [[f"f{k}" for k in range(2)], [f"f{k}" for k in range(2, 4)]]
    return towerize(golden_model(), Topology(2, 2), towers=features)


def blocks_of(value: torch.Tensor | list[torch.Tensor]) -> list[list[float]]:
    return [block.flatten().tolist() for block in ([value] if isinstance(value, torch.Tensor) else value)]


def test_feature_k_is_on_rank_k(program: TowerProgram) -> None:
    assert program.plan.tables_of_rank == (("t0",), ("t1",), ("t2",), ("t3",))


@pytest.mark.parametrize("stage", ["sptt", "lowered"])
@pytest.mark.parametrize("step", ["c", "d", "e", "g"])
def test_step(program: TowerProgram, stage: str, step: str) -> None:
    found = run_ranks(cut_at(program.stages[stage], NODES[stage][step]), golden_inputs())
    assert [blocks_of(value) for value in found] == STEPS[step]


@pytest.mark.parametrize("stage", ["classic", "sptt", "lowered"])
def test_rank_r_ends_with_its_own_sample(program: TowerProgram, stage: str) -> None:
    found = run_ranks(program.stages[stage], golden_inputs())
    assert [value.flatten().tolist() for value in found] == [[4 * r, 4 * r + 1, 4 * r + 2, 4 * r + 3] for r in range(4)]


def test_step_e_has_one_row_per_peer(program: TowerProgram) -> None:
    found = run_ranks(cut_at(program.stages["sptt"], "shuffle"), golden_inputs())
    assert [value.tolist() for value in found] == [[[0, 1], [8, 9]], [[4, 5], [12, 13]], [[2, 3], [10, 11]], [[6, 7], [14, 15]]]


# The same by definition, for shapes with other numbers of towers than ranks per tower.


@pytest.mark.parametrize("world, per_host, towers", [(8, 2, 4), (8, 4, 2), (8, 2, 2), (8, 4, 4), (6, 3, 2), (6, 2, 3), (4, 4, 1)])
def test_steps_by_definition(world: int, per_host: int, towers: int) -> None:
    model = PooledOnly(*(table(f"t{k}", [f"f{k}"], 1, rows=world) for k in range(world)))
    with torch.no_grad():
        for k in range(world):
            model.ebc.embedding_bags[f"t{k}"].weight.copy_(torch.arange(float(world)).unsqueeze(1) * world + k)
    size = world // towers
    groups = [[f"f{k}" for k in range(t * size, (t + 1) * size)] for t in range(towers)]
    program = towerize(model, Topology(world // per_host, per_host), towers=groups)
    keys = [f"f{k}" for k in range(world)]
    ones = torch.ones(world, dtype=torch.int32)
    inputs = [(KeyedJaggedTensor(keys=keys, values=torch.full((world,), r), lengths=ones),) for r in range(world)]

    def value(sample: int, feature: int) -> int:
        return sample * world + feature

    peer_order = sorted(range(world), key=lambda r: (r % size, r // size))
    for stage, nodes in NODES.items():
        after = {step: run_ranks(cut_at(program.stages[stage], name), inputs) for step, name in nodes.items()}
        for rank in range(world):
            tower, place = divmod(rank, size)
            peers = [t * size + place for t in range(towers)]
            mine = [tower * size + i for i in range(size)]
            assert after["c"][rank].flatten().tolist() == [value(s, rank) for s in peer_order]
            assert blocks_of(after["d"][rank]) == [[value(s, f) for s in peers] for f in mine]
            assert after["e"][rank].tolist() == [[value(s, f) for f in mine] for s in peers]
            assert [x for block in blocks_of(after["g"][rank]) for x in block] == [value(rank, f) for f in range(world)]
