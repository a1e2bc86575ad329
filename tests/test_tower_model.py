"""Tower modules on one device: every kind of interaction re-sized, by both front ends, and weights kept from a flat model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from interaction_models import DIM, ZOO, Entry
from torch import nn
from tower_models import CASES, Dot

from dmt_compile import CaptureError, CrossTower, DLRMTower, PassThrough, PlanError, Topology, TowerProgram, towerize
from dmt_compile.capture import attempts
from dmt_compile.towers.model import TowerModel
from dmt_compile.towers.preserve import largest

TWO = Topology(2, 1)
NARROW, ONE, SEVERAL, WIDER = DLRMTower(1, 0, 4), DLRMTower(0, 1, DIM), DLRMTower(0, 3, 5), DLRMTower(1, 0, DIM + 3)
SAME = DLRMTower(1, 0, DIM)
# No lookup makes a vector of several columns.
NONE = {"logistic regression"}
# Of tables of several widths, some together in a tower: no layer takes each vector by itself.
MIXED = {"concat-MLP of mixed widths", *(name for name in ZOO if name.startswith("projected vectors"))}
COMPILED = sorted(ZOO.keys() - NONE)
FEW = [
    "dot, bmm and tril_indices",
    "cross, low-rank, stacked",
    "deepfm",
    "multi-head attention",
    "fm in a loop",
    "din",
    "field-aware",
]
# What cannot be re-sized, by what stands in the way.
ONE_BY_ONE = {
    *("inner products in a loop", "outer products by unsqueeze", "fm by sum-square of a list", "fm in a loop"),
    *("afm, attention over pairs", "bilinear, one matrix for all", "bilinear, a layer for each field", "fibinet", "fields summed"),
    *("written into zeros", "field-aware", "a recurrent layer over the fields", "values of the fields", "nothing mixed"),
    *(name for name in MIXED if name.startswith("projected")),
}
TWO_LEFT = {"matrix factorisation", "element-wise product in an MLP", "nn.Bilinear of two"}
EXPANDED = {
    "narrow": {"written into zeros", "nn.Bilinear of two"},
    # Whether weights can be kept is tried with another number of vectors, and there is one.
    "wider": {"written into zeros", "nn.Bilinear of two", "history pooled by itself"},
    "several": ONE_BY_ONE
    | TWO_LEFT
    # Two heads, five columns; a single vector, whose size 1 torch takes for that of others.
    | {"multi-head attention", "transformer layer with a class token", "history pooled by itself"},
}


def compiled(entry: Entry, module: Any, model: nn.Module | None = None, **more: Any) -> TowerProgram:
    model = entry.build().eval() if model is None else model
    return towerize(model, TWO, example_inputs=entry.inputs(), tower_module=module, **more)


def made(program: TowerProgram) -> TowerModel:
    found = program._dmt.tower_model
    assert found is not None
    return found


# What takes the width itself into account: means and norms over columns, biases added to each, numbers of heads.
BY_WIDTH = {
    *(
        "cin by einsum and conv",
        "xdeepfm",
        "fibinet",
        "a mask from all vectors",
        "nothing mixed",
        "transformer layer with a class token",
    ),
    *("multi-head attention",),
}
WIDENED = sorted(set(COMPILED) - MIXED - BY_WIDTH)[::3]


def check_sizes(program: TowerProgram, module: DLRMTower, expanded: bool) -> None:
    assert (made(program).way == "expanded") == expanded, made(program).why
    assert bool(made(program).why) == expanded
    for record in made(program).vectors:
        assert (record.vectors, record.width) == (module.c * len(record.lookups) + module.p, module.dim)


@pytest.mark.parametrize(
    ("name", "label", "module"),
    [
        *((name, "narrow", NARROW) for name in sorted({*COMPILED} - {*WIDENED})),
        *((name, "several", SEVERAL) for name in COMPILED[::4]),
    ],
)
def test_resized(name: str, label: str, module: DLRMTower) -> None:
    entry = ZOO[name]
    model = entry.build().eval()
    if label == "narrow" and name in MIXED:
        with pytest.raises(PlanError, match=r"one layer to every feature, which must then be equally wide"):
            compiled(entry, module, model)
        return
    program = compiled(entry, module, model)
    check_sizes(program, module, name in EXPANDED[label])
    for batch in (1, 6):
        inputs = entry.inputs(batch)
        assert program(*inputs).shape == model(*inputs).shape


@pytest.mark.parametrize("name", [*FEW, "concat-MLP of mixed widths", "nothing mixed"])
def test_what_passes_through_changes_nothing(name: str) -> None:
    entry = ZOO[name]
    model = entry.build().eval()
    program = compiled(entry, PassThrough(), model)
    assert torch.equal(program(*entry.inputs()), model(*entry.inputs()))
    assert not made(program).resized


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("name", FEW)
def test_kept_where_nothing_is_compressed(name: str, expand: bool) -> None:
    entry = ZOO[name]
    model = entry.build().eval()
    program = compiled(entry, SAME, model, init="preserve", expand=expand)
    assert torch.equal(program(*entry.inputs()), model(*entry.inputs()))


@pytest.mark.parametrize("name", WIDENED)
def test_wider_vectors_compute_the_same(name: str) -> None:
    """Three columns of zeros more in every vector: any size that is wrong, or in the wrong place, shows in the result."""
    entry = ZOO[name]
    model = entry.build().eval()
    program = compiled(entry, WIDER, model, init="preserve")
    check_sizes(program, WIDER, name in EXPANDED["wider"])
    assert not made(program).redrawn
    for batch in (1, 6):
        inputs = entry.inputs(batch)
        torch.testing.assert_close(program(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise CaptureError("not now")

    monkeypatch.setattr(attempts, "_capture_symbolically", refuse)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("dot, bmm and tril_indices", NARROW),
        ("cross, low-rank, stacked", ONE),
        ("deepfm", ONE),
        ("multi-head attention", NARROW),
        ("xdeepfm", NARROW),
    ],
)
def test_both_front_ends(name: str, module: DLRMTower, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    traced = made(compiled(ZOO[name], module))
    request.getfixturevalue("exported")
    graph = compiled(ZOO[name], module)
    assert graph._dmt.captured.front_end == "torch.export"
    assert (made(graph).way, made(graph).resized) == (traced.way, traced.resized)


TORCHREC = {
    "DLRM": {
        "dense_arch.model._mlp.1._linear.weight": ((8, 8), (4, 8)),
        "dense_arch.model._mlp.1._linear.bias": ((8,), (4,)),
        "over_arch.model.0._mlp.0._linear.weight": ((8, 23), (8, 19)),
    },
    "DLRM_DCN": {
        "dense_arch.model._mlp.1._linear.weight": ((8, 8), (4, 8)),
        "dense_arch.model._mlp.1._linear.bias": ((8,), (4,)),
        **{f"inter_arch.crossnet.W_kernels.{i}": ((48, 4), (24, 4)) for i in range(2)},
        **{f"inter_arch.crossnet.V_kernels.{i}": ((4, 48), (4, 24)) for i in range(2)},
        **{f"inter_arch.crossnet.bias.{i}": ((48,), (24,)) for i in range(2)},
        "over_arch.model.0._mlp.0._linear.weight": ((8, 48), (8, 24)),
    },
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", TORCHREC)
def test_torchrec(name: str, given: bool) -> None:
    inputs = models.torchrec_inputs(5)
    program = towerize(models.torchrec_model(name), TWO, example_inputs=inputs if given else None, tower_module=NARROW)
    assert made(program).resized == TORCHREC[name]
    assert program(*inputs).shape == (5, 1)


@pytest.mark.parametrize("name", ["DLRM", "DLRM_Projection", "DLRM_DCN"])
def test_torchrec_models_keep_their_weights(name: str) -> None:
    inputs = models.torchrec_inputs(5)
    model = models.torchrec_model(name)
    program = towerize(model, TWO, example_inputs=inputs, tower_module=SAME, init="preserve")
    torch.testing.assert_close(program(*inputs), model(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(3))
def test_a_warm_start_keeps_the_largest_part_on_the_side_of_positive_columns(seed: int) -> None:
    """A sign is free for the vectors of lookups, but not for a dense vector that comes out of a ReLU."""
    rows = torch.randn(50, 6, generator=torch.Generator().manual_seed(seed)) @ torch.diag(torch.arange(1.0, 7))
    found = largest(rows, 3)
    torch.testing.assert_close(found @ found.mT, torch.eye(3))
    assert (found.sum(dim=1) >= 0).all()
    values = torch.linalg.svdvals(rows)
    torch.testing.assert_close((rows @ found.mT).square().sum(), values[:3].square().sum())


def test_inputs_in_a_dataclass() -> None:
    """A model that takes one `Batch` is re-sized like the model that takes its parts."""
    program = towerize(
        models.training_model("DLRM"), TWO, example_inputs=(models.torchrec_batch(5),), tower_module=NARROW, init="preserve"
    )
    assert made(program).why == ""
    assert made(program).resized == {f"model.{name}": shapes for name, shapes in TORCHREC["DLRM"].items()}
    loss, _ = program(models.torchrec_batch(4))
    loss.backward()
    assert math.isfinite(float(loss.detach()))


class ByHand(nn.Module):
    """A DLRM as the paper restructures it by hand: 2 towers, c = 1 and p = 1, vectors 4 wide."""

    def __init__(self, flat: nn.Module, program: TowerProgram) -> None:
        super().__init__()
        self.flat, self.root = flat, made(program).captured.root
        self.towers = [[int(name.rpartition(".")[2]) for name in tower.features] for tower in program.plan.towers]

    def forward(self, x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        rows = [table(x[:, i]) for i, table in enumerate(self.flat.tables)]
        d = self.root.bottom(d)
        found = [d]
        for number, fields in enumerate(self.towers):
            module = self.root.get_submodule(f"dmt_towers.{number}")
            found += [module.each(rows[i]) for i in sorted(fields)]
            found.append(module.together(torch.cat([rows[i] for i in sorted(fields)], dim=1)))
        t = torch.stack(found, dim=1)
        li, lj = torch.tril_indices(t.shape[1], t.shape[1], offset=-1)
        return self.root.top(torch.cat([d, (t @ t.mT)[:, li, lj]], dim=1))


def test_is_what_the_paper_does_by_hand() -> None:
    entry = ZOO["dot, bmm and tril_indices"]
    flat = entry.build().eval()
    program = compiled(entry, DLRMTower(1, 1, 4), flat)
    inputs = entry.inputs()
    assert made(program).resized["top.0.weight"] == ((6, DIM + 15), (6, 4 + 8 * 7 // 2))
    torch.testing.assert_close(program(*inputs), ByHand(flat, program)(*inputs))


# The flat model


def test_flat_model_is_untouched() -> None:
    entry = ZOO["deepfm"]
    model = entry.build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    program = compiled(entry, NARROW, model)
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    shared = {name for name, value in program.named_parameters() if any(value is mine for mine in model.parameters())}
    changed = set(made(program).resized)
    assert all(not name.startswith(("dmt_towers", "dmt_expansions")) for name in shared) and not shared & changed
    tables = {name for name in before if name.startswith("tables")}
    assert tables <= shared and list(program.state_dict())[: len(before)] == list(before)


def test_same_seed_same_weights() -> None:
    entry = ZOO["deepfm"]
    one, two, other = (compiled(entry, NARROW, seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], two[name]) for name in one)
    new = [name for name in one if name.startswith("dmt_towers")] + list(made(compiled(entry, NARROW)).resized)
    assert not any(torch.equal(one[name], other[name]) for name in new if one[name].dim() > 1)


def test_meta_device() -> None:
    entry = ZOO["cross, low-rank, stacked"]
    inputs = tuple(tensor.to("meta") for tensor in entry.inputs())
    program = towerize(entry.build().to("meta"), TWO, example_inputs=inputs, tower_module=NARROW)
    assert made(program).resized == made(compiled(entry, NARROW)).resized
    assert all(parameter.is_meta for parameter in program.parameters())


# Modules


class Scaled(nn.Module):
    def __init__(self, features: int, width: int, vectors: int = 0, made: int = 0) -> None:
        super().__init__()
        self.vectors, self.width = vectors or features, made or width
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_own_module_and_a_choice_for_each_tower() -> None:
    entry = ZOO["deepfm"]
    model = entry.build().eval()
    program = compiled(entry, {1: Scaled}, model)
    assert [record.passes for record in made(program).vectors] == [True, False]
    assert torch.equal(program(*entry.inputs()), model(*entry.inputs()))
    assert torch.equal(compiled(entry, Drops, model)(*entry.inputs()), model(*entry.inputs()))
    listed = compiled(entry, [CrossTower(DIM, 1, 3), DLRMTower(0, 2, DIM)])
    assert [record.vectors for record in made(listed).vectors] == [1, 2]


class Mixing(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Branching(Scaled):
    """Looks at all rows at once."""

    look: Callable[[torch.Tensor], Any] = staticmethod(torch.sum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if self.look(x) > 0 else -x


class BranchingByNumber(Branching):
    look = staticmethod(lambda x: len(x) - 2)


class BranchingBySize(Branching):
    look = staticmethod(lambda x: x.abs().max() - 50 if len(x) else 0)


class BranchingByLargest(Branching):
    look = staticmethod(lambda x: x.amax() - 10 if len(x) else 0)


class Drawing(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class Counting(Scaled):
    def __init__(self, features: int, width: int) -> None:
        super().__init__(features, width)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x * self.runs


class Drops(Scaled):
    """Random in training only, which is nothing against it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5, self.training)


class WithoutArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()


class Normed(Scaled):
    def __init__(self, features: int, width: int) -> None:
        super().__init__(features, width)
        self.norm = nn.BatchNorm1d(features)


class Summed(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0)


class Halved(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.half()


class Raising(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such thing")


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "c=p=0": (lambda: DLRMTower(0, 0, 8), r"makes no vectors at all"),
    "negative": (lambda: DLRMTower(-1, 0, 8), r"c must be a whole number, 0 or more, got -1"),
    "width": (lambda: DLRMTower(1, 0, 0), r"dim must be a whole number, 1 or more, got 0"),
    "rank": (lambda: CrossTower(8, 1, 0), r"rank must be a whole number"),
    "declares another width": (
        lambda: lambda f, w: Scaled(f, w, made=w + 1),
        r"declares \d vectors of width 9, so of .* it must make",
    ),
    "declares nothing": (lambda: lambda f, w: nn.Identity(), r"Identity must declare what it makes.*found None and None"),
    "no module": (lambda: lambda f, w: 3, r"a torch.nn.Module is needed, the factory made a int"),
    "no factory": (lambda: 3, r"must be a module or make one, got int"),
    "one module for all": (lambda: Scaled(2, 8), r"every tower needs one of its own"),
    "cannot be made": (
        lambda: lambda f, w: 1 / 0,
        r"cannot be made, it is called as f\(num_features, width\), here f\(\d, 8\): ZeroDivisionError",
    ),
    "takes no arguments": (lambda: WithoutArguments, r"it is called as f\(num_features, width\), .*: TypeError"),
    "text": (lambda: "dlrm:c=1,dim=8", r"is the text 'dlrm:c=1,dim=8': give DLRMTower\(\.\.\.\), .* or a dict of them by tower"),
    "texts": (lambda: ["dlrm", "dlrm"], r"must be a module or make one, got str: give DLRMTower"),
    "raises": (lambda: Raising, r"does not run on \(3, \d, 8\): ValueError: no such thing"),
    "batch mixed": (lambda: Mixing, r"depends on the other rows"),
    "branch on a sum": (lambda: Branching, r"depends on the other rows"),
    "branch on the number": (lambda: BranchingByNumber, r"depends on the other rows"),
    "branch on the size": (lambda: BranchingBySize, r"depends on the other rows"),
    "branch on the largest": (lambda: BranchingByLargest, r"depends on the other rows"),
    "random numbers": (lambda: Drawing, r"draws random numbers in evaluation mode"),
    "keeps a count": (lambda: Counting, r"run again on the same rows, in evaluation mode, it makes something else"),
    "batch statistics": (lambda: Normed, r"BatchNorm1d uses statistics of the batch"),
    "batch summed": (lambda: Summed, r"it made \(\d, 8\)"),
    "another type": (lambda: Halved, r"takes torch.float32 and returns torch.float16"),
    "too many": (lambda: [PassThrough()] * 3, r"lists 3 modules, the plan has 2 towers"),
    "no such tower": (lambda: {2: PassThrough()}, r"names tower 2, the plan has towers 0 to 1"),
    "widths of towers": (lambda: [DLRMTower(1, 0, 4), DLRMTower(1, 0, 5)], r"one width.*tower 0: 4, tower 1: 5: .*expand=True"),
    "passes through too wide": (lambda: {0: DLRMTower(1, 0, 4)}, r"tower 0: 4, tower 1: 8"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(PlanError, match=message) as caught:
        compiled(ZOO["deepfm"], make())
    if name not in ("c=p=0", "negative", "width", "rank", "one module for all", "too many", "no such tower", "text"):
        assert "tower 0" in str(caught.value)
    if name in ("declares nothing", "raises", "batch mixed", "batch statistics", "batch summed", "another type"):
        assert str(caught.value).startswith(f"{__file__}:")


class Norms(nn.Module):
    """Norms over the vectors, over all columns, and without parameters, before a first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, 6) for _ in range(4))
        self.each, self.bare = nn.LayerNorm(6), nn.LayerNorm((5, 6), elementwise_affine=False)
        self.bottom, self.all = nn.Linear(3, 6), nn.BatchNorm1d(30)
        self.top = nn.Sequential(nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        e = torch.stack([self.bottom(d), *(table(x[:, i]) for i, table in enumerate(self.tables))], dim=1)
        return self.top(self.all(self.bare(self.each(e)).reshape(-1, 30)))


@pytest.mark.parametrize(("module", "vectors", "width"), [(DLRMTower(1, 0, 4), 5, 4), (DLRMTower(0, 1, 6), 3, 6)])
def test_norms_over_the_vectors(module: DLRMTower, vectors: int, width: int) -> None:
    inputs = torch.randint(0, 9, (7, 4)), torch.randn(7, 3)
    program = towerize(Norms(), TWO, example_inputs=inputs, tower_module=module)
    root = made(program).captured.root
    assert made(program).way == "re-sized"
    assert tuple(root.each.weight.shape) == root.each.normalized_shape == (width,)
    assert root.bare.normalized_shape == (vectors, width)
    assert root.all.running_mean.shape == root.all.weight.shape == (root.all.num_features,) == (vectors * width,)
    assert (root.top[0].in_features, root.bottom.out_features) == (vectors * width, width)
    assert program(*inputs).shape == (7, 1)


class Equal(nn.Module):
    """As many features as columns, and as many experts."""

    def __init__(self, width: int, *, mixed: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, width) for _ in range(4))
        self.width, self.mixed = width, mixed
        self.experts, self.gate = nn.Parameter(torch.randn(4, width, 5)), nn.Linear(4 * width, 4)
        self.top = nn.Linear(4 * 5 + 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = torch.cat([table(x[:, i]) for i, table in enumerate(self.tables)], dim=1)
        e = flat.view(-1, 4, self.width)
        shared = e.mean(1).unsqueeze(1).expand(-1, 4, -1)
        made = torch.einsum("bew,ewk->bek", shared, self.experts) * self.gate(flat).unsqueeze(-1)
        if self.mixed:
            # No label says which of the two is which here.
            e = ((e @ e.mT).softmax(-1) @ e).flatten(1).view(-1, 4, 4)
        i, j = torch.triu_indices(4, 4, 1)
        return self.top(torch.cat([made.flatten(1), (e @ e.mT)[:, i, j]], dim=1))


@pytest.mark.parametrize("width", [4, 6])
def test_sizes_that_are_equal_by_chance(width: int) -> None:
    inputs = (torch.randint(0, 9, (7, 4)),)
    program = towerize(Equal(width), TWO, example_inputs=inputs, tower_module=DLRMTower(1, 0, 2))
    assert made(program).way == "re-sized"
    assert made(program).resized == {
        "experts": ((4, width, 5), (4, 2, 5)),
        "gate.weight": ((4, 4 * width), (4, 8)),
    }
    model = Equal(width).eval()
    wider = towerize(model, TWO, example_inputs=inputs, tower_module=DLRMTower(1, 0, width + 3), init="preserve").eval()
    assert made(wider).way in ("re-sized", "expanded")
    torch.testing.assert_close(wider(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)


def test_what_could_mean_either_is_expanded() -> None:
    inputs = (torch.randint(0, 9, (7, 4)),)
    program = towerize(Equal(4, mixed=True), TWO, example_inputs=inputs, tower_module=DLRMTower(1, 0, 2))
    assert made(program).way == "expanded" and "numbers that are alike" in made(program).why


class Between(nn.Module):
    """The dense vector among those of the features, two layers over them that share their weight, and norms with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, 6) for _ in range(4))
        self.bottom, self.norm = nn.Linear(3, 6), nn.BatchNorm1d(30)
        self.a, self.b, self.top = nn.Linear(30, 5), nn.Linear(30, 5), nn.Linear(10, 1)
        self.b.weight = self.a.weight
        self.scaled = torch.nn.utils.parametrizations.weight_norm(nn.Linear(30, 2))

    def forward(self, x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        e = [table(x[:, i]) for i, table in enumerate(self.tables)]
        flat = self.norm(torch.cat([e[0], e[1], self.bottom(d), e[2], e[3]], dim=1))
        return self.top(torch.cat([self.a(flat), self.b(flat)], dim=1).relu()) + self.scaled(flat).sum(1, keepdim=True)


@pytest.mark.parametrize(("module", "exact"), [(DLRMTower(1, 0, 6), True), (DLRMTower(1, 0, 9), True), (DLRMTower(1, 0, 4), False)])
def test_dense_vector_between_the_others(module: DLRMTower, exact: bool) -> None:
    inputs = torch.randint(0, 9, (7, 4)), torch.randn(7, 3)
    model = Between()
    model(*inputs)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    program = towerize(model, TWO, example_inputs=inputs, tower_module=module, init="preserve").eval()
    if exact:
        torch.testing.assert_close(program(*inputs), model.eval()(*inputs), rtol=1e-4, atol=1e-4)
    drawn = towerize(model, TWO, example_inputs=inputs, tower_module=module)
    assert all(value.isfinite().all() and value.abs().max() < 1e3 for value in drawn.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_refused_options() -> None:
    entry = ZOO["deepfm"]
    with pytest.raises(PlanError, match="init must be 'layer' or 'preserve'"):
        compiled(entry, NARROW, init="svd")
    with pytest.raises(PlanError, match="give tower_module="):
        towerize(entry.build(), TWO, example_inputs=entry.inputs(), expand=True)
    with pytest.raises(PlanError, match=r"Scaled of tower 0 has no method set_linear"):
        compiled(entry, Scaled, init="preserve")
    with pytest.raises(PlanError, match="give example_inputs="):
        towerize(models.torchrec_model("DLRM"), TWO, tower_module=NARROW, init="preserve")
    with pytest.raises(PlanError, match="no lookup of the model makes one vector per sample"):
        compiled(ZOO["logistic regression"], NARROW)


class Own(nn.Module):
    """Of the user's own, set as they write it."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.vectors, self.width = features, 4
        self.layer = nn.Linear(features * width, features * 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x.flatten(1))
        return made.view(-1, self.vectors, self.width)

    def set_linear(self, matrix: torch.Tensor) -> None:
        self.layer.weight.copy_(matrix)
        self.layer.bias.zero_()


class Nothing(Own):
    def set_linear(self, matrix: torch.Tensor) -> None:
        pass


class OtherRows(Own):
    def set_linear(self, matrix: torch.Tensor) -> None:
        super().set_linear(matrix.roll(1, 0))


class KeepsItsBias(Own):
    def set_linear(self, matrix: torch.Tensor) -> None:
        self.layer.weight.copy_(matrix)


class Turned(Own):
    def set_linear(self, matrix: torch.Tensor) -> None:
        super().set_linear(matrix.mT)


class Half(Own):
    def set_linear(self, matrix: torch.Tensor) -> None:
        super().set_linear(matrix.half().float())


@pytest.mark.parametrize("expand", [False, True])
def test_what_set_linear_sets_is_tried(expand: bool) -> None:
    entry = ZOO["deepfm"]
    for wrong in (Nothing, OtherRows, KeepsItsBias):
        with pytest.raises(
            PlanError, match=rf"set_linear of {wrong.__name__}, tower 0 \(.*\) did not make it compute matrix @ x"
        ) as e:
            compiled(entry, wrong, init="preserve", expand=expand)
        assert "a row for each of the" in str(e.value) and "as in nn.Linear.weight" in str(e.value)
    with pytest.raises(
        PlanError, match=r"set_linear of Turned, tower 0 .*, raises RuntimeError: .* The matrix is \((12|8), (24|16)\):"
    ) as e:
        compiled(entry, Turned, init="preserve", expand=expand)
    assert isinstance(e.value.__cause__, RuntimeError)
    with pytest.raises(PlanError, match=r"set_linear of DLRMTowerLayer, tower 0 .* with c=1 and p=0, or with c=0, only"):
        compiled(entry, DLRMTower(2, 0, 4), init="preserve", expand=expand)
    made, its = (compiled(entry, module, init="preserve", expand=expand) for module in (Own, NARROW))
    torch.testing.assert_close(made(*entry.inputs()), its(*entry.inputs()))
    compiled(entry, Half, init="preserve", expand=expand)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("module", [NARROW, ONE, CrossTower(DIM, 2, 3), Own])
def test_a_warm_start_in_other_types(dtype: torch.dtype, module: Any) -> None:
    entry = ZOO["concat-MLP"] if "concat-MLP" in ZOO else ZOO["deepfm"]
    inputs = tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in entry.inputs())
    program = towerize(entry.build().to(dtype), TWO, example_inputs=inputs, tower_module=module, init="preserve")
    assert made(program).kept


def test_cross_tower_is_torchrecs_cross_network() -> None:
    from torchrec.modules.crossnet import LowRankCrossNet

    torch.manual_seed(0)
    mine, theirs = CrossTower(7, 2, 3)(4, 5), LowRankCrossNet(20, 2, 3)
    with torch.no_grad():
        for layer in range(2):
            mine.down[layer].weight.copy_(theirs.V_kernels[layer])
            mine.up[layer].weight.copy_(theirs.W_kernels[layer])
            mine.up[layer].bias.copy_(theirs.bias[layer])
    x = torch.randn(6, 4, 5)
    torch.testing.assert_close(mine(x).flatten(1), mine.out(theirs(x.flatten(1))))


class KeptList(Dot):
    """A buffer says which products are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.tril_indices(6, 6, offset=-1))

    def forward(self, x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(d)
        vectors = torch.stack([dense] + [table(x[:, i]) for i, table in enumerate(self.tables)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return self.top(torch.cat([dense, products[:, self.kept[0], self.kept[1]]], dim=1))


def test_what_the_summary_says() -> None:
    entry = ZOO["deepfm"]
    text = " ".join(str(compiled(entry, NARROW)).split())
    assert "40 columns become 20 before they cross hosts, ratio 2.00" in text and "their layers drawn anew" in text
    assert "with the flat model's weights as far as they can be kept" in " ".join(
        str(compiled(entry, NARROW, init="preserve")).split()
    )
    case = CASES["dot"]
    dot = " ".join(str(towerize(KeptList(), TWO, example_inputs=case.inputs(6, 7), tower_module=ONE)).split())
    assert "re-sized: 1 tensor of other shapes, their layers drawn anew; 1 index list for the new sizes" in dot
    assert "as it is: nothing changes its shape" in str(compiled(entry, PassThrough()))
    assert repr(made(compiled(entry, NARROW))).startswith("TowerModel(re-sized, 2 towers: ")
    assert "expanded behind the exchange, the interaction stays: it was asked for" in str(compiled(entry, NARROW, expand=True))


def test_a_program_that_is_left_flat_has_no_towers() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.Embedding(9, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.items(x).mean(1) @ self.items.weight.T

    with pytest.warns(UserWarning), pytest.raises(PlanError, match="none of the model's tables is spread"):
        towerize(Tied(), TWO, example_inputs=(torch.randint(0, 9, (6, 3)),), tower_module=NARROW)
