"""``torch.compile(model, backend="dmt")`` on ranks: models and uses in which graphs, ranks or modes are not all alike."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from backend_models import Breaking, batch, fresh, loss, seeded
from ranks import Ranks
from torch import nn

from dmt_compile import CaptureError, DistributedError, Topology, backend
from dmt_compile.backend.staging import counted

STEPS = 3


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(12, 4), nn.Embedding(12, 4)
        self.top, self.other = nn.Linear(4, 1), nn.Linear(4, 1)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.two(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.rows(x))


class UsedBefore(Base):
    """A table that one graph uses as a weight, and the next one looks up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.one.weight.mean()
        torch._dynamo.graph_break()
        return self.top(self.rows(x)) + mean


class Tied(Base):
    """A table that is also the output layer, in training only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.rows(x)
        return rows @ self.one.weight.t() if self.training else self.top(rows)


class Branching(Base):
    """Other layers for large batches than for small ones: ranks compile graphs of other parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.rows(x)) if x.shape[0] > 4 else self.other(self.rows(x))


class Autocast(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.rows(x)
        with torch.autocast("cpu", torch.bfloat16):
            found = self.top(rows)
        with torch.autocast("cpu", enabled=False):
            return self.other(rows) + found.float()


class Counting(Base):
    """Remembers something on itself; with a child that is called as an attribute of every module is."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.top(self.rows(x))


class TablesOnly(Base):
    """Of large batches, a loss that reaches tables alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.rows(x)
        return rows.sum(1, keepdim=True) if x.shape[0] > 4 else self.top(rows)


class Sliced(Base):
    """Ids that are whole numbers all the way may cross autocast: it does not change them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None]
        with torch.autocast("cpu", torch.bfloat16):
            rows = self.other(self.one(x[:, 0]))
        return rows + self.top(self.two(x[:, 0] * 1))


class Buffers(Base):
    """Buffers that transports do not know, or that cannot be written to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor([dist.get_rank() + 1 if dist.is_initialized() else 1], dtype=torch.int16))
        self.register_buffer("repeated", torch.rand(1).expand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.rows(x) * self.repeated) * self.factor


KINDS = [UsedBefore, Tied, Branching, Autocast, Counting, TablesOnly, Sliced, Buffers]


def ids(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 12, (size,), generator=torch.Generator().manual_seed(seed))


