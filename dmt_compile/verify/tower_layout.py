"""The layout check of towers' modules: whose vectors they get, on which rows, and where what they make goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from ..runtime.pooled import RestoreColumns
from ..runtime.tower_rows import PickVectors, ReplacedOutput, RunTower, SendColumns, TowerColumns
from ..runtime.vectors import LayVectors, ReplaceColumns
from ..towers.record import EXPANSIONS
from .values import Blocks, FromTower, Rows, Sent, TowerRows

if TYPE_CHECKING:
    from .layout import _Checker


def pick(check: _Checker, module: PickVectors, rows: Any) -> TowerRows:
    _behind_the_shuffle(check, rows)
    _same_towers(check, module)
    arrival = _arrival(check, rows)
    check.expect(module.arrival == arrival, "takes vectors from other columns than those that lie behind the shuffle")
    check.expect(module.lookups == check.rounds[rows.round], "takes vectors of other lookups than the model's")
    return TowerRows("vectors", rows)


def run(check: _Checker, module: RunTower, vectors: Any) -> TowerRows:
    check.expect(
        isinstance(vectors, TowerRows) and vectors.kind == "vectors",
        "runs a tower's module on something that is not the vectors of the tower's features",
    )
    _same_towers(check, module)
    return TowerRows("made", vectors.rows)


def send(check: _Checker, module: SendColumns, made: Any, rows: Any) -> Rows:
    check.expect(isinstance(made, TowerRows) and made.kind == "made", "sends something that no tower's module has made")
    check.expect(made.rows is rows, "puts what a module has made beside rows other than those it was made of")
    _same_towers(check, module)
    lookups = check.rounds[rows.round]
    check.expect(module.lookups == lookups, "sends columns of other lookups than the model's")
    check.expect(module.arrival == _arrival(check, rows), "takes columns from other places than those behind the shuffle")
    check.expect(module.dtype == lookups.exchange_dtype, f"sends {module.dtype}, the lookups need {lookups.exchange_dtype}")
    sent = Sent(module.widths, module.made, tuple(module.raw_of(tower) for tower in range(check.plan.grid.towers)))
    return Rows(rows.layout, rows.round, sent)


def arrive(check: _Checker, module: TowerColumns, blocks: Any) -> FromTower:
    made = isinstance(blocks, Blocks) and blocks.sent is not None
    check.expect(made, "takes a tower's columns from blocks that no tower's module has made")
    exchange, record = blocks.exchange, next((one for one in check.stage.vectors if one.tower == module.tower), None)
    check.expect(record is not None, f"takes the columns of tower {module.tower}, which has no module")
    assert record is not None
    grid = check.plan.grid
    for rank in range(grid.ranks_per_tower):
        # Ranks at the same place of other towers have the same peers.
        check.expect(tuple(exchange.rows_to(rank)) == (rank,), f"rank {rank} gets the samples of other ranks than its own")
        member = exchange.members(rank)[module.tower]
        check.expect(grid.tower_of(member) == module.tower, f"block {module.tower} on rank {rank} comes from another tower")
    check.expect(module.columns == record.columns, f"takes {module.columns} columns, the tower's module makes {record.columns}")
    dtype = check.stage.lookups.lookup[record.lookups[0]].dtype
    check.expect(module.dtype == dtype, f"makes columns of {module.dtype}, the tower's lookups are of {dtype}")
    check.expect(module.tower not in check.arrived, f"takes the columns of tower {module.tower} a second time")
    check.arrived.add(module.tower)
    return FromTower(module.tower)


def lay(check: _Checker, module: LayVectors, *made: Any) -> None:
    _in_order(check, made, wide=False)


def replace_columns(check: _Checker, module: ReplaceColumns, value: Any, *wide: Any) -> None:
    _in_order(check, wide, wide=True)


def replaced_output(check: _Checker, module: ReplacedOutput, *given: Any) -> None:
    likes = module.make.output.like is not None
    _in_order(check, given[:-1] if likes else given, wide=True)
    output = module.make.output
    check.expect(output in check.stage.lookups.outputs, f"makes '{output.node}', which is not the value of a lookup")
    lookups = check.stage.lookups
    place: dict[str, tuple[int, int, int]] = {}
    for number, record in enumerate(check.stage.vectors):
        start = 0
        for name, width in zip(record.lookups, record.widths, strict=True):
            place[name] = (number, start, width)
            start += width
    wanted = tuple(place.get(name) for name in output.lookups)
    check.expect(module.places == wanted, f"makes '{output.node}' of other columns than those of its lookups")
    dims = [lookups.lookup[name].dim for name in output.lookups]
    check.expect(module.make._dims == dims, f"offers columns of widths {module.make._dims[:8]}, the lookups make {dims[:8]}")
    shaped = [check.flat_name(arg) for arg in check.node.args[len(check.stage.vectors) :] if isinstance(arg, fx.Node)]
    check.expect(shaped == ([output.like] if output.like else []), f"takes the shape of {shaped}, not of {output.like}")
    check.replaced.add(output.node)


def expansion(check: _Checker, node: fx.Node) -> FromTower | None:
    """What a layer behind the exchange makes of the columns of its tower; None for another node."""
    if node.op != "call_module" or not str(node.target).startswith(f"{EXPANSIONS}."):
        return None
    value = check.value(node.args[0])
    if not isinstance(value, FromTower):
        return None
    number = int(str(node.target).rpartition(".")[2])
    check.expect(value == FromTower(number), f"expands what tower {value.tower} has made by the layer of tower {number}")
    return FromTower(number, wide=True)


def restored(check: _Checker, module: RestoreColumns, blocks: Blocks) -> None:
    """Columns beside those of the towers' modules are put back where a call that is still there needs them."""
    assert blocks.sent is not None
    lookups = check.rounds[blocks.exchange.round]
    check.expect(module.arrival == blocks.sent.raw, "the columns that reach a rank beside the towers' are not the ones it sorts")
    check.expect(module.first == blocks.sent.made, "columns begin behind other numbers of columns than the towers' modules make")
    needed = {name for number in module.outputs for name in lookups.outputs[number].lookups}
    beside = {name for block in module.arrival for name in block}
    check.expect(needed == beside, f"the columns of '{next(iter(needed ^ beside), None)}' do not arrive exactly once")
    check.expect(sum(map(len, module.arrival)) == len(beside), "the columns of a lookup arrive twice")
    again = RestoreColumns(lookups, module.arrival, module.first, module.outputs)
    check.expect(module._outputs == again._outputs, "does not sort the columns into declaration order")


