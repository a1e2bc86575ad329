"""Interactions found by data flow: every kind in several writings, on both front ends, whatever things are called."""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import interaction_models
import models
import pytest
import torch
from interaction_models import ZOO, Entry
from plain_models import CASES
from torch import nn

from dmt_compile import CaptureError, Topology, TowerProgram, towerize
from dmt_compile.capture import attempts
from dmt_compile.interactions import Interaction

SMALL = Topology(2, 1)


def lines(make: Callable[[], nn.Module]) -> list[int]:
    """The marked lines of a model, in the order of their marks."""
    source, first = inspect.getsourcelines(make)
    marked = ((re.search(r"# here ?(\d*)$", line.rstrip()), first + place) for place, line in enumerate(source))
    return [line for _, line in sorted((int(mark[1] or 1), line) for mark, line in marked if mark)]


def compiled(entry: Entry) -> TowerProgram:
    return towerize(entry.build(), SMALL, example_inputs=entry.inputs())


def check(program: TowerProgram, entry: Entry) -> None:
    found, want = program.interactions, entry.found
    assert [one.kind for one in found] == [one.kind for one in want]
    for one, expected, line in zip(found, want, lines(entry.make), strict=True):
        assert one.variant.startswith(expected.variant), one
        assert (one.block.vectors, one.block.width) == (expected.vectors, expected.width), one
        assert len(one.block.dense) == expected.dense, one
        file, _, number = str(one.location).rpartition(":")
        assert (file, int(number)) == (interaction_models.__file__, line), one
        assert one.text == inspect.getsourcelines(interaction_models)[0][line - 1].strip()
        nodes = {node.name: node for node in program.stages["flat"].graph.nodes}
        assert one.node in one.nodes and set(one.nodes) <= set(nodes)
        assert one.block.inputs and all(given.node in nodes for given in one.block.inputs)


@pytest.mark.parametrize("name", ZOO)
def test_symbolic(name: str) -> None:
    program = compiled(ZOO[name])
    assert program._dmt.captured.front_end == "torch.fx"
    check(program, ZOO[name])


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: nn.Module, structure: object) -> None:
        raise CaptureError("not now")

    monkeypatch.setattr(attempts, "_capture_symbolically", refuse)


# torch.export takes the number of pairs that a mask keeps for that of the batch.
@pytest.mark.parametrize("name", sorted(ZOO.keys() - {"dot, matmul and a boolean mask"})[::4])
def test_exported(name: str, exported: None) -> None:
    program = compiled(ZOO[name])
    assert program._dmt.captured.front_end == "torch.export"
    check(program, ZOO[name])


def said(program: TowerProgram) -> list[tuple[Any, ...]]:
    """What is found, without names."""
    return [(one.kind, one.variant, [(m.role, m.width) for m in one.block.members], len(one.nodes)) for one in program.interactions]


CALLED = """
tables table starts top bottom deep wide conv convs gate excite kernel user item dots score history target pairs pooled mask token
cross first fm cin w
"""


