"""``torch.compile(model, backend="dmt")`` and its explanation in a process without other ranks."""

from __future__ import annotations

import operator
import warnings
from typing import Any

import pytest
import torch
from backend_models import Breaking, Mlp, batch, fresh, loss, seeded, tensors
from plain_models import CASES
from torch import nn

from dmt_compile import CaptureError, PlanError, Topology, backend
from dmt_compile.backend.options import Options
from dmt_compile.backend.staging import counted, one_device_graph


def test_found_by_name_and_alone() -> None:
    assert "dmt" in torch._dynamo.list_backends()
    torch._dynamo.reset()
    model = seeded()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = torch.compile(model, backend="dmt", options={"inner": "aot_eager"})
        assert torch.equal(compiled(*batch(5, 0)), model(*batch(5, 0)))
        assert torch.equal(compiled(*batch(6, 0)), model(*batch(6, 0)))
    assert counted.rewritten
    assert sum("there is one rank" in str(one.message) for one in caught) <= 1
    assert list(backend.full_state_dict(compiled)) == list(model.state_dict())


def test_explained() -> None:
    found = backend.explain(Breaking(), *batch(5, 0), topology=Topology(2, 2))
    assert (len(found.graphs), found.rewritten, len(found.breaks)) == (2, 2, 1)
    assert "backend_models.py" in found.breaks[0].location
    text = str(found)
    assert "2 graphs of Dynamo's: 2 with lookups that owners serve" in text
    assert "get_attr[target=tables.0.weight]" in text and "peer AlltoAll" in text and "flat -> sptt" in text
    with pytest.raises(PlanError, match="graph 0 has no stage 'modules'"):
        found.diff(0, after="modules")


def test_tied_weights_stay_on_every_rank() -> None:
    class Tied(Mlp):
        def forward(self, dense: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            rows = self.tables[0](x[:, 0])
            return rows @ self.tables[0].weight.t() + self.tables[1](x[:, 1]).sum(1, keepdim=True)

    (graph,) = backend.explain(Tied(), *batch(5, 0), topology=Topology(2, 2)).graphs
    assert "it is also used as a weight here" in graph.replicated["tables.0.weight"]
    assert [table.name for table in graph.lookups.tables] == ["tables.1"]


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_style_of_lookup_bit_for_bit(name: str) -> None:
    """Outputs and gradients, of one tower, and of the towers of a job that is to be run."""
    # Of one tower, a few stand for all.
    for topology in (Topology(2, 2), None)[: 1 + (name in ("bags", "chained", "renormed"))]:
        fresh()
        model, flat = CASES[name].build(), CASES[name].build()
        compiled = torch.compile(model, backend="dmt", options={"inner": "eager", "topology": topology})
        for step in range(2):
            args, kwargs = CASES[name].batch(5 + step, seed=step)
            found, expected = compiled(*args, **kwargs), flat(*args, **kwargs)
            assert all(torch.equal(a, b) for a, b in zip(tensors(found), tensors(expected), strict=True))
            loss(found).backward()
            loss(expected).backward()
        for mine, theirs in zip(model.parameters(), flat.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None) and torch.equal(mine, theirs)
            assert mine.grad is None or torch.equal(mine.grad.to_dense(), theirs.grad.to_dense())  # type: ignore[union-attr]
        assert counted.rewritten or name == "fields over time", "Dynamo leaves recurrent layers to Python"


def test_lookups_stand_tower_by_tower() -> None:
    found = []

    def keep(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        made = one_device_graph(module, Options.of({"topology": Topology(2, 1), "partition": "strided"}))
        found.append([str(node.args[1]) for node in made.graph.nodes if "embedding" in str(node.target)])
        return made

    fresh()
    torch.compile(seeded(), backend=keep, fullgraph=True)(*batch(5, 0))
    (tables,) = found
    places = [next(part for part in ("0", "1", "2", "bag") if f"_{part}_" in table) for table in tables]
    # Every second table is another tower's.
    assert places == ["0", "2", "1", "bag"]


WRITES = {
    "y += 1": lambda y, v: operator.iadd(y, 1),
    "y.__iadd__(1)": lambda y, v: y.__iadd__(1),
    "y.add_(1)": lambda y, v: y.add_(1),
    "y[:, 0] = 3": lambda y, v: y.__setitem__((slice(None), 0), 3),
    "torch.add(y, 1, out=y)": lambda y, v: torch.add(y, 1, out=y),
    "relu(y, inplace=True)": lambda y, v: nn.functional.relu(y, inplace=True),
    "v.mul_(2), a view": lambda y, v: v.mul_(2),
}


@pytest.mark.parametrize("write", WRITES)
def test_ids_that_are_written_to_between_lookups_are_refused(write: str) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 4)

        def forward(self, x: torch.Tensor, write: Any) -> torch.Tensor:
            y = x.clone()
            v = y[:, 0]
            first = self.table(v)
            write(y, v)
            return first + self.table(v)

    fresh()
    compiled = torch.compile(Writing(), backend="dmt", options={"inner": "eager"}, fullgraph=True)
    with pytest.raises(
        Exception, match=r"test_backend_one_device\.py:\d+\) writes to what the lookup of .* reads after another lookup"
    ):
        compiled(torch.arange(8).view(4, 2), WRITES[write])


def test_a_job_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    fresh()
    with pytest.raises(Exception, match=r"a job of 4 ranks \(WORLD_SIZE\), but there is no process group"):
        torch.compile(seeded(), backend="dmt")(*batch(5, 0))


def test_a_replicated_table_with_max_norm_is_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 4, max_norm=1.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x) @ self.table.weight.t()

    with pytest.raises(Exception, match="every rank would scale the rows of its own batch only") as caught:
        backend.explain(Tied(), torch.arange(5), topology=Topology(2, 2))
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), CaptureError)