def train(kind: type[Base], inner: str) -> tuple[float, float]:
    """Runs on a rank: how far outputs, in training and evaluation, and the state are from one process's."""
    fresh()
    # Every rank draws other weights; all begin with those of rank 0.
    torch.manual_seed(dist.get_rank())
    model = kind()
    torch.manual_seed(0)
    flat = kind()
    if kind is Buffers:
        flat.factor.fill_(1)
        flat.repeated = flat.repeated.clone()
    compiled = torch.compile(model, backend="dmt", options={"topology": Topology(2, 1), "inner": inner})
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, flat)]
    worst = 0.0
    for step in range(STEPS):
        given = [ids(3 + (2 * step + 3 * rank) % 5, 10 * step + rank) for rank in range(2)]
        for one in (*optimizers, compiled.train(), flat.train()):
            one.zero_grad()
        found, expected = compiled(given[dist.get_rank()]), [flat(one) for one in given]
        worst = max(worst, float((found - expected[dist.get_rank()]).detach().abs().max()))
        loss(found).backward()
        (torch.stack([loss(one) for one in expected]).sum() / 2).backward()
        for one in optimizers:
            one.step()
        with torch.no_grad():
            apart = compiled.eval()(given[dist.get_rank()]) - flat.eval()(given[dist.get_rank()])
        worst = max(worst, float(apart.abs().max()))
    state = backend.full_state_dict(compiled)
    return worst, max(float((state[key] - value).abs().max()) for key, value in flat.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_one_process(ranks: Ranks, kind: type[Base]) -> None:
    for worst, apart in ranks(2, train, kind, "eager"):
        # Sums over samples in another order; bfloat16 keeps 8 bits.
        tolerance = 2e-2 if kind in (Autocast, Sliced) else 2e-6
        assert worst <= tolerance and apart <= tolerance


def refusals() -> list[str]:
    """Runs on a rank: the errors of models that cannot be served, each on its own."""

    class Reversed(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.rows(x)
            torch._dynamo.graph_break()
            return self.top(rows) + self.one.weight.mean()

    class Inferring(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                rows = self.one(x)
            return self.top(rows.clone() + self.two(x))

    class Weighted(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = torch.ones(len(x), 1, dtype=torch.float64)
            return nn.functional.embedding_bag(x[:, None], self.one.weight, mode="sum", per_sample_weights=weights)

    found = []
    for kind in (Reversed, Inferring, Weighted):
        fresh()
        try:
            torch.compile(kind(), backend="dmt", options={"topology": Topology(2, 1), "inner": "eager"})(ids(4, 0))
            found.append("")
        except Exception as error:
            found.append(str(error))
    return found


def test_refused(ranks: Ranks) -> None:
    for reverse, inferring, weighted in ranks(2, refusals):
        assert "is looked up in one graph and used otherwise in another" in reverse
        assert "looks a table up under inference_mode" in inferring and "test_backend_kinds.py:" in inferring
        assert "float64" in weighted


def replaced() -> list[bool]:
    """Runs on a rank: whether ranks have the same values and gradients, of a layer that was exchanged, and of new tables."""
    fresh()
    model = Base()
    compiled = torch.compile(model, backend="dmt", options={"topology": Topology(2, 1), "inner": "eager"})
    loss(compiled(ids(4, 0))).backward()
    torch.manual_seed(dist.get_rank())
    model.top = nn.Linear(4, 1)
    model.load_state_dict({**model.state_dict(), "one.weight": torch.randn(12, 4), "two.weight": torch.randn(12, 4)}, assign=True)
    given = [ids(4, rank) for rank in range(2)]
    loss(compiled(given[dist.get_rank()])).backward()
    state = backend.full_state_dict(compiled)
    flat = Base()
    flat.load_state_dict(state)
    (torch.stack([loss(flat(one)) for one in given]).sum() / 2).backward()
    pairs = [(mine.grad, theirs.grad) for mine, theirs in zip(model.parameters(), flat.parameters(), strict=True)]
    return [torch.allclose(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]


def test_parameters_that_are_put_in_the_place_of_others(ranks: Ranks) -> None:
    mine, theirs = ranks(2, replaced)
    # A table, and the layer; other parameters get no gradients at all.
    assert mine == theirs == [True, True, True]


def ensemble() -> list[float]:
    """Runs on a rank: how far two models of one class, which share a graph, are from one process's training."""
    fresh()
    torch.manual_seed(dist.get_rank())
    models = [Base(), Base()]
    torch.manual_seed(0)
    flats = [Base(), Base()]
    options = {"topology": Topology(2, 1), "inner": "eager", "free_unowned": True}
    compiled = [torch.compile(model, backend="dmt", options=options) for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (*models, *flats)]
    for step in range(STEPS):
        given = [ids(4, 10 * step + rank) for rank in range(2)]
        for one in optimizers:
            one.zero_grad()
        for mine, flat in zip(compiled, flats, strict=True):
            loss(mine(given[dist.get_rank()])).backward()
            (torch.stack([loss(flat(one)) for one in given]).sum() / 2).backward()
        for one in optimizers:
            one.step()
    found = []
    for mine, flat in zip(compiled, flats, strict=True):
        state = backend.full_state_dict(mine)
        found.append(max(float((state[key] - value).abs().max()) for key, value in flat.state_dict().items()))
    return found


def test_models_of_one_class(ranks: Ranks) -> None:
    assert all(apart <= 2e-6 for found in ranks(2, ensemble) for apart in found)


def functional() -> list[float]:
    """Runs on a rank: how far gradients are from one process's, of a function over parameters of its own."""
    fresh()
    torch.manual_seed(0)
    table, weight = nn.Parameter(torch.randn(12, 4)), nn.Parameter(torch.randn(4, 1))
    flat = [nn.Parameter(one.detach().clone()) for one in (table, weight)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, table) @ weight

    compiled = torch.compile(forward, backend="dmt", options={"topology": Topology(2, 1), "inner": "eager"})
    loss(compiled(ids(4, dist.get_rank()))).backward()
    terms = [loss(nn.functional.embedding(ids(4, rank), flat[0]) @ flat[1]) for rank in range(2)]
    (torch.stack(terms).sum() / 2).backward()
    pairs = [(mine.grad, theirs.grad) for mine, theirs in zip((table, weight), flat, strict=True)]
    return [float((mine - theirs).abs().max()) for mine, theirs in pairs if mine is not None and theirs is not None]


def test_parameters_of_a_function(ranks: Ranks) -> None:
    owner, other = ranks(2, functional)
    # The table's gradient is its owner's only.
    assert sorted(map(len, (owner, other))) == [1, 2] and max(owner + other) <= 1e-6


def nested() -> list[bool]:
    """Runs on a rank: whether two models, one under a reentrant checkpoint, have the same gradients on both."""
    fresh()
    models = [Base(), Base()]
    options = {"topology": Topology(2, 1), "inner": "eager"}
    one, other = (torch.compile(model, backend="dmt", options=options) for model in models)
    x, carrier = ids(4, dist.get_rank()), torch.ones(1, requires_grad=True)
    again = torch.utils.checkpoint.checkpoint(lambda unit: other(x) * unit, carrier, use_reentrant=True)
    (loss(one(x)) + loss(again)).backward()
    told: list[Any] = [None, None]
    dist.all_gather_object(told, [model.top.weight.grad for model in models])
    return [torch.equal(mine, theirs) for mine, theirs in zip(*told, strict=True)]


def test_a_backward_inside_another(ranks: Ranks) -> None:
    assert ranks(2, nested) == [[True, True]] * 2


def arguments() -> list[float]:
    """Runs on a rank: a parameter that is given to forward stays the rank's own."""
    fresh()

    class Scaling(Base):
        def forward(self, x: torch.Tensor, scale: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.top(self.rows(x) * scale) * more["scale"]

    given = [nn.Parameter(torch.full((1,), float(dist.get_rank() + factor))) for factor in (1, 5)]
    compiled = torch.compile(Scaling(), backend="dmt", options={"topology": Topology(2, 1), "inner": "eager"})
    loss(compiled(ids(4, 0), given[0], {"scale": given[1]})).backward()
    return [float(one.detach()) for one in given]


def test_parameters_among_the_arguments(ranks: Ranks) -> None:
    assert ranks(2, arguments) == [[1.0, 5.0], [2.0, 6.0]]


def freed() -> dict[str, Any]:
    """Runs on a rank: what can be done with tables whose memory was given back."""
    fresh()
    torch.manual_seed(0)
    both = torch.randn(24, 4)
    model = Base()
    model.one, model.two = (nn.Embedding.from_pretrained(part, freeze=False) for part in both.split(12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # Gradients that are there before would be applied to a table that is not.
    loss(model(ids(4, 0))).backward()
    optimizer.zero_grad(set_to_none=False)
    options = {"topology": Topology(2, 1), "inner": "aot_eager", "free_unowned": True}
    compiled = torch.compile(model, backend="dmt", options=options)
    for step in range(2):
        optimizer.zero_grad(set_to_none=False)
        loss(compiled(ids(4, step))).backward()
        optimizer.step()
    lost = [name for name, p in model.named_parameters() if p.untyped_storage().nbytes() < p.numel() * p.element_size()]
    state = backend.full_state_dict(compiled)
    copied = copy.deepcopy(model)
    torch.save(model.state_dict(), file := io.BytesIO())
    file.seek(0)
    saved = torch.load(file)
    try:
        model.load_state_dict(state)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    backend.load_full_state_dict(compiled, {key: value + 1 for key, value in state.items()})
    again = backend.full_state_dict(compiled)
    return {
        "lost": lost,
        "finite": all(bool(value.isfinite().all()) for value in state.values()),
        "no numbers": [key for key, value in saved.items() if bool(value.isnan().all())],
        "copied": bool(copied.get_parameter(lost[0]).isnan().all()),
        "refused": refused,
        "loaded": all(torch.equal(again[key], value + 1) for key, value in state.items()),
    }


def test_tables_whose_memory_was_given_back(ranks: Ranks) -> None:
    found = ranks(2, freed)
    assert sorted(one["lost"][0] for one in found) == ["one.weight", "two.weight"]
    for one in found:
        assert len(one["lost"]) == 1 and one["no numbers"] == one["lost"] and one["copied"] and one["finite"] and one["loaded"]
        assert "more than one element" in one["refused"]


def kept_alive() -> list[bool]:
    """Runs on a rank: whether models are there after they were forgotten."""
    found = []
    for _ in range(2):
        fresh()
        model = seeded()
        compiled = torch.compile(model, backend="dmt", options={"topology": Topology(2, 1), "inner": "eager"})
        loss(compiled(*batch(5, 0))).backward()
        held = weakref.ref(model.bag.weight)
        del model, compiled
        torch._dynamo.reset()
        gc.collect()
        found.append(held() is not None)
    return found


def test_nothing_keeps_a_model_alive(ranks: Ranks) -> None:
    assert ranks(2, kept_alive) == [[False, False]] * 2


def too_many_graphs() -> str:
    fresh()
    options = {"topology": Topology(2, 1), "inner": "eager"}
    compiled = torch.compile(Base(), backend="dmt", options=options, dynamic=False)
    try:
        for size in range(2, 12):
            compiled(ids(size, 0))
    except Exception as error:
        return type(error).__name__
    return ""


def test_code_that_was_compiled_too_often_is_an_error(ranks: Ranks) -> None:
    """And not left to Python, which would read tables that their owners have changed."""
    assert ranks(2, too_many_graphs) == ["FailOnRecompileLimitHit"] * 2


def spread() -> list[int]:
    """Runs on a rank: how many tables each rank owns of a model whose lookups are in several graphs."""
    from dmt_compile.backend.owners import owner_of

    fresh()
    model = Breaking()
    compiled = torch.compile(model, backend="dmt", options={"topology": Topology(2, 1), "inner": "eager"})
    compiled(*batch(5, 0))
    owners = [owner_of(parameter, 2) for parameter in model.parameters()]
    assert counted.rewritten == 2
    return [owners.count(rank) for rank in range(2)]


def test_tables_of_later_graphs_go_to_the_rank_with_the_least(ranks: Ranks) -> None:
    assert ranks(2, spread) == [[2, 2]] * 2


def other_options() -> tuple[bool, str]:
    """Runs on a rank: a model that is compiled again with other options keeps what its tables have learnt."""
    fresh()
    model = seeded()
    first = torch.compile(model, backend="dmt", options={"topology": Topology(2, 1), "inner": "eager"})
    loss(first(*batch(5, dist.get_rank()))).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    before = backend.full_state_dict(first)
    second = torch.compile(model, backend="dmt", options={"topology": Topology(1, 2), "inner": "eager"})
    second(*batch(5, dist.get_rank()))
    after = backend.full_state_dict(second)
    with pytest.raises(DistributedError) as caught:
        backend.full_state_dict(seeded())
    return all(torch.equal(after[key], value) for key, value in before.items()), str(caught.value)


def test_compiled_again_with_other_options(ranks: Ranks) -> None:
    for same, message in ranks(2, other_options):
        assert same and "has compiled no graph in which this model looks a table up" in message


def test_ids_computed_under_autocast_after_a_lookup_are_refused() -> None:
    class Computing(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.one(x)
            with torch.autocast("cpu", torch.bfloat16):
                y = (x.float() @ torch.ones(len(x), len(x))).long() % 12
            return rows + self.two(y)

    with pytest.raises(Exception, match=r"test_backend_kinds\.py:\d+.* computes ids in a mode") as caught:
        backend.explain(Computing(), ids(4, 0), topology=Topology(2, 1))
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), CaptureError)
