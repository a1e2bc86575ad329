"""What ``print(program)`` says about plain lookups: their style, and the tables that stay replicated, with reason and cost."""

from __future__ import annotations

import re

import pytest
import torch
from plain_models import CASES
from torch import nn

from dmt_compile import Topology, TowerProgram, towerize


def program(name: str) -> TowerProgram:
    return towerize(CASES[name].build(), Topology(2, 2), example_inputs=CASES[name].example())


def section(text: str, title: str) -> list[str]:
    """The lines under a title, up to the next empty line."""
    lines = text.split("\n")
    (start,) = [number for number, line in enumerate(lines) if line.startswith(title)]
    return lines[start + 1 : lines.index("", start)]


@pytest.mark.parametrize("name", sorted(CASES)[::2])
def test_lines_fit_a_terminal(name: str) -> None:
    text = str(program(name))
    assert text.isascii()
    assert max(map(len, text.split("\n"))) <= 80
    # Every lookup is in one of the rows, or counted in the line that stands for the rest.
    compiled = program(name)
    rows = section(text, "Lookups found")[1:]
    found = [re.search(r" (\d+)(?: weighted)? +\d+  \S+", row) or re.search(r"and (\d+) more", row) for row in rows]
    assert sum(int(match[1]) for match in found if match) == len(compiled.lookups.lookups)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("per field", r"deep\.0\.\.deep\.3 +4 +12  1 id: row +\S*plain_models\.py:\d+"),
        ("offsets", r"sum +1 weighted +3  offsets: sum +\S*plain_models\.py:\d+"),
        ("bags", r"max +1 +1  any ids: max"),
        ("history", r"batch\['history'\] +1 +4  any ids: rows"),
    ],
)
def test_style_of_a_lookup(name: str, row: str) -> None:
    assert any(re.search(row, line) for line in section(str(program(name)), "Lookups found"))


def test_replicated_tables_and_their_cost() -> None:
    lines = section(str(program("refusing")), "Replicated: 3 tables on every rank")
    assert lines[0] == "  400 B on each of 4 ranks; at most 400 B of gradients all-reduced in every step"
    assert "  tied.weight, 176 B" in lines
    assert any("it is also used as a weight here" in line for line in lines)
    assert "Replicated" not in str(program("per field"))


def test_a_frozen_table_costs_no_gradients() -> None:
    model = CASES["refusing"].build()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.requires_grad_(False)
    text = str(towerize(model, Topology(2, 2), example_inputs=CASES["refusing"].example()))
    assert section(text, "Replicated")[0] == "  400 B on each of 4 ranks; frozen, so no gradients"


def test_many_replicated_tables_are_folded() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.served = nn.Embedding(5, 2)
            self.scaled = nn.ModuleList([nn.Embedding(5, 2, scale_grad_by_freq=True) for _ in range(9)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.served(x) + sum(table(x) for table in self.scaled)

    text = str(towerize(Many(), Topology(2, 2), example_inputs=(torch.zeros(4, dtype=torch.long),)))
    assert section(text, "Replicated: 9 tables")[-1] == "  ... and 5 more (program.replicated)"
