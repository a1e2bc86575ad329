"""Tracing that knows what the example inputs are made of, and the comparison of every graph with the model on them."""

from __future__ import annotations

import builtins
import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from models import line_of
from torch import nn
from torch.nn.utils import rnn

from dmt_compile import CaptureError, InputError, Topology, TowerProgram, towerize

TOPOLOGY = Topology(2, 2)
ROWS = (20, 30)
Inputs = tuple[Any, ...]


def matrix(batch: int, seed: int = 0) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    return (torch.stack([torch.randint(0, rows, (batch,), generator=g) for rows in ROWS], 1),)


def named(batch: int, seed: int = 0) -> Inputs:
    ids = matrix(batch, seed)[0]
    return ({"user": ids[:, 0], "item": ids[:, 1], "note": None, "more": [torch.rand(batch, 2), (torch.rand(batch),)]},)


class Two(nn.Module):
    """Two tables and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = (nn.Embedding(rows, 4) for rows in ROWS)
        self.out = nn.Linear(8, 1)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.user(x[:, 0]), self.item(x[:, 1])], 1)


def proved(model: nn.Module, make: Any = matrix, front_end: str = "torch.fx") -> TowerProgram:
    """Compiled and verified, and called with batches of several sizes the model itself."""
    program = towerize(model, TOPOLOGY, example_inputs=make(10))
    assert program._dmt.captured.front_end == front_end
    certificate = program.verify(*make(13, 1), steps=1)
    assert certificate.passed, str(certificate)
    for batch in (1, 2, 7):
        given = make(batch, batch)
        torch.testing.assert_close(program(*copy.deepcopy(given)), model(*given), rtol=0, atol=0)
    return program


# What is inside the inputs


class Loops(Two):
    """Goes through a dict whose values are tensors, lists and nothing; a part of it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Masked()

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        found = [getattr(self, key)(value) for key, value in batch.items() if key in ("user", "item")]
        rows = torch.cat(found, 1)
        if isinstance(batch["more"], list) and batch["note"] is None:
            rows = rows + batch["more"][1][0].unsqueeze(1)
        return {"score": self.out(self.part(rows)), "parts": [found[0], *batch["more"][:1]]}


