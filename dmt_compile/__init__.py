"""From a flat recommender to a tower-partitioned program, proved equal (Disaggregated Multi-Tower, arXiv 2403.00877)."""

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import (
    CaptureError,
    DependencyError,
    DistributedError,
    DmtError,
    InputError,
    PassError,
    PlanError,
    TopologyError,
    VerificationError,
)

if TYPE_CHECKING:
    from .backend import Explanation, explain
    from .plan import Tower, TowerPlan
    from .program import TowerProgram, towerize
    from .runtime.rank_module import RankModule
    from .topology import Topology
    from .towers.modules import CrossTower, DLRMTower, PassThrough
    from .verify.certificate import Certificate, Check

__version__ = "0.1.0"

# Loaded on first use, so that the command line can explain an installation in which torch does not load.
_HOMES = {
    "Certificate": "verify.certificate",
    "Check": "verify.certificate",
    "CrossTower": "towers.modules",
    "DLRMTower": "towers.modules",
    "Explanation": "backend",
    "PassThrough": "towers.modules",
    "RankModule": "runtime.rank_module",
    "Topology": "topology",
    "Tower": "plan",
    "TowerPlan": "plan",
    "TowerProgram": "program",
    "explain": "backend",
    "towerize": "program",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


__all__ = [
    "CaptureError",
    "Certificate",
    "Check",
    "CrossTower",
    "DLRMTower",
    "DependencyError",
    "DistributedError",
    "DmtError",
    "Explanation",
    "InputError",
    "PassError",
    "PassThrough",
    "PlanError",
    "RankModule",
    "Topology",
    "TopologyError",
    "Tower",
    "TowerPlan",
    "TowerProgram",
    "VerificationError",
    "explain",
    "towerize",
]
