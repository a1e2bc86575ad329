"""The two levels of a datacentre (hosts, ranks per host) and the grid of towers laid over them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import TopologyError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TopologyError(f"{name} must be a whole number, got {value!r} ({type(value).__name__})")
    if value < 1:
        raise TopologyError(f"{name} must be at least 1, got {value}")
    return value


@dataclass(frozen=True)
class Topology:
    """``hosts`` machines with ``ranks_per_host`` ranks each; rank r runs on host ``r // ranks_per_host``.

    Raises:
        TopologyError: a value that is not a whole number of at least 1.
    """

    hosts: int
    ranks_per_host: int

    def __post_init__(self) -> None:
        _positive("hosts", self.hosts)
        _positive("ranks_per_host", self.ranks_per_host)

    @property
    def world_size(self) -> int:
        """G, the number of ranks."""
        return self.hosts * self.ranks_per_host

    def host_of(self, rank: int) -> int:
        """The host that runs ``rank``."""
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} is not one of 0..{self.world_size - 1}")
        return rank // self.ranks_per_host

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Topology:
        """The topology of this job, from the variables that torchrun sets (``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``).

        Raises:
            TopologyError: a variable is missing, is not a number, or the hosts do not all run equally many ranks.
        """
        env = os.environ if env is None else env
        values: dict[str, int] = {}
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            text = env.get(name)
            if text is None:
                raise TopologyError(
                    f"the environment variable {name} is not set: start the script with torchrun, "
                    "or pass Topology(hosts=..., ranks_per_host=...)"
                )
            try:
                values[name] = int(text)
            except ValueError:
                raise TopologyError(f"the environment variable {name} is {text!r}, not a whole number") from None
            _positive(f"the environment variable {name}", values[name])
        world, local = values["WORLD_SIZE"], values["LOCAL_WORLD_SIZE"]
        if world % local:
            raise TopologyError(
                f"WORLD_SIZE={world} is not a multiple of LOCAL_WORLD_SIZE={local}: every host must run the same number of ranks"
            )
        return cls(world // local, local)

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> Topology:
        """The topology of a 2-D ``DeviceMesh`` of shape (hosts, ranks per host), ranks numbered host by host.

        Raises:
            TopologyError: the mesh is not 2-D, or its ranks are not consecutive within a host.
        """
        ranks = mesh.mesh
        if ranks.ndim != 2:
            raise TopologyError(
                f"a 2-D device mesh (hosts, ranks per host) is needed, got {ranks.ndim}-D of shape {tuple(ranks.shape)}: "
                "use init_device_mesh(device_type, (hosts, ranks_per_host))"
            )
        if ranks.flatten().tolist() != list(range(ranks.numel())):
            raise TopologyError(f"the mesh must number the ranks 0..{ranks.numel() - 1} host by host, got {ranks.tolist()}")
        return cls(int(ranks.shape[0]), int(ranks.shape[1]))


@dataclass(frozen=True)
class TowerGrid:
    """G ranks as T towers of g consecutive ranks: rank r is (t, i) = (r // g, r % g) (section 3.1, in general form).

    The peers of a rank are the T ranks with the same place i in their towers. Peer order sorts ranks by (i, t).
    """

    towers: int
    ranks_per_tower: int

    @classmethod
    def of(cls, topology: Topology, towers: int) -> TowerGrid:
        """Lay ``towers`` towers over ``topology``.

        Raises:
            TopologyError: towers of equal size would not fill whole hosts or divide one evenly.
        """
        _positive("the number of towers", towers)
        options = valid_tower_counts(topology)
        if towers not in options:
            raise TopologyError(
                f"{towers} towers do not fit {topology.hosts} hosts x {topology.ranks_per_host} ranks: every tower needs the same "
                "number of ranks, and must either span whole hosts or share one host evenly with others; "
                f"possible numbers of towers: {', '.join(map(str, options))}"
            )
        return cls(towers, topology.world_size // towers)

    @property
    def world_size(self) -> int:
        return self.towers * self.ranks_per_tower

    def tower_of(self, rank: int) -> int:
        return rank // self.ranks_per_tower

    def index_of(self, rank: int) -> int:
        """The place of ``rank`` inside its tower."""
        return rank % self.ranks_per_tower

    def tower_ranks(self, tower: int) -> range:
        return range(tower * self.ranks_per_tower, (tower + 1) * self.ranks_per_tower)

    def peers(self, index: int) -> range:
        """The ranks at place ``index`` of every tower, by tower."""
        return range(index, self.world_size, self.ranks_per_tower)

    def peer_order(self) -> tuple[int, ...]:
        """All ranks sorted by (place in the tower, tower). The key that the paper prints holds for T = g only."""
        return tuple(rank for index in range(self.ranks_per_tower) for rank in self.peers(index))


def valid_tower_counts(topology: Topology) -> list[int]:
    """Every T for which a tower is a whole number of hosts or an equal part of one."""
    world, local = topology.world_size, topology.ranks_per_host
    counts = []
    for towers in range(1, world + 1):
        if world % towers == 0:
            size = world // towers
            if size % local == 0 or local % size == 0:
                counts.append(towers)
    return counts
