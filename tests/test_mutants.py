"""Wrong programs. The layout check must refute each by pass and node; running it in lock-step must refute it once more."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from models import collection, jagged, run_ranks, table
from mutants import MUTANTS, ROWS, Mutant, printed_peer_key, refuted_by_layout, remade
from torch import nn

from dmt_compile import PassError, Topology, VerificationError, towerize
from dmt_compile.passes.base import well_formed
from dmt_compile.stage import PASS, Stage
from dmt_compile.verify.compare import bits_differ
from dmt_compile.verify.layout import check_layout

SHAPES = {"4x2, 4 towers": ((4, 2), 4), "2x4, 2 towers": ((2, 4), 2), "4x2, 2 towers": ((4, 2), 2)}


class TwoInputs(nn.Module):
    """Nine tables over two inputs, one of them weighted; equal and unequal widths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain = collection(*(table(f"a{i}", [f"x{i}"], 2 + i // 3, mean=i % 2 == 1, rows=ROWS) for i in range(6)))
        self.weighted = collection(*(table(f"b{i}", [f"x{i}"], 3, rows=ROWS) for i in range(3)), weighted=True)

    def forward(self, first: Any, second: Any) -> dict[str, torch.Tensor]:
        return {"plain": self.plain(first).values(), "weighted": self.weighted(second).values()}


FEATURES = [f"x{i}" for i in range(6)]


@cache
def compiled(shape: str) -> tuple[Any, list[Any], list[Any]]:
    """A program, inputs of unequal size for every rank, and what the flat model makes of them."""
    (hosts, ranks), towers = SHAPES[shape]
    model = TwoInputs()
    program = towerize(model, Topology(hosts, ranks), towers=towers, partition="strided")
    sizes = [2, 1, 3, 2, 4, 1, 2, 3]
    inputs = [
        (jagged(FEATURES, size, seed=r, rows=ROWS), jagged(FEATURES, size, seed=50 + r, weighted=True, rows=ROWS))
        for r, size in enumerate(sizes)
    ]
    with torch.no_grad():
        expected = [model(*given) for given in inputs]
    return program, inputs, expected


def refuted_by_running(stage: Stage, inputs: list[Any], expected: list[Any]) -> bool:
    try:
        with torch.no_grad():
            found = run_ranks(stage, inputs)
    except Exception:
        return True
    return any(bits_differ(a, b) is not None for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stage", ["classic", "sptt", "lowered"])
def test_the_program_itself_is_not_refuted(shape: str, stage: str) -> None:
    program, inputs, expected = compiled(shape)
    check_layout(program.stages[stage])
    untouched = remade(program.stages[stage], lambda m: None)
    check_layout(untouched)
    assert not refuted_by_running(untouched, inputs, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant(name: str, shape: str) -> None:
    program, inputs, expected = compiled(shape)
    mutant = remade(program.stages["lowered"], MUTANTS[name])
    refuted_by_layout(mutant)
    assert refuted_by_running(mutant, inputs, expected)
    check_layout(program.stages["lowered"])


@pytest.mark.parametrize("shape", ["4x2, 4 towers", "2x4, 2 towers"])
def test_the_peer_key_that_the_paper_prints(shape: str) -> None:
    program, inputs, expected = compiled(shape)
    for name, found_by in (("sptt", "pass 'sptt'"), ("lowered", "pass 'lower'")):
        mutant = remade(program.stages[name], printed_peer_key)
        message = refuted_by_layout(mutant)
        assert found_by in message and "the tower exchange takes rows of ranks" in message
        assert refuted_by_running(mutant, inputs, expected)


def no_tower_exchange(m: Mutant) -> None:
    m.skip("exchange_tower")


def no_declared_shuffle(m: Mutant) -> None:
    m.skip("shuffle")


def declared_exchanges_swapped(m: Mutant) -> None:
    m.extras["exchange_tower"], m.extras["exchange_peer"] = m.extras["exchange_peer"], m.extras["exchange_tower"]


def no_restore(m: Mutant) -> None:
    m.skip("restore")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spoil", [no_tower_exchange, no_declared_shuffle, declared_exchanges_swapped, no_restore])
def test_mutant_of_declared_exchanges(spoil: Any, shape: str) -> None:
    program, inputs, expected = compiled(shape)
    mutant = remade(program.stages["sptt"], spoil)
    refuted_by_layout(mutant)
    assert refuted_by_running(mutant, inputs, expected)


def test_owners_other_than_the_plan() -> None:
    """Consistent, so it would run here; but the ranks materialise what the plan says."""
    program, _, _ = compiled("4x2, 4 towers")
    other = towerize(TwoInputs(), program.topology, towers=4, partition="balanced")
    assert other.plan != program.plan
    stage = program.stages["lowered"]
    foreign = other.stages["lowered"]
    mixed = type(stage)(stage.name, foreign.graph_module, foreign.root, foreign.lookups, program.plan)
    assert "which the plan does not give it" in refuted_by_layout(mixed)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_rewiring_that_changes_a_result_is_refuted(shape: str) -> None:
    """Each argument of each node that a pass made, replaced by other nodes that are computed before it."""
    program, inputs, expected = compiled(shape)
    lowered = program.stages["lowered"]
    nodes = list(lowered.graph.nodes)
    refuted = 0
    for place, node in enumerate(nodes):
        if PASS not in node.meta:
            continue
        for position, argument in enumerate(node.args):
            if argument not in nodes:
                continue
            # A part of them for each shape, other ones for each.
            start = (place + position + list(SHAPES).index(shape)) % 5
            for other in [n for n in nodes[:place] if n is not argument][start::5]:

                def rewire(m: Mutant, name: str = node.name, at: int = position, to: str = other.name) -> None:
                    m.set_args(name, **{f"_{at}": m.nodes[to]})

                mutant = remade(lowered, rewire)
                try:
                    check_layout(mutant)
                except VerificationError as error:
                    assert "pass '" in str(error) and "node '" in str(error)
                    refuted += 1
                else:
                    assert not refuted_by_running(mutant, inputs, expected), (node.name, position, other.name)
    assert refuted > 100


def test_a_graph_out_of_order_is_refused() -> None:
    program, _, _ = compiled("4x2, 4 towers")

    def late(m: Mutant) -> None:
        m.nodes["restore"].append(m.nodes["shuffle"])

    with pytest.raises(PassError, match="uses 'shuffle' before it is computed"):
        well_formed(remade(program.stages["lowered"], late))
