"""Models that symbolic tracing cannot take are captured by torch.export; forwards that read self.training have two programs."""

from __future__ import annotations

import copy
import functools
from typing import Any, ClassVar

import export_models
import pytest
import torch
import torch.nn.functional as F
from export_models import MODELS, DeepFm, Matrix, Modes, Named, Prediction, Result, given
from models import DENSE, line_of, plain_collection, torchrec_inputs
from torch import nn
from torchrec.distributed.test_utils.model_input import ModelInput
from torchrec.models.deepfm import SimpleDeepFMNNWrapper
from torchrec.models.dlrm import DLRMWrapper

from dmt_compile import CaptureError, InputError, Topology, TowerProgram, towerize
from dmt_compile.errors import source_location

EXAMPLE = 12
# More ranks than samples: some ranks get none. Some of the models cannot take an empty batch, compiled or not.
WIDE, NARROW = Topology(2, 3), Topology(2, 1)
NO_EMPTY = ("DeepFm", "Compressed", "Counting", "Stacked")
NORMS = ("Cross", "Modes")


def build(kind: type[Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind()


def compiled(kind: type[Any], topology: Topology = WIDE) -> TowerProgram:
    model = build(kind)
    return towerize(model, topology, example_inputs=given(model, EXAMPLE))


@functools.cache
def once(kind: type[Any]) -> tuple[nn.Module, TowerProgram]:
    """A model and its program, made by torch.export and shared by the tests of a style; compiling has left the model as it was."""

    def refuse(*args: Any) -> Any:
        raise CaptureError("not tried")

    model = build(kind)
    before = {name: list(module.__dict__) for name, module in model.named_modules()}
    tensors = {name: (id(value), value._version) for name, value in (*model.named_parameters(), *model.named_buffers())}
    spaces = set(vars(export_models))
    with pytest.MonkeyPatch.context() as patch:
        # Some of the models could be traced with the structure of their inputs.
        patch.setattr("dmt_compile.capture.attempts._capture_symbolically", refuse)
        program = towerize(model, WIDE, example_inputs=given(model, EXAMPLE))
    assert {name: list(module.__dict__) for name, module in model.named_modules()} == before
    assert {n: (id(v), v._version) for n, v in (*model.named_parameters(), *model.named_buffers())} == tensors
    assert set(vars(export_models)) == spaces, "len and int are put back"
    return model, program


def proved(program: TowerProgram, *batch: Any, steps: int = 1) -> None:
    certificate = program.verify(*batch, steps=steps)
    assert certificate.passed, str(certificate)


@pytest.mark.parametrize("kind", MODELS)
def test_every_style(kind: type[Any]) -> None:
    """The flat model's results in both modes, for batches of other sizes than the example's, more ranks than samples too."""
    model, program = once(kind)
    assert program._dmt.captured.front_end == "torch.export" and program.leaves == {}
    for training in (True, False):
        assert program.train(training) is program and program.training == training
        # In evaluation some ranks get no sample.
        few = not training and kind.__name__ not in NO_EMPTY
        proved(program, *given(model, 4 if few else 25, 1), steps=int(training))


@pytest.mark.parametrize("kind", MODELS)
def test_called_as_the_flat_model(kind: type[Any]) -> None:
    """Called directly: the flat model's outputs, types and effects on buffers, whatever the mode is switched to."""
    program, model = copy.deepcopy(once(kind)[1]), build(kind)
    for seed, training in enumerate((True, False, True)):
        program.train(training)
        model.train(training)
        batch = given(model, 9 + seed, seed)
        torch.manual_seed(7)
        expected = model(*copy.deepcopy(batch))
        torch.manual_seed(7)
        found = program(*batch)
        assert type(found) is type(expected)
        torch.testing.assert_close(_parts(found), _parts(expected), rtol=0, atol=0)
        for (name, mine), theirs in zip(program.named_buffers(), model.buffers(), strict=True):
            assert torch.equal(mine, theirs), name


def _parts(value: Any) -> Any:
    return [value.logits] if isinstance(value, Result) else value


@pytest.mark.parametrize("kind", MODELS)
def test_the_model_is_shared(kind: type[Any]) -> None:
    model, program = once(kind)
    assert list(program.state_dict()) == list(model.state_dict())
    mine, theirs = dict(program.named_parameters()), dict(model.named_parameters())
    assert list(mine) == list(theirs) and all(mine[name] is theirs[name] for name in mine)


@pytest.mark.parametrize("kind", MODELS)
def test_nodes_know_their_lines(kind: type[Any]) -> None:
    _, program = once(kind)
    calls = {output.node for output in program.lookups.outputs}
    for node in program.stages["flat"].graph.nodes:
        where = source_location(node)
        if node.name in calls or node.op == "get_attr":
            assert where is not None and where.startswith(f"{export_models.__file__}:"), node.format_node()


def test_lookups_are_named_as_the_user_writes_them() -> None:
    features = [lookup.feature for lookup in compiled(export_models.Nested).lookups.lookups]
    assert features == ["ids[0]", "ids[1][0]", "ids[1][1]", "ids[1][2]", "bags['tags']", "bags['words']"]
    features = [lookup.feature for lookup in compiled(export_models.Cross).lookups.lookups]
    assert features == ["x[:, 0]", "x[:, 1]", "x[:, 2]", "x[:, 3]"]


def test_layers_stay_whole() -> None:
    """Layers of torch.nn go on looking at their own mode, so dropout and batch norm need no second graph."""
    program = compiled(export_models.Cross)
    targets = {str(node.target) for node in program.stages["flat"].graph.nodes if node.op == "call_module"}
    assert {"tables.0", "norm", "top.0", "top.2"} <= targets
    assert program._dmt.captured.graphs[True] is program._dmt.captured.graphs[False]


def test_deepcopy() -> None:
    for kind in (DeepFm, Modes):
        program, model = compiled(kind, NARROW), build(kind)
        other = copy.deepcopy(program)
        assert {id(p) for p in other.parameters()}.isdisjoint(id(p) for p in program.parameters())
        with torch.no_grad():
            for parameter in program.parameters():
                parameter.zero_()
        for training in (True, False):
            proved(other.train(training), *given(model, 18))


# What such a program takes


def test_inputs_of_another_structure() -> None:
    program = compiled(export_models.ByKeys)
    (batch,) = given(build(export_models.ByKeys), 5)
    with pytest.raises(InputError, match=r"batch has \['age', 'c0', 'c1', 'c2', 'c3'\], not \['c0', 'c1', 'c2', 'c3', 'age'\]"):
        program({"age": batch["age"], **{f"c{i}": batch[f"c{i}"] for i in range(4)}})
    with pytest.raises(InputError, match=r"'batch\['c0'\]' is of shape \(5, 1\), the model was captured from \(any\)"):
        program({**batch, "c0": batch["c0"].unsqueeze(1)})
    program = compiled(export_models.Dataclasses)
    (rows,) = given(build(export_models.Dataclasses), 5)
    rows.scale = 2.0
    with pytest.raises(InputError, match=r"batch\['scale'\] is 2.0, not 0.5"):
        program(rows)
    rows.scale = 0.5
    with pytest.raises(InputError, match="labels is a tensor, not None"):
        program(rows, torch.rand(5))
    assert isinstance(compiled(Named)(*given(build(Named), 3)), Prediction)


# What torch.export cannot take either


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(10, 4), nn.Embedding(12, 4)
        self.out = nn.Linear(4, 1)


class Diverts(Base):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.sum() > 3:
            return self.out(self.a(x))
        return self.out(self.b(y))


class Counts(Base):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.out(self.a(x).unsqueeze(1).repeat(1, int(y.max()), 1).sum(1) + self.b(y))


class ByBatch(Base):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 5:
            return self.out(self.a(x))
        return self.out(self.b(y))


class Fixed(Base):
    """Sizes of two inputs are compared before one of them is decided about."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([self.a(x).unsqueeze(1), self.b(y).unsqueeze(1)], 1).sum(1)
        if rows.shape[0] * 2 != 18:
            return self.out(rows * 2)
        return self.out(rows)


class Loops(Base):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = [self.a(x[i]) for i in range(len(x))]
        return self.out(torch.stack(rows) + self.b(y))


def pair(batch: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(batch) % 10, torch.arange(batch) % 12


@pytest.mark.parametrize(
    "kind, text, why",
    [
        (Diverts, "if x.sum() > 3:", "depends on the values of tensors"),
        (ByBatch, "if x.shape[0] > 5:", "takes another way for batches that are not of 6 or more samples"),
        (Fixed, "if rows.shape[0] * 2 != 18:", "takes the batch size of 'x' for the constant 9"),
        (Loops, "for i in range(len(x))", "takes the batch size of 'x' for the constant 9"),
    ],
)
def test_refused_by_both(kind: type[Base], text: str, why: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError) as caught:
        towerize(kind(), NARROW, example_inputs=pair())
    traced, exported = str(caught.value).split("could not be exported with example_inputs either")
    place = f"{__file__}:{line_of(kind.forward, text)}: `"
    assert place in traced and place in exported and text in exported and why in exported
    assert "must not branch or loop on tensor values" in traced
    assert capfd.readouterr() == ("", "")


def test_without_example_inputs() -> None:
    with pytest.raises(CaptureError, match=r"With example_inputs=\(\.\.\.\) torch.export is tried as well"):
        towerize(build(DeepFm), NARROW)


class Hiding(nn.Module):
    """The lookup stands in a submodule that symbolic tracing would keep whole."""

    class Part(nn.Module):
        def __init__(self, functional: bool) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(10, 4)) if functional else nn.Embedding(10, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x.shape) == 1:
                x = x.unsqueeze(1)
            rows = F.embedding(x, self.table) if isinstance(self.table, nn.Parameter) else self.table(x)
            return rows.mean(1)

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.part, self.b, self.out = Hiding.Part(functional), nn.Embedding(12, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.out(self.part(x) + self.b(y))


@pytest.mark.parametrize("functional", [False, True])
def test_lookup_inside_a_submodule_that_cannot_be_traced(functional: bool) -> None:
    program = towerize(Hiding(functional), WIDE, example_inputs=pair())
    assert {table.parameter for table in program.lookups.tables} == {
        "part.table" if functional else "part.table.weight",
        "b.weight",
    }
    assert program.leaves == {}
    proved(program, *pair(20))


class Draws(Base):
    """Operators that draw random numbers, or write in place, before and after the lookups; a layer with a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.out.register_forward_hook(lambda _module, _args, output: output * 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert len(x.shape) == 1
        first = torch.rand(x.shape[0], 4)
        rows = self.a(x) + first
        first.mul_(0.5)
        other = self.b(y) * torch.rand_like(rows)
        other[:, 0] = 0
        return self.out(rows + F.dropout(other + first, 0.5, True)), torch.randn(x.size(0))


def test_random_numbers_and_writes_in_order() -> None:
    program = towerize(Draws(), WIDE, example_inputs=pair())
    proved(program, *pair(20))
    proved(program.eval(), *pair(4))


class Optional(Base):
    """An argument that is None: tracing would take it for a tensor."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        rows = self.a(x) * self.b(y)
        if mask is None:
            mask = torch.ones_like(x)
        return self.out(rows * mask.unsqueeze(1))


def test_argument_that_is_not_given() -> None:
    program = towerize(Optional(), WIDE, example_inputs=pair())
    proved(program, *pair(20))
    with pytest.raises(InputError, match="mask is a tensor, not None"):
        program(*pair(20), mask=torch.ones(20))
    proved(towerize(Optional(), WIDE, example_inputs=(*pair(), torch.ones(9))), *pair(20), torch.rand(20))


def test_packed_sequences() -> None:
    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.item, self.lstm = nn.Embedding(10, 4, padding_idx=0), nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            lengths = (x != 0).sum(1).clamp(min=1)
            packed = nn.utils.rnn.pack_padded_sequence(self.item(x), lengths, batch_first=True, enforce_sorted=False)
            return self.lstm(packed)[1][0][-1]

    ids = torch.arange(60).reshape(12, 5) % 7 % 5
    for _ in range(2):
        proved(towerize(Packs(), WIDE, example_inputs=(ids[:7],)), ids)
    # What tracing wraps is forgotten again.
    compiled(DeepFm)


# self.training beside a lookup


class Losses(Base):
    """Loss and prediction in training, the prediction in evaluation, and layers that only one of the modes uses."""

    def __init__(self) -> None:
        super().__init__()
        self.training_only, self.evaluation_only = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        rows = F.dropout(self.a(x) + self.b(y), 0.5, self.training)
        if self.training:
            return self.training_only(rows).square().mean(), self.out(rows)
        return self.out(rows) + self.evaluation_only(rows)


@pytest.mark.parametrize("start", [True, False])
def test_two_modes(start: bool) -> None:
    model = Losses().train(start)
    program = towerize(model, WIDE, example_inputs=pair())
    assert program.training == start and program._dmt.captured.front_end == "torch.fx"
    for training in (not start, start):
        program.train(training)
        proved(program, *pair(20))
        assert isinstance(program.simulate(*pair())[0], tuple) == training
        targets = {str(node.target) for node in program.stages["lowered"].graph.nodes}
        assert ("training_only" in targets) == training and ("evaluation_only" in targets) != training
        reference = copy.deepcopy(model).train(training)
        torch.manual_seed(1)
        expected = reference(*pair())
        torch.manual_seed(1)
        torch.testing.assert_close(program(*pair()), expected, rtol=0, atol=0)


def test_constants_of_two_modes() -> None:
    class Scaled(Base):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.out((self.a(x) + self.b(y)) * torch.tensor([1.0 if self.training else 2.0]))

    program = towerize(Scaled(), NARROW, example_inputs=pair())
    proved(program, *pair())
    proved(program.eval(), *pair())


# What forward keeps from one call to the next


class Remembers(Base):
    """Keeps hashed ids outside its modules, where no copy of the model has a copy of them; tracing stops before it sees that."""

    kept: ClassVar[dict[Any, torch.Tensor]] = {}

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.int64:
            raise ValueError("ids are whole numbers")
        return self.out(self.a(self.hashed(x)) + self.b(self.hashed(y)))

    def hashed(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class ByFunction(Remembers):
    def hashed(self, ids: torch.Tensor) -> torch.Tensor:
        return hash_codes(40)[ids]


@functools.lru_cache
def hash_codes(rows: int) -> torch.Tensor:
    return torch.arange(rows) * 7 % 10


class ByDict(Remembers):
    def hashed(self, ids: torch.Tensor) -> torch.Tensor:
        if self.training not in self.kept:
            self.kept[self.training] = torch.arange(40) * (3 if self.training else 7) % 10
        return self.kept[self.training][ids]


@pytest.mark.parametrize("kind", [ByFunction, ByDict])
def test_what_forward_remembers_has_values(kind: type[Remembers]) -> None:
    hash_codes.cache_clear()
    Remembers.kept.clear()
    model = build(kind)
    program = towerize(model, WIDE, example_inputs=pair())
    assert program._dmt.captured.front_end == "torch.export"
    for training in (True, False):
        model.train(training)
        proved(program.train(training), *pair(20))
        torch.testing.assert_close(program(*pair(7)), model(*pair(7)), rtol=0, atol=0)
    assert all(type(kept) is torch.Tensor for kept in (hash_codes(40), *Remembers.kept.values()))


class ByWay(Remembers):
    """Has a tensor that a call in which torch.export looks on has left."""

    def hashed(self, ids: torch.Tensor) -> torch.Tensor:
        key = torch.compiler.is_exporting()
        if key not in self.kept:
            self.kept[key] = torch.arange(40) * 7 % 10
        return self.kept[key][ids]


class ByValues(Remembers):
    def hashed(self, ids: torch.Tensor) -> torch.Tensor:
        if "ids" not in self.kept or not torch.equal(self.kept["ids"], ids):
            self.kept.update(ids=ids, codes=ids * 7 % 10)
        return self.kept["codes"]


@pytest.mark.parametrize(
    ("kind", "line", "why"),
    [
        (ByWay, "return self.kept[key]", "forward uses a tensor that it has kept outside the model from an earlier call"),
        (ByValues, "torch.equal", "looks at the values of tensors, and the graph would keep for ever what it saw"),
    ],
)
def test_constants_without_values(kind: type[Remembers], line: str, why: str) -> None:
    Remembers.kept.clear()
    with pytest.raises(CaptureError) as caught:
        towerize(build(kind), WIDE, example_inputs=pair())
    place = f"{__file__}:{line_of(kind.hashed, line)}: `"
    assert any(place in part and why in part for part in str(caught.value).split("\n")), str(caught.value)


def test_lookups_of_one_mode_only() -> None:
    class Either(Base):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.out(self.a(x)) if self.training else self.out(self.b(y))

    with pytest.raises(CaptureError, match="the lookup 'a' is not the same in training as in evaluation") as caught:
        towerize(Either(), NARROW, example_inputs=pair())
    assert f"{__file__}:{line_of(Either.forward, 'self.a(x)')}" in str(caught.value)


def test_table_that_one_mode_uses_as_a_weight() -> None:
    class Regularised(Base):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            found = self.out(self.a(x) + self.b(y))
            return found + self.b.weight.norm() if self.training else found

    program = towerize(Regularised(), WIDE, example_inputs=pair())
    assert list(program.replicated) == ["b.weight"] == list(program.eval().replicated)
    proved(program, *pair(20))
    proved(program.train(), *pair(20))


def test_modules_in_different_modes() -> None:
    class Part(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) if self.training else self.a(x) * 2

    class Whole(Matrix):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x).sum(-1)

    model = Whole()
    model.part.eval()
    with pytest.raises(CaptureError, match=r"call model.train\(\) or model.eval\(\) before it is compiled"):
        towerize(model, NARROW, example_inputs=pair()[:1])
    proved(towerize(model.eval(), NARROW, example_inputs=pair()[:1]), *pair()[:1])


@pytest.mark.parametrize("name", ["DLRMWrapper", "SimpleDeepFMNNWrapper"])
def test_torchrec_wrappers(name: str) -> None:
    """(loss, prediction) in training, the prediction in evaluation."""
    if name == "DLRMWrapper":
        model: nn.Module = DLRMWrapper(plain_collection(), DENSE, [8, 8], [8, 1])
    else:
        model = SimpleDeepFMNNWrapper(DENSE, plain_collection(), 8, 4)
    dense, sparse = torchrec_inputs(20, 1)
    program = towerize(model, WIDE)
    for training in (True, False):
        proved(program.train(training), ModelInput(dense, sparse, None, torch.rand(20)))


def test_certificate_names_what_differs() -> None:
    """A program of one mode does not pass for the other: the reference is the model's own forward."""
    program = towerize(Losses(), NARROW, example_inputs=pair())
    stages = program._dmt.stages
    object.__setattr__(program._dmt, "stages", {True: stages[True], False: stages[True]})
    assert not program.eval().verify(*pair()).passed