def test_names_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same models, every class, attribute and variable called something else."""
    source = inspect.getsource(interaction_models)
    called = {entry.make.__name__ for entry in ZOO.values()} | {"Fields", "OneTable", "Crossed", "Histories"}
    called |= set(CALLED.split())
    for number, name in enumerate(sorted(called)):
        source = re.sub(rf"(?<![\w\"]){name}\b(?!\")", f"q{number}", source)
    module = types.ModuleType("renamed")
    # Dataclasses look their module up.
    monkeypatch.setitem(sys.modules, "renamed", module)
    exec(compile(source, "renamed.py", "exec"), module.__dict__)
    for entry, renamed in list(zip(ZOO.values(), module.ZOO.values(), strict=True))[::4]:
        assert said(compiled(renamed)) == said(compiled(entry)), entry.make.__name__


KINDS = {
    "DLRM": ("pairwise dot", "15 of 36 products kept"),
    "DLRM_Projection": ("pairwise dot", "of vectors that an MLP makes from all"),
    "DLRM_DCN": ("cross network", "low-rank, 2 layers"),
    # TorchRec's encoder takes the axis of the batch for that of the sequence, so it mixes samples and no features.
    "DLRM_Transformer": ("concat-MLP", ""),
    "SimpleDeepFMNN": ("concat-MLP", ""),
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", models.TORCHREC_MODELS)
def test_torchrec(name: str, given: bool) -> None:
    inputs = models.torchrec_inputs(5) if given else None
    program = towerize(models.torchrec_model(name), SMALL, example_inputs=inputs)
    first, *others = program.interactions
    assert (first.kind, first.variant) == KINDS[name]
    assert [one.kind for one in others] == (["factorisation machine"] if name == "SimpleDeepFMNN" else [])
    for one in program.interactions:
        assert [member.name for member in one.block.members] == ["dense", *models.FIVE]
        assert (one.block.vectors, one.block.width, one.block.lookups) == (6, 8, models.FIVE)


def test_where_the_block_lies() -> None:
    (found,) = towerize(models.torchrec_model("DLRM"), SMALL).interactions
    (given,) = found.block.inputs
    assert (given.shape, given.vector_axis, given.width_axis) == ((-1, 6, 8), 1, 2)
    flat, _ = compiled(ZOO["cross, full, beside an MLP"]).interactions
    (given,) = flat.block.inputs
    assert (given.shape, given.vector_axis, given.width_axis) == ((-1, 44), None, 1)
    assert [member.role for member in given.members] == ["lookup"] * 5 + ["dense"]


def test_with_its_loss_and_without_values() -> None:
    for model in (models.training_model("DLRM"), models.torchrec_model("DLRM", "meta")):
        (found,) = towerize(model, SMALL).interactions
        assert (found.kind, found.block.vectors, len(found.block.dense)) == ("pairwise dot", 6, 1)


def test_tables_are_not_read_or_made() -> None:
    """Tables of terabytes on the meta device, and the same plan of mixing."""

    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList([nn.Embedding(10**10, 16, device="meta") for _ in range(3)])
            self.top = nn.Linear(48, 1, device="meta")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.top(torch.cat([table(x[:, i]) for i, table in enumerate(self.tables)], 1))

    (found,) = towerize(Huge(), SMALL, example_inputs=(torch.zeros(4, 3, dtype=torch.long, device="meta"),)).interactions
    assert (found.kind, found.block.vectors, found.block.width) == ("concat-MLP", 3, 16)


def test_the_model_is_left_alone() -> None:
    model = ZOO["nfm, bi-interaction"].build().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    program = towerize(model, SMALL, example_inputs=ZOO["nfm, bi-interaction"].inputs())
    assert program.interactions is program.interactions
    assert all(torch.equal(value, before[name]) for name, value in program.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()) and program.training
    assert all(parameter.requires_grad for parameter in program.parameters())


class Odd(nn.Module):
    """Reads lengths beside the lookups, which made-up inputs do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = models.plain_collection(2)
        self.top = nn.Linear(16, 1)

    def forward(self, sparse: Any) -> torch.Tensor:
        return self.top(self.ebc(sparse).values()) * sparse.lengths().view(2, -1).sum(0).unsqueeze(1)


def test_what_cannot_be_run_is_unknown() -> None:
    program = towerize(Odd(), SMALL)
    (found,) = program.interactions
    assert found.kind == "unknown" and "lengths" in found.variant and found.block.vectors == 0
    assert "  unknown: " in str(program)
    given = towerize(Odd(), SMALL, example_inputs=(models.jagged(["f0", "f1"], 5),))
    assert [one.kind for one in given.interactions] == ["concat-MLP"]


@pytest.mark.parametrize("name", CASES)
def test_every_style_of_lookup(name: str) -> None:
    program = towerize(CASES[name].build(), SMALL, example_inputs=CASES[name].example())
    found = program.interactions
    assert all(isinstance(one, Interaction) and one.kind != "unknown" for one in found)
    known = program.lookups.lookup.keys()
    assert all(member.name.split("[")[0] in {k.split("[")[0] for k in known} for one in found for member in one.block.members
               if member.role == "lookup")  # fmt: skip


def test_summary_shows_them() -> None:
    text = str(compiled(ZOO["deepfm"]))
    line = lines(ZOO["deepfm"].make)[1]
    assert "Interactions found\n  factorisation machine, sum-square\n    5 vectors of 8: tables.0..tables.4\n" in text
    assert f"  concat-MLP\n    5 vectors of 8: tables.0..tables.4\n    interaction_models.py:{line}: return wide" in text
    assert "  linear term\n    5 vectors of 1: first.0..first.4\n" in text
    assert "Interactions found\n  none: no value depends on two features\n" in str(compiled(ZOO["nothing mixed"]))
    assert "1 dense, tables.0..tables.4" in str(compiled(ZOO["dot, bmm and tril_indices"]))
