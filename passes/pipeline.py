"""The ordered passes, and the reason for each place."""

from __future__ import annotations

from dmt_compile.stage import Stage

from .base import GraphPass
from .classic import ClassicExchange
from .lower import Lower
from .split_towers import SplitTowers
from .sptt import Sptt
from .tower_modules import TowerModules

PIPELINE: tuple[GraphPass, ...] = (
    # First, because it turns every way to write a lookup into one normal form, on one device, where it is easiest to compare.
    SplitTowers(),
    # Before SPTT, because it decides who owns what and adds the only exchange that SPTT has to take apart.
    ClassicExchange(),
    # On declared exchanges, where who sends which rows to whom can be read off a record.
    Sptt(),
    # Behind SPTT, because only behind the shuffle does a rank have all of its tower's columns; on declared exchanges, because it
    # changes what one of them carries.
    TowerModules(),
    # Last, because collectives, waits and their schedule must not be looked through by a rewrite.
    Lower(),
)


def run(flat: Stage) -> dict[str, Stage]:
    """All stages by name, from ``flat`` on, in order.

    Raises:
        PassError: a pass's requirement or promise does not hold.
    """
    stages = {flat.name: flat}
    stage = flat
    for graph_pass in PIPELINE:
        if not graph_pass.applies(stage):
            continue
        stage = graph_pass.apply(stage)
        stages[stage.name] = stage
    return stages
