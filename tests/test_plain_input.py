"""Batches and models with plain lookups that cannot be used: what is said, and by which error."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import line_of
from plain_models import BIG, CASES
from torch import nn

from dmt_compile import CaptureError, InputError, PlanError, Topology, TopologyError, TowerProgram, towerize
from dmt_compile.adapters.plain_ids import read_ids
from dmt_compile.errors import DmtError

GRID = Topology(2, 2)


def program(name: str) -> TowerProgram:
    return towerize(CASES[name].build(), GRID, example_inputs=CASES[name].example())


def refused(error: type[DmtError], pattern: str, name: str, *args: Any) -> None:
    """The batch is refused by verify and by simulate alike."""
    compiled = program(name)
    for run in (compiled.verify, compiled.simulate):
        with pytest.raises(error) as caught:
            run(*args)
        assert re.search(pattern, str(caught.value), re.DOTALL), str(caught.value)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.long)


# Batches


@pytest.mark.parametrize("bad", [-1, BIG, 2**40])
@pytest.mark.parametrize("place", [0, 6])
def test_an_id_outside_its_table(bad: int, place: int) -> None:
    ids = ones(7)
    ids[place] = bad
    refused(InputError, f"feature 'y' has id {bad}, outside its table of {BIG} rows", "functional", ones(7), ids)


def test_floats_as_ids() -> None:
    refused(InputError, r"'x' must hold integer ids, got torch\.float32", "functional", torch.ones(7), ones(7))
    refused(InputError, r"'x' must hold integer ids, got torch\.bool", "functional", ones(7).bool(), ones(7))


@pytest.mark.parametrize("shape", [(8, 8), (8, 3), (8,), (4, 2, 4), (4, 8)])
def test_another_number_of_ids(shape: tuple[int, ...]) -> None:
    """Also where the number of ids would fit other samples."""
    message = r"'x' has ids of shape \(.*the model was compiled for shape \(B, 4\) for B samples"
    refused(InputError, message, "field aware", ones(*shape))


@pytest.mark.parametrize("shape", [(8,), (4, 2, 4)])
def test_other_dimensions_of_any_number_of_ids(shape: tuple[int, ...]) -> None:
    message = r"'x' has ids of shape \([\d, ]*\), the model was compiled for shape \((any|B), any\) for B samples$"
    refused(InputError, message, "sequence only", ones(*shape))


def test_another_number_of_fields() -> None:
    source = next(source for source in program("one table").lookups.sources if len(source.features) == 4)
    message = (
        r" has ids of shape \(9, 3\), the model was compiled for shape \(B, 4\) for B samples: "
        "the last dimension holds 4 features, an id of a table of its own in each place$"
    )
    with pytest.raises(InputError, match=message):
        read_ids(ones(9, 3), (), source)


def _offsets(place: int, change: Any) -> tuple[Any, ...]:
    args = list(CASES["offsets"].batch(6)[0])
    args[place] = change(args[place])
    return tuple(args)


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (
            1,
            lambda x: torch.tensor([0, 3, 1, 4, 4, 5]),
            "offsets starts must start at 0, not decrease and end at the number of ids",
        ),
        (1, lambda x: x + 1, "offsets starts must start at 0"),
        (1, lambda x: x * 100, "offsets starts must start at 0"),
        (1, lambda x: x.float(), "offsets starts must be a 1-D tensor of int32 or int64"),
        (1, lambda x: x.unsqueeze(0), "offsets starts must be a 1-D tensor"),
        (4, lambda x: x + (x == x.max()) * 2, r"offsets bounds must start at 0.*in b"),
        (4, lambda x: x[:-1], "offsets bounds must start at 0|disagree on the batch size"),
        (2, lambda x: x[:-1], r"'a' has \d+ weights for \d+ ids"),
    ],
)
def test_offsets_that_do_not_fit(place: int, change: Any, message: str) -> None:
    refused(InputError, message, "offsets", *_offsets(place, change))


def test_stacked_offsets_that_do_not_fit() -> None:
    dense, offsets, ids = CASES["stacked offsets"].batch(6)[0]
    wrong = offsets.clone()
    wrong[1] += 1
    refused(InputError, r"offsets offsets\[1\] must start at 0.*in ids\[1\]", "stacked offsets", dense, wrong, ids)


def test_a_key_that_is_missing() -> None:
    (batch,), _ = CASES["history"].batch(6)
    without = {key: value for key, value in batch.items() if key != "history"}
    refused(InputError, r"has no batch\['history'\], which the model reads; there are 'item', 'user'", "history", without)
    # What the model does not read may be there.
    assert program("history").verify({**batch, "label": torch.ones(6)}, steps=0).passed


def test_one_id_in_every_bag_by_chance() -> None:
    """The example says nothing about the number of ids of other batches."""

    class Bagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.table = nn.EmbeddingBag(BIG, 2, mode="sum"), nn.Embedding(BIG, 2)

        def forward(self, ids: torch.Tensor, offsets: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.bag(ids, offsets) + self.table(x)

    model = Bagged()
    compiled = towerize(model, GRID, example_inputs=(torch.arange(6), torch.arange(6), ones(6)))
    more = (torch.arange(9) % BIG, torch.tensor([0, 2, 4, 7]), ones(4))
    assert torch.equal(compiled(*more), model(*more))
    certificate = compiled.verify(*more)
    assert certificate.passed, str(certificate)
    with pytest.raises(InputError, match="different numbers of samples: x 4, y 3"):
        program("functional")(ones(4), ones(3))


def test_inputs_of_different_sizes() -> None:
    refused(InputError, r"disagree on the batch size.*\(6,\): 6.*\(7,\): 7", "functional", ones(6), ones(7))


# Example inputs


@pytest.mark.parametrize(
    ("name", "example", "message"),
    [
        ("one table", None, r"rows that are not pooled: pass example_inputs=\(\.\.\.\), one batch as forward takes it"),
        ("one table", ones(3, 4), "must be a tuple of positional arguments or a dict of keyword arguments, got Tensor"),
        ("one table", (ones(0, 4),), "must hold at least one sample"),
        ("one table", (ones(3, 4), ones(3, 4)), "do not fit forward: .* takes no further positional argument"),
        (
            "history",
            {"item": ones(3), "user": ones(3), "history": ones(3, 5)},
            r"write \(batch,\) for a forward that takes one dict",
        ),
        ("functional", (ones(3),), "do not fit forward: missing argument 'y'"),
        ("functional", (ones(3) * 99, ones(3)), r"does not run on example_inputs: IndexError: index out of range"),
        ("functional", (torch.ones(3), ones(3)), "does not run on example_inputs: RuntimeError: Expected tensor for argument"),
    ],
)
def test_example_inputs_that_cannot_be_used(name: str, example: Any, message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        towerize(CASES[name].build(), GRID, example_inputs=example)
    assert re.search(message, str(caught.value)), str(caught.value)


def test_example_inputs_without_a_batch() -> None:
    with pytest.raises(InputError, match="hold no tensor with a batch dimension"):
        towerize(CASES["one table"].build(), GRID, example_inputs=())
    with pytest.raises(InputError, match=r"has no batch\['history'\]"):
        towerize(CASES["history"].build(), GRID, example_inputs=({"item": ones(3), "user": ones(3)},))


class Both(nn.Module):
    """An argument by position only, one by keyword only, and any others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Embedding(BIG, 2), nn.Embedding(BIG, 2), nn.Embedding(BIG, 2)

    def forward(self, x: torch.Tensor, /, *more: torch.Tensor, y: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(y) + self.c(more[0]) * self.c(named["z"])


def test_positional_and_keyword_arguments() -> None:
    args, kwargs = (ones(6), ones(6)), {"y": ones(6), "z": ones(6)}
    compiled = towerize(Both(), GRID, example_inputs=args, example_kwargs=kwargs)
    assert set(compiled.lookups.table) == {"a", "b", "c"}
    args, kwargs = (ones(9), ones(9)), {"y": ones(9), "z": ones(9)}
    certificate = compiled.verify(*args, **kwargs)
    assert certificate.passed, str(certificate)
    assert len(compiled.simulate(*args, **kwargs)) == 4
    with pytest.raises(CaptureError, match="example_inputs is a dict of keyword arguments"):
        towerize(Both(), GRID, example_inputs=kwargs, example_kwargs=kwargs)
    with pytest.raises(CaptureError, match="example_kwargs must be a dict"):
        towerize(Both(), GRID, example_inputs=args, example_kwargs=args)  # type: ignore[arg-type]


def test_example_inputs_change_nothing() -> None:
    """Not even where reading a table writes to it."""
    for name in ("renormed", "history"):
        model = CASES[name].build()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        state = torch.get_rng_state()
        towerize(model, GRID, example_inputs=CASES[name].example())
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert torch.equal(state, torch.get_rng_state())


def test_meta_device() -> None:
    """Tables without values can be planned; ids may have values, and must where offsets cut them or tell fields apart."""
    example = tuple(x.to("meta") for x in CASES["functional"].example())
    planned = towerize(CASES["functional"].build().to("meta"), GRID, example_inputs=example)
    assert planned.plan == program("functional").plan
    example = tuple(x.to("meta") for x in CASES["one table"].example())
    planned = towerize(CASES["one table"].build().to("meta"), GRID, example_inputs=example)
    assert set(planned.lookups.table) == {"embedding", "bias"}
    model = CASES["offsets"].build().to("meta")
    assert towerize(model, GRID, example_inputs=CASES["offsets"].example()).plan == program("offsets").plan
    with pytest.raises(InputError, match="offsets starts are on the meta device"):
        towerize(model, GRID, example_inputs=tuple(x.to("meta") for x in CASES["offsets"].example()))


# Models


class Integers(nn.Module):
    """A table of int8, quantised by hand, beside one of floats."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(10).view(5, 2).to(torch.int8), requires_grad=False)
        self.floats, self.top = (None if alone else nn.Embedding(5, 2)), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(x, self.codes).float() * 0.1
        return self.top(rows if self.floats is None else rows + self.floats(x))


def test_a_table_of_integers() -> None:
    compiled = towerize(Integers(alone=False), GRID, example_inputs=(ones(4),))
    assert [table.name for table in compiled.lookups.tables] == ["floats"]
    assert compiled.replicated["codes"].endswith("its table holds torch.int8")
    certificate = compiled.verify(ones(7))
    assert certificate.passed, str(certificate)
    with pytest.warns(UserWarning, match=r"none of .* can be served by another rank:\n  codes: .*torch\.int8"):
        alone = towerize(Integers(alone=True), GRID, example_inputs=(ones(4),))
    assert not alone.lookups.lookups and list(alone.replicated) == ["codes"]
    assert alone.verify(ones(7)).passed


@pytest.mark.filterwarnings("ignore")
def test_quantised_modules_are_no_lookups() -> None:
    model = nn.Sequential(torch.ao.nn.quantized.Embedding(20, 4))
    with pytest.raises(CaptureError, match="no embedding lookup was found"):
        towerize(model, GRID, example_inputs=(ones(4),))


def test_without_a_lookup() -> None:
    with pytest.raises(CaptureError, match="no embedding lookup was found"):
        towerize(nn.Linear(2, 1), GRID, example_inputs=(torch.ones(4, 2),))


class Propagates(nn.Module):
    """Rows of all users and items together, each mixed with its neighbours', then those of the batch."""

    def __init__(self, layers: nn.Module | None = None) -> None:
        super().__init__()
        self.user, self.item, self.scale = nn.Embedding(20, 4), nn.Embedding(30, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("neighbours", torch.rand(50, 50))
        self.layers = layers

    def rows(self) -> tuple[torch.Tensor, ...]:
        rows = torch.cat([self.user.weight, self.item.weight]) * self.scale
        rows = rows + self.neighbours @ rows
        return torch.split(rows, [20, 30])

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        all_users, all_items = self.rows()
        return (all_users[users] * self.pick(all_items, items)).sum(1)

    def pick(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return rows.index_select(0, ids)


class Looks(Propagates):
    """The same by a lookup function; torch.fx does not take it."""

    def pick(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        assert ids.dtype == torch.int64
        return nn.functional.embedding(ids, rows)


class Whole(Propagates):
    """A part that is given nothing, and that tracing keeps whole."""

    def rows(self) -> tuple[torch.Tensor, ...]:
        return self.layers(), self.item.weight.tanh()  # type: ignore[misc]


class Stored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Parameter(torch.rand(20, 4))

    def forward(self) -> torch.Tensor:
        return self.all.relu() if bool(self.all.sum() > 0) else self.all


@pytest.mark.parametrize(
    ("model", "read"),
    [(Propagates(), ("'user.weight', 'item.weight'",) * 2), (Looks(), ("'user.weight', 'item.weight'",) * 2),
     (Whole(Stored()), ("'layers.all'", "'item.weight'"))],
)  # fmt: skip
def test_rows_of_what_is_computed_from_whole_tables(model: Propagates, read: tuple[str, str]) -> None:
    lines = [line_of(Propagates.forward, "all_users[users]"), line_of(Propagates.pick, "return ")]
    if isinstance(model, Looks):
        # torch.export notes the lines of forward only.
        lines[1] = lines[0]
    with pytest.raises(CaptureError) as caught:
        towerize(model, GRID, example_inputs=(torch.arange(6), torch.arange(6)))
    text = str(caught.value)
    assert "read as a whole" in text
    for line, names in zip(lines, read, strict=True):
        assert f"  {__file__}:{line}: from all of {names}\n" in text, text


def test_rows_that_the_values_of_the_batch_do_not_choose() -> None:
    class Chooses(nn.Module):
        """Rows chosen by a constant and by sizes, and rows of the batch itself."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.places = nn.Parameter(torch.rand(4, 4)), nn.Parameter(torch.rand(9, 4))
            self.register_buffer("order", torch.tensor([2, 0, 1, 3]))

        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            places = self.places.tanh()
            x = x + places[: x.shape[1]].sum(0) + places[torch.arange(x.size(1))].sum(0) + places[len(x[0])]
            return (x @ (self.weight * 2)[self.order])[i]

    with pytest.raises(CaptureError, match="nor takes rows of a parameter by ids of the batch"):
        towerize(Chooses(), GRID, example_inputs=(torch.rand(6, 4), torch.arange(6) % 2))


def test_towers_that_do_not_fit() -> None:
    case = CASES["functional"]
    with pytest.raises(TopologyError, match="3 towers do not fit"):
        towerize(case.build(), GRID, towers=3, example_inputs=case.example())
    with pytest.raises(PlanError, match=r"names feature 'z', which the model does not look up; it has 'a', 'b@y', 'c', 'b@x'"):
        towerize(case.build(), GRID, towers=[["x", "z"], []], example_inputs=case.example())
    empty = towerize(case.build(), GRID, towers=[["x", "y"], []], example_inputs=case.example())
    assert empty.plan.towers[1].features == ()
    assert empty.verify(*case.batch(5)[0], steps=0).passed


def test_one_reason_for_one_table() -> None:
    """Every table that stays replicated says where and why."""
    reasons = {name: reason.partition(": ")[2] for name, reason in program("refusing").replicated.items()}
    assert reasons == {
        "scaled.weight": "it uses scale_grad_by_freq, so its gradient depends on which samples are on one rank",
        "position.weight": "its ids are of shape (3,) for any number of samples",
        "tied.weight": "it is also used as a weight here",
    }
    for reason in program("refusing").replicated.values():
        assert re.match(r".*plain_models\.py:\d+: ", reason)