class Masked(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if (rows > 100).any():
            return rows.clamp(max=100)
        return rows * 2


def test_dict_that_forward_goes_through() -> None:
    program = proved(Loops(), named)
    assert list(program.leaves) == ["part"]
    assert [lookup.feature for lookup in program.lookups.lookups] == ["batch['user']", "batch['item']"]
    with pytest.raises(InputError, match=r"batch\['note'\] is 3, not None"):
        program({**named(4)[0], "note": 3})


def test_arguments_with_stars() -> None:
    class Stars(Two):
        def forward(self, *columns: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
            found = [table(ids) for table, ids in zip((self.user, self.item), columns, strict=True)]
            return sum((value for value in more.values()), start=self.out(torch.cat(found, 1)))  # type: ignore[call-overload, no-any-return]

    def given(batch: int, seed: int = 0) -> Inputs:
        return tuple(matrix(batch, seed)[0].unbind(1))

    program = proved(Stars(), given)
    with pytest.raises(InputError, match="columns"):
        program(*given(5), torch.zeros(5))

    class Named(Two):
        def forward(self, **columns: torch.Tensor) -> torch.Tensor:
            return self.out(torch.cat([getattr(self, key)(value) for key, value in columns.items()], 1))

    ids = matrix(9)[0]
    program = towerize(Named(), TOPOLOGY, example_inputs={"user": ids[:, 0], "item": ids[:, 1]})
    assert program.verify(user=ids[:5, 0], item=ids[:5, 1]).passed


# What forward makes on its way


class Makes(Two):
    """Sizes that numpy holds, tensors made of the batch's sizes, a module made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = np.array([0, 1])
        self.starts = np.array([0, 3], dtype=np.int64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, last = self.columns
        rows = torch.cat([self.user(x[:, first]), self.item(x[:, last])], 1)
        places = torch.arange(x.shape[0], device=x.device).unsqueeze(1) + x.new_tensor(self.starts)
        total = torch.zeros(x.size(0), 1, device=x.device) + places.sum(1, keepdim=True)
        return nn.Sigmoid()(nn.Flatten()(self.out(rows))) + total


def test_what_forward_makes() -> None:
    program = proved(Makes())
    assert not program.leaves


def test_module_that_has_run() -> None:
    """It holds tensors of an autograd graph, as weight_norm does from the start."""

    class Keeps(Two):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.utils.weight_norm(self.out)
            self.loss = torch.zeros(())
            self.seen: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.rows(x)
            self.loss = rows.square().mean()
            self.seen = [rows]
            out: torch.Tensor = self.out(rows)
            return out + self.loss

    model = Keeps()
    proved(model)
    model(*matrix(4))
    held = model.loss
    program = proved(model)
    assert copy.deepcopy(program).verify(*matrix(8)).passed
    assert held.grad_fn is not None


class Notes(nn.Module):
    """Notes what it is given, and another part, which cannot be traced, asks what was noted."""

    length: Any = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.length = rows.shape[1]
        return rows * 2


class AsksNotes(nn.Module):
    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        width = self.notes(rows).shape[1]
        return rows + 1 if self.notes.length == width and rows.sum() < 1e9 else rows


def test_what_tracing_leaves_on_modules_is_forgotten() -> None:
    class Noting(Two):
        def __init__(self) -> None:
            super().__init__()
            self.notes = Notes()
            self.asks = AsksNotes(self.notes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.notes(self.rows(x))
            self.shown = {"rows": [rows]}
            return self.out(self.asks(rows))

    program = proved(Noting())
    assert list(program.leaves) == ["asks"]
    assert "shown" not in program._dmt.captured.root.__dict__


# A graph that does something else than the model is not taken


class Asks(Two):
    """A tensor is no tensor while it is traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.rows(x)
        return self.out(rows * 2 if isinstance(rows, torch.Tensor) else rows)


def test_test_of_a_type() -> None:
    proved(Asks(), front_end="torch.export")


class Remembers(Two):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.out(self.rows(x)) * self.calls


class Draws(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rows(x)) * random.random()


class Single(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.out(self.rows(x)).squeeze()
        if y.dim() == 0:
            y = y.unsqueeze(0)
        return y


class Writes(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.clamp_(0, 5)
        return self.out(self.rows(x))


@pytest.mark.parametrize(
    ("kind", "line", "why"),
    [
        (Remembers, "return self.out", "what forward remembers in attributes from call to call"),
        (Draws, "return self.out", "random numbers"),
        (Single, "squeeze()", "This is for a batch of one sample"),
        (Writes, "return self.out", "forward changes its inputs in place"),
    ],
)
def test_refused(kind: type[Two], line: str, why: str) -> None:
    with pytest.raises(CaptureError) as caught:
        towerize(kind(), TOPOLOGY, example_inputs=matrix(10))
    assert f"{__file__}:{line_of(kind.forward, line)}: " in str(caught.value) and why in str(caught.value)


def test_example_inputs_are_not_written_to() -> None:
    ids = torch.full((6, 2), 9)
    with pytest.raises(CaptureError):
        towerize(Writes(), TOPOLOGY, example_inputs=(ids,))
    assert bool((ids == 9).all())


def test_every_lookup_is_in_a_submodule_that_cannot_be_traced() -> None:
    class Inner(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.rows(x)
            return self.out(rows if rows.sum() > 0 else -rows)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    with pytest.raises(CaptureError, match="in submodules that cannot be traced") as caught:
        towerize(Outer(), TOPOLOGY, example_inputs=matrix(10))
    assert f"inner: {__file__}:{line_of(Inner.forward, 'rows.sum()')}: " in str(caught.value)


# Packed sequences, and the length of a tensor


def histories(batch: int, seed: int = 0) -> Inputs:
    """Items, histories padded to six with their lengths, one of which is six."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (batch,), generator=g)
    lengths[-1] = 6
    item, past = (torch.randint(0, 30, shape, generator=g) for shape in ((batch,), (batch, 6)))
    return ({"item": item, "past": past, "n": lengths},)


def order(values: torch.Tensor, largest: bool = True) -> Any:
    """Code beside the model's classes."""
    return torch.topk(values, k=len(values), largest=largest)


class Packs(nn.Module):
    """Sorts histories by length, packs them for recurrent layers, and puts the results back in order."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.gru, self.lstm = nn.Embedding(30, 4), nn.GRU(4, 4, batch_first=True), nn.LSTM(4, 4, batch_first=True)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        lengths, places = order(batch["n"])
        packed = rnn.pack_padded_sequence(self.item(batch["past"]).index_select(0, places), lengths.cpu(), batch_first=True)
        states, last = self.gru(packed)
        again, _ = self.lstm(states)
        padded, found = nn.utils.rnn.pad_packed_sequence(again, batch_first=True, total_length=6)
        back = order(places, False)[1]
        mean = (padded.sum(1) / found.to(padded.device).unsqueeze(1)).index_select(0, back)
        user = torch.cat([last[-1].index_select(0, back), mean], 1).view(len(batch["n"]), -1)
        return {"score": user[:, :4].mul(self.item(batch["item"])).sum(1), "states": again.data}


def test_packed_sequences_in_order_of_length() -> None:
    class ByRow(Packs):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            return super().forward(batch)["score"]

    program = proved(ByRow(), histories)
    assert not program.leaves and [x.feature for x in program.lookups.lookups] == ["batch['past']", "batch['item']"]
    program.eval()
    certificate = program.verify(*histories(11, 5), steps=1)
    assert certificate.passed, str(certificate)


def test_padding_to_the_longest_of_the_batch() -> None:
    """What one sample is added to depends on the others of its batch: a part of it may fail."""

    class Attends(Packs):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            packed = rnn.pack_padded_sequence(self.item(batch["past"]), batch["n"], batch_first=True, enforce_sorted=False)
            padded, _ = rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)
            mask = (batch["past"] > 0).unsqueeze(2)
            return padded.mul(mask).sum(1).mul(self.item(batch["item"])).sum(1)

    batch = histories(6)[0]
    batch["n"] = torch.tensor([2, 1, 3, 6, 1, 2])
    with pytest.raises(CaptureError, match=r"does not run on the first 3 of the 6 samples of example_inputs") as caught:
        towerize(Attends(), TOPOLOGY, example_inputs=(batch,))
    first, second = str(caught.value).split("\n")
    assert first.startswith(f"{__file__}:{line_of(Attends.forward, 'padded.mul')}: ")
    assert second.startswith(f"{__file__}:{line_of(Attends.forward, 'pad_packed')}: ") and second.endswith("total_length=")
    full = {**batch, "n": torch.full((6,), 6)}
    program = towerize(Attends(), TOPOLOGY, example_inputs=(full,))
    assert program.verify(full, steps=1).passed


def test_length_of_what_is_no_tensor_is_a_number() -> None:
    class Counts(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [self.user(x[:, 0]), self.item(x[:, 1])]
            widths = list(map(len, [(1, 2), parts, "abc", {"a": 1}]))
            return self.out(torch.cat(parts, len(parts) - 1)) / sum(widths) + torch.ones(len(x), 1) * len(x[0])

    proved(Counts())
    assert len.__module__ == "builtins"


def test_length_where_the_user_has_wrapped_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.fx.wrap("len") does at the top of a module."""

    class Sized(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.rows(x)) + torch.ones(len(x), 1)

    monkeypatch.setattr("torch.fx._symbolic_trace._wrapped_fns_to_patch", {(id(globals()), "len"): globals()})
    program = proved(Sized())
    assert [node.target for node in program.stages["flat"].graph.nodes if node.target is len]
    assert "len" not in globals()


def test_builtins_are_as_before() -> None:
    class Fails(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.rows(x)) if len(x) > 3 else self.rows(x)

    before = builtins.len
    with pytest.raises(CaptureError, match="len\\(x\\) > 3"):
        towerize(Fails(), TOPOLOGY, example_inputs=matrix(10))
    assert builtins.len is before


# Numbers of dimensions, and sizes that forward goes through


class Restores(Packs):
    """Leaves samples without a history out, and puts the results of the others in their places again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        there = batch["past"].gt(0).sum(1) > 0
        rows = self.item(batch["past"])[there]
        packed = rnn.pack_padded_sequence(rows, batch["n"][there].cpu(), batch_first=True, enforce_sorted=False)
        found = self.gru(packed)[1].squeeze(0)
        out = torch.zeros([there.size(0), *list(found.shape[1:])], device=found.device)
        out[there] = found
        parts = [part for part in (out, self.norm(self.item(batch["item"])), rows) if part.ndim == 2]
        first, *more = (part.view(*part.size()[:-1], 2, -1) if len(part.shape) < 3 else part for part in parts)
        return sum((first * part for part in more), start=first).sum(tuple(range(1, first.dim())))


def some_without(batch: int, seed: int = 0) -> Inputs:
    found = histories(batch, seed)[0]
    found["past"][1::4] = 0
    return (found,)


def test_sizes_that_forward_goes_through() -> None:
    program = proved(Restores(), some_without)
    for training in (True, False):
        program.train(training)
        certificate = program.verify(*some_without(9, 3), steps=1)
        assert certificate.passed, str(certificate)


def test_number_of_dimensions_of_what_cannot_be_run_twice() -> None:
    """Looking at a value changes nothing: no statistics, no rows under max_norm, no random numbers, no input."""

    class Looks(Two):
        def __init__(self) -> None:
            super().__init__()
            self.limited, self.norm = nn.Embedding(20, 8, max_norm=0.1), nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = nn.functional.dropout(self.norm(self.rows(x) + self.limited(x[:, 0])), 0.5, self.training)
            rows = rows.add_(1) if rows.dim() == 2 else rows.sum(1)
            return self.out(rows)

    model, state = Looks(), torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    program = towerize(model, TOPOLOGY, example_inputs=matrix(10))
    assert program._dmt.captured.front_end == "torch.fx"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(program.eval()(*matrix(13, 1)), model.eval()(*matrix(13, 1)), rtol=0, atol=1e-6)


def test_number_of_dimensions_that_depends_on_the_batch() -> None:
    class Squeezes(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.rows(x).squeeze()
            return self.out(rows if rows.ndim == 2 else rows.unsqueeze(0) * 2)

    with pytest.raises(CaptureError, match="for a batch of one sample"):
        towerize(Squeezes(), TOPOLOGY, example_inputs=matrix(10))


def test_writing_to_parts_of_a_tensor() -> None:
    class Fills(Two):
        """Into what it makes, and into what it has looked up."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, out = self.user(x[:, 0]), torch.zeros(x.shape[0], 8)
            out[:, :4] = first
            first[x[:, 1] > 15] = 0.5
            out[:, 4:] += self.item(x[:, 1]) * first
            return self.out(out)

    proved(Fills())

    class Overwrites(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x[x > 15] = 3
            return self.out(self.rows(x))

    with pytest.raises(CaptureError, match="forward changes its inputs in place"):
        towerize(Overwrites(), TOPOLOGY, example_inputs=matrix(10))
