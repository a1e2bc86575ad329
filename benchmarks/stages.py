"""Nodes per stage: the graph is the same for all ranks, so it does not grow with them."""

from __future__ import annotations

import warnings

import dmt_compile

from .models import dlrm
from .report import show

TOPOLOGIES = ((2, 2), (8, 8), (64, 8))
TABLES = 26


def run(quick: bool) -> None:
    warnings.filterwarnings("ignore")
    model = dlrm(TABLES, 100, 16)
    for towers, what in ((2, "2 towers"), (None, "one tower per host")):
        counts = []
        for hosts, ranks in TOPOLOGIES:
            program = dmt_compile.towerize(model, dmt_compile.Topology(hosts, ranks), towers=towers)
            counts.append({name: len(stage.graph.nodes) for name, stage in program.stages.items()})
        note = "" if towers else "The towers stage runs on one device and has one node per tower."
        show(
            f"Graph nodes of DLRM with {TABLES} tables, {what} (target: stages that run on ranks do not grow with ranks)",
            ("stage", *(f"{hosts} x {ranks}" for hosts, ranks in TOPOLOGIES)),
            [(name, *(count[name] for count in counts)) for name in counts[0]],
            note,
        )