def finish(check: _Checker, wanted: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The outputs that must be made, where modules have taken the columns of some."""
    towers = {one.tower for one in check.stage.vectors}
    check.expect(check.arrived == towers, f"the columns of towers {sorted(check.arrived)} arrive, of {sorted(towers)} they must")
    taken = {name for one in check.stage.vectors for name in one.lookups}
    made = set(check.outputs)
    return [
        (number, index)
        for number, index in wanted
        if (number, index) in made or number or not set(check.rounds[number].outputs[index].lookups) <= taken
    ]


def _behind_the_shuffle(check: _Checker, rows: Any) -> None:
    check.expect(isinstance(rows, Rows) and rows.sent is None, "takes vectors from something that is not pooled rows")
    check.expect(rows.round == 0, f"takes vectors from rows of round {rows.round}")
    grid = check.plan.grid
    for rank in range(check.world):
        layout = rows.layout(rank)
        owners = grid.tower_ranks(grid.tower_of(rank))
        if tuple(layout.owners) != tuple(owners):
            check.fail(f"on rank {rank} a tower's module needs the columns of its tower's ranks, but is given {layout}")


def _arrival(check: _Checker, rows: Rows) -> tuple[tuple[str, ...], ...]:
    """By tower the lookups whose columns lie side by side."""
    grid, owned = check.plan.grid, check.owned[rows.round]
    firsts = [grid.tower_ranks(tower)[0] for tower in range(grid.towers)]
    return tuple(tuple(name for owner in rows.layout(rank).owners for name in owned[owner]) for rank in firsts)


def _same_towers(check: _Checker, module: Any) -> None:
    check.expect(module.records == check.stage.vectors, "runs other modules than those that the towers have, or of other towers")
    check.expect(module.grid == check.plan.grid, f"is made for {module.grid}, the plan has {check.plan.grid}")


def _in_order(check: _Checker, given: tuple[Any, ...], wide: bool) -> None:
    """What the towers have made, tower by tower, at its old width where that is wanted; or what no pass has moved yet."""
    if not check.moved and not any(isinstance(value, FromTower) for value in given):
        return
    for record, value in zip(check.stage.vectors, given, strict=False):
        wanted = f"tower {record.tower}"
        check.expect(isinstance(value, FromTower), f"takes something else than what {wanted} has made")
        check.expect(value.tower == record.tower, f"takes what tower {value.tower} has made for what {wanted} has made")
        check.expect(
            value.wide == (wide and not record.passes), f"takes the columns of {wanted} at another width than the model has"
        )
    check.expect(
        len(given) == len(check.stage.vectors), f"is given {len(given)} towers' columns, there are {len(check.stage.vectors)}"
    )


HANDLERS: dict[type[nn.Module], Callable[..., Any]] = {
    PickVectors: pick,
    RunTower: run,
    SendColumns: send,
    TowerColumns: arrive,
    LayVectors: lay,
    ReplaceColumns: replace_columns,
    ReplacedOutput: replaced_output,
}
