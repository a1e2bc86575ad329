"""Topologies, tower grids, and the values that neither can have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dmt_compile import Topology, TopologyError
from dmt_compile.exchange import Exchange
from dmt_compile.topology import TowerGrid, valid_tower_counts

SETTINGS = settings(derandomize=True, deadline=None, max_examples=60)
shapes = st.builds(Topology, st.integers(1, 8), st.integers(1, 8))


@st.composite
def grids(draw: st.DrawFn) -> tuple[Topology, TowerGrid]:
    topology = draw(shapes)
    return topology, TowerGrid.of(topology, draw(st.sampled_from(valid_tower_counts(topology))))


@pytest.mark.parametrize(
    "hosts, ranks, reason",
    [
        (0, 2, "hosts must be at least 1, got 0"),
        (2, -1, "ranks_per_host must be at least 1, got -1"),
        (2.0, 2, "hosts must be a whole number, got 2.0 (float)"),
        ("2", 2, "hosts must be a whole number, got '2' (str)"),
        (True, 2, "hosts must be a whole number, got True (bool)"),
        (2, None, "ranks_per_host must be a whole number, got None (NoneType)"),
    ],
)
def test_impossible_values(hosts: object, ranks: object, reason: str) -> None:
    with pytest.raises(TopologyError) as caught:
        Topology(hosts, ranks)  # type: ignore[arg-type]
    assert str(caught.value) == reason


def test_frozen_and_hashable() -> None:
    topology = Topology(4, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        topology.hosts = 3  # type: ignore[misc]
    assert {topology: 1}[Topology(4, 2)] == 1 and topology != Topology(2, 4)


def test_hosts() -> None:
    topology = Topology(3, 2)
    assert [topology.host_of(r) for r in range(topology.world_size)] == [0, 0, 1, 1, 2, 2]
    for rank in (-1, 6):
        with pytest.raises(TopologyError, match=f"rank {rank} is not one of 0..5"):
            topology.host_of(rank)


class TestFromEnv:
    def test_torchrun(self) -> None:
        assert Topology.from_env({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}) == Topology(4, 2)

    def test_reads_the_process_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "6")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
        assert Topology.from_env() == Topology(2, 3)

    @pytest.mark.parametrize(
        "env, reason",
        [
            ({}, "WORLD_SIZE is not set: start the script with torchrun"),
            ({"WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is not set"),
            ({"WORLD_SIZE": "eight", "LOCAL_WORLD_SIZE": "2"}, "WORLD_SIZE is 'eight', not a whole number"),
            ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE is '', not a whole number"),
            ({"WORLD_SIZE": "0", "LOCAL_WORLD_SIZE": "2"}, "WORLD_SIZE must be at least 1, got 0"),
            ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "-2"}, "LOCAL_WORLD_SIZE must be at least 1, got -2"),
            ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "3"}, "WORLD_SIZE=8 is not a multiple of LOCAL_WORLD_SIZE=3"),
            ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, "every host must run the same number of ranks"),
        ],
    )
    def test_refused(self, env: dict[str, str], reason: str) -> None:
        with pytest.raises(TopologyError) as caught:
            Topology.from_env(env)
        assert reason in str(caught.value)


class TestFromDeviceMesh:
    @pytest.fixture(autouse=True)
    def fake_world(self) -> Iterator[None]:
        dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
        yield
        dist.destroy_process_group()

    @pytest.mark.parametrize("shape", [(4, 2), (2, 4), (8, 1), (1, 8)])
    def test_two_dimensions(self, shape: tuple[int, int]) -> None:
        assert Topology.from_device_mesh(init_device_mesh("cpu", shape)) == Topology(*shape)

    def test_one_dimension(self) -> None:
        with pytest.raises(TopologyError, match=r"a 2-D device mesh \(hosts, ranks per host\) is needed, got 1-D of shape \(8,\)"):
            Topology.from_device_mesh(init_device_mesh("cpu", (8,)))

    def test_three_dimensions(self) -> None:
        with pytest.raises(TopologyError, match="got 3-D"):
            Topology.from_device_mesh(init_device_mesh("cpu", (2, 2, 2)))

    @pytest.mark.parametrize("ranks", [[[0, 2, 4, 6], [1, 3, 5, 7]], [[1, 0, 2, 3], [4, 5, 6, 7]], [[4, 5], [6, 7]]])
    def test_other_numbering(self, ranks: list[list[int]]) -> None:
        with pytest.raises(TopologyError, match=r"must number the ranks 0\.\.\d host by host"):
            Topology.from_device_mesh(DeviceMesh("cpu", ranks))


class TestGrid:
    @pytest.mark.parametrize(
        "shape, counts",
        [((4, 2), [1, 2, 4, 8]), ((2, 4), [1, 2, 4, 8]), ((3, 4), [1, 3, 6, 12]), ((1, 1), [1]), ((6, 2), [1, 2, 3, 6, 12])],
    )
    def test_possible_numbers_of_towers(self, shape: tuple[int, int], counts: list[int]) -> None:
        assert valid_tower_counts(Topology(*shape)) == counts

    @given(shapes, st.integers(-2, 70))
    @SETTINGS
    def test_every_other_number_is_refused_with_the_possible_ones(self, topology: Topology, towers: int) -> None:
        options = valid_tower_counts(topology)
        if towers in options:
            assert TowerGrid.of(topology, towers).towers == towers
            return
        with pytest.raises(TopologyError) as caught:
            TowerGrid.of(topology, towers)
        assert ("at least 1" if towers < 1 else ", ".join(map(str, options))) in str(caught.value)

    @given(grids())
    @SETTINGS
    def test_towers_are_whole_hosts_or_equal_parts_of_one(self, drawn: tuple[Topology, TowerGrid]) -> None:
        topology, grid = drawn
        assert [r for t in range(grid.towers) for r in grid.tower_ranks(t)] == list(range(topology.world_size))
        hosts = [{topology.host_of(r) for r in grid.tower_ranks(t)} for t in range(grid.towers)]
        if grid.ranks_per_tower > topology.ranks_per_host:
            assert all(a.isdisjoint(b) for i, a in enumerate(hosts) for b in hosts[:i])
        else:
            assert all(len(h) == 1 for h in hosts)

    @given(grids())
    @SETTINGS
    def test_peers_share_a_place_and_partition_the_ranks(self, drawn: tuple[Topology, TowerGrid]) -> None:
        _, grid = drawn
        groups = [list(grid.peers(i)) for i in range(grid.ranks_per_tower)]
        assert sorted(r for group in groups for r in group) == list(range(grid.world_size))
        for index, group in enumerate(groups):
            assert [grid.tower_of(r) for r in group] == list(range(grid.towers))
            assert {grid.index_of(r) for r in group} == {index}

    @given(grids())
    @SETTINGS
    def test_peer_order_sorts_by_place_then_tower(self, drawn: tuple[Topology, TowerGrid]) -> None:
        _, grid = drawn
        assert list(grid.peer_order()) == sorted(range(grid.world_size), key=lambda r: (grid.index_of(r), grid.tower_of(r)))

    @pytest.mark.parametrize("towers, size, holds", [(2, 2, True), (3, 3, True), (4, 2, False), (2, 4, False), (8, 2, False)])
    def test_the_printed_key_holds_for_square_grids_only(self, towers: int, size: int, holds: bool) -> None:
        grid = TowerGrid(towers, size)
        printed = sorted(range(grid.world_size), key=lambda r: (r % towers, r // size))
        assert (list(grid.peer_order()) == printed) is holds


class TestExchangeRecords:
    @given(grids(), st.sampled_from(["world", "tower", "peer"]), st.data())
    @SETTINGS
    def test_what_is_sent_is_what_is_received(self, drawn: tuple[Topology, TowerGrid], axis: str, data: st.DataObject) -> None:
        _, grid = drawn
        world = grid.world_size
        widths = tuple(data.draw(st.lists(st.integers(0, 5), min_size=world, max_size=world)))
        sizes = data.draw(st.lists(st.integers(0, 5), min_size=world, max_size=world))
        exchange = Exchange(axis, grid, widths)  # type: ignore[arg-type]
        for rank in range(world):
            assert exchange.members(rank)[list(exchange.members(rank)).index(rank)] == rank
            for member, block in zip(exchange.members(rank), exchange.sent(rank), strict=True):
                back = exchange.received(member)[list(exchange.members(member)).index(rank)]
                assert block.same_as(back)
            held = exchange.source(rank)
            total = sum(sizes[r] for r in held.rows) * exchange.width(held.owners)
            assert sum(exchange.sizes(exchange.sent(rank), sizes)) == total

    @given(grids(), st.sampled_from(["world", "tower", "peer"]))
    @SETTINGS
    def test_traffic_crosses_hosts_exactly_when_it_says_so(self, drawn: tuple[Topology, TowerGrid], axis: str) -> None:
        topology, grid = drawn
        world = grid.world_size
        exchange = Exchange(axis, grid, (1,) * world)  # type: ignore[arg-type]
        traffic = [exchange.traffic(rank, topology, [1] * world) for rank in range(world)]
        assert any(across for _, across in traffic) == exchange.crosses_hosts(topology)
        moved = sum(sum(t) for t in traffic)
        group = world if axis == "world" else grid.ranks_per_tower if axis == "tower" else grid.towers
        rows = 1 if axis == "world" else grid.towers if axis == "tower" else grid.ranks_per_tower
        assert moved == 4 * world * (group - 1) * rows
