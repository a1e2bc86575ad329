"""From a flat recommender to a tower-partitioned program, proved equal (Disaggregated Multi-Tower, arXiv 2403.00877)."""

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
from .plan import Tower, TowerPlan
from .program import TowerProgram, towerize
from .topology import Topology
from .verify.certificate import Certificate, Check

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "Certificate",
    "Check",
    "DependencyError",
    "DistributedError",
    "DmtError",
    "InputError",
    "PassError",
    "PlanError",
    "Topology",
    "TopologyError",
    "Tower",
    "TowerPlan",
    "TowerProgram",
    "VerificationError",
    "towerize",
]
