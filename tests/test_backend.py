"""``torch.compile(model, backend="dmt")`` on real ranks: the flat model's results, gradients and training."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import torchrec_inputs, torchrec_model
from plain_models import CASES
from ranks import Ranks
from torch import nn
from torch.utils._pytree import tree_leaves

from dmt_compile import CaptureError, DistributedError, PlanError, Topology, backend
from dmt_compile.backend.compiler import counted
from dmt_compile.backend.options import Options

STEPS = 3
# Refused, because reading with a max_norm writes to the table; left to Python by Dynamo, because of a recurrent layer; and what
# lookups of other cases are like.
OTHERS = {
    "renormed",
    "fields over time",
    "field by field",
    "bags of parts",
    "shared",
    "nested",
    "hashed",
    "pooled late",
    "refusing",
}
COMPILED = sorted(CASES.keys() - OTHERS)


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def loss(value: Any) -> torch.Tensor:
    """The mean loss of a batch; zero, with gradients of zeros, for an empty one."""
    parts = [t.float().square().mean() if t.numel() else t.float().sum() for t in tensors(value) if t.is_floating_point()]
    return torch.stack(parts).sum()


def sizes_of(world: int, step: int, empty: bool) -> list[int]:
    return [(rank + 2 * step) % 4 + (0 if empty else 2) for rank in range(world)]


def fresh() -> None:
    torch._dynamo.reset()
    counted.rewritten = counted.others = 0
    warnings.simplefilter("ignore")


def train(name: str, inner: Any, topology: Topology, empty: bool, free: bool) -> Any:
    """Runs on a rank: outputs and losses of all steps beside the flat model's on this rank's batch, and the state behind them."""
    fresh()
    world, rank = dist.get_world_size(), dist.get_rank()
    model, reference = CASES[name].build(), CASES[name].build()
    options = {"topology": topology, "inner": inner, "free_unowned": free}
    compiled = torch.compile(model, backend=backend.dmt, options=options)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    equal, worst = [], 0.0
    for step in range(STEPS):
        batches = [CASES[name].batch(size, seed=10 * step + number) for number, size in enumerate(sizes_of(world, step, empty))]
        for one in optimizers:
            one.zero_grad()
        args, kwargs = batches[rank]
        found = compiled(*args, **kwargs)
        expected = [reference(*args, **kwargs) for args, kwargs in batches]
        mine = tensors(expected[rank])
        equal.append(all(torch.equal(a, b) for a, b in zip(tensors(found), mine, strict=True)))
        for a, b in zip(tensors(found), mine, strict=True):
            worst = max(worst, float((a.detach().float() - b.detach().float()).abs().max()) if a.numel() else 0.0)
        loss(found).backward()
        (torch.stack([loss(one) for one in expected]).sum() / world).backward()
        for one in optimizers:
            one.step()
    state, flat = backend.full_state_dict(compiled), reference.state_dict()
    assert list(state) == list(flat)
    learnt = {key for key, _ in reference.named_parameters()}
    apart = {key: float((state[key].float() - flat[key].float()).abs().max()) for key in learnt}
    moved = sum(not torch.equal(flat[key], value) for key, value in CASES[name].build().state_dict().items())
    own = [p for p in model.parameters() if p.untyped_storage().size()]
    return equal, worst, max(apart.values()), moved, counted.rewritten, sum(p.numel() for p in own)


@pytest.mark.parametrize("name", COMPILED)
def test_every_style_trains_as_one_process(ranks: Ranks, name: str) -> None:
    """First outputs bit for bit; later ones, and weights, but for the order of sums over samples: 16 steps of the coarsest type."""
    tolerance = 16 * max(torch.finfo(p.dtype).eps for p in CASES[name].build().parameters())
    for equal, worst, apart, moved, rewritten, _ in ranks(2, train, name, "eager", Topology(2, 1), False, False):
        assert equal[0] and rewritten >= 1 and moved
        assert worst <= tolerance and apart <= tolerance


def train_torchrec() -> tuple[bool, float, int]:
    """Runs on a rank: TorchRec's DLRM, whose KeyedJaggedTensor Dynamo takes apart into lookups feature by feature."""
    fresh()
    model = torchrec_model("DLRM")
    flat = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend.dmt, options={"topology": Topology(2, 1), "inner": "eager"})
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, flat)]
    equal = True
    for step in range(2):
        for one in optimizers:
            one.zero_grad()
        found = compiled(*torchrec_inputs(4 + step + dist.get_rank()))
        expected = [flat(*torchrec_inputs(4 + step + rank)) for rank in range(2)]
        equal = equal and (step > 0 or torch.equal(found, expected[dist.get_rank()]))
        loss(found).backward()
        (torch.stack([loss(one) for one in expected]).sum() / 2).backward()
        for one in optimizers:
            one.step()
    state = backend.full_state_dict(compiled)
    return equal, max(float((state[key] - value).abs().max()) for key, value in flat.state_dict().items()), counted.rewritten


def test_torchrec(ranks: Ranks) -> None:
    for equal, apart, rewritten in ranks(2, train_torchrec):
        assert equal and apart <= 2e-6 and rewritten >= 1


AOT = [
    ("per field", (2, 1), False, True),
    ("offsets", (3, 1), True, False),
    ("chained", (2, 1), False, True),
]


@pytest.mark.parametrize(("name", "grid", "empty", "free"), AOT)
def test_compiled_backward(ranks: Ranks, name: str, grid: tuple[int, int], empty: bool, free: bool) -> None:
    """Forward and backward as one graph each, with empty batches and ranks without tables."""
    topology = Topology(*grid)
    whole = sum(p.numel() for p in CASES[name].build().parameters())
    held = []
    for equal, worst, apart, moved, rewritten, own in ranks(topology.world_size, train, name, "aot_eager", topology, empty, free):
        assert equal[0] and rewritten >= 1 and moved
        assert worst <= 2e-6 and apart <= 2e-6
        held.append(own)
    assert all(own < whole for own in held) if free else set(held) == {whole}


class Mlp(nn.Module):
    """A bottom MLP that needs no lookup, beside tables of two widths and a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(20, 4) for _ in range(3)])
        self.bag = nn.EmbeddingBag(30, 4, mode="sum")
        self.bottom = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))
        self.top = nn.Linear(20, 1)

    def forward(self, dense: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rows = [table(x[:, i]) for i, table in enumerate(self.tables)]
        return self.top(torch.cat([self.bottom(dense), self.bag(ids, offsets), *rows], dim=1))


def batch(size: int, seed: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (size,), generator=draw)
    offsets = (lengths.cumsum(0) - lengths).long()
    ids = torch.randint(0, 30, (int(lengths.sum()),), generator=draw)
    return torch.randn(size, 3, generator=draw), torch.randint(0, 20, (size, 3), generator=draw), ids, offsets


def seeded() -> Mlp:
    torch.manual_seed(0)
    return Mlp()


def count_graphs(inner: str, own: bool) -> tuple[int, int]:
    """Runs on a rank: graphs that Dynamo has made, and graph breaks, over twelve batches of other sizes and numbers of ids."""
    fresh()
    torch._dynamo.utils.counters.clear()
    model = seeded()
    options = {"topology": Topology(2, 1), "inner": inner}
    compiled = torch.compile(model, backend=backend.dmt, options=options) if own else torch.compile(model, backend=inner)
    for step in range(12):
        loss(compiled(*batch(3 + (5 * step + dist.get_rank()) % 7, step))).backward()
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def test_no_more_graphs_than_the_flat_model(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(2, count_graphs, "aot_eager", True)):
        flat = ranks(2, count_graphs, "aot_eager", False)[rank]
        assert found == flat
        assert flat[0] <= 4 and flat[1] == 0


def exchanges_in_code() -> tuple[list[str], float, float]:
    """Runs on a rank: what the code that inductor makes of forward does, in order; and the differences to the flat model."""
    from torch._inductor.utils import run_and_get_code

    fresh()
    model, flat = seeded(), seeded()
    compiled = torch.compile(model, backend=backend.dmt, options={"topology": Topology(2, 1)}, dynamic=True)
    given = batch(6 + dist.get_rank(), dist.get_rank())
    found, code = run_and_get_code(lambda: compiled(*given))
    loss(found).backward()
    others = [flat(*batch(6 + rank, rank)) for rank in range(2)]
    (torch.stack([loss(one) for one in others]).sum() / 2).backward()
    names = {
        "all_to_all_single.default(": "start",
        "wait_tensor.default(": "wait",
        "addmm(": "layer",
        "request.default(": "request",
    }
    lines = [line for line in code[0].splitlines() if " = " in line or line.strip().startswith(("torch.ops", "extern_kernels"))]
    order = [word for line in lines for name, word in names.items() if name in line and "assert" not in line]
    grad, theirs = model.bottom[0].weight.grad, flat.bottom[0].weight.grad
    assert grad is not None and theirs is not None
    apart = float((found.detach() - others[dist.get_rank()].detach()).abs().max())
    return order, apart, float((grad - theirs).abs().max())


def _has_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except Exception:
        return False


@pytest.mark.skipif(not _has_compiler(), reason="inductor needs a C++ compiler")
def test_inductor_runs_dense_layers_while_data_travels(ranks: Ranks) -> None:
    for order, apart, gradient in ranks(2, exchanges_in_code, patience=240):
        assert order.count("start") == order.count("wait") == 5, order
        under_way = 0
        during = []
        for word in order:
            under_way += {"start": 1, "wait": -1}.get(word, 0)
            if word == "layer":
                during.append(under_way > 0)
        # Both layers of the bottom MLP; the top one needs what has come.
        assert during == [True, True, False], order
        assert apart <= 1e-6 and gradient <= 1e-6


class Breaking(Mlp):
    """Python in the middle: lookups in the first graph, layers in another."""

    def forward(self, dense: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rows = [table(x[:, i]) for i, table in enumerate(self.tables)]
        torch._dynamo.graph_break()
        return self.top(torch.cat([self.bottom(dense), self.bag(ids, offsets), *rows], dim=1))


def with_breaks() -> tuple[int, int, float]:
    fresh()
    torch.manual_seed(0)
    model = Breaking()
    flat = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend.dmt, options={"topology": Topology(1, 2), "inner": "aot_eager"})
    optimizers = [torch.optim.Adam(one.parameters()) for one in (model, flat)]
    for step in range(2):
        given = [batch(4 + rank, 10 * step + rank) for rank in range(2)]
        for one in optimizers:
            one.zero_grad()
        loss(compiled(*given[dist.get_rank()])).backward()
        (torch.stack([loss(flat(*one)) for one in given]).sum() / 2).backward()
        backend.clip_grad_norm_(compiled, 0.05)
        nn.utils.clip_grad_norm_(flat.parameters(), 0.05)
        for one in optimizers:
            one.step()
    state = backend.full_state_dict(compiled)
    apart = max(float((state[key] - value).abs().max()) for key, value in flat.state_dict().items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    backend.load_full_state_dict(compiled, state)
    again = backend.full_state_dict(compiled)
    assert all(torch.equal(again[key], value) for key, value in state.items())
    return counted.rewritten, counted.others, apart


def test_graph_breaks(ranks: Ranks) -> None:
    for rewritten, others, apart in ranks(2, with_breaks):
        assert rewritten >= 2 and others == 0
        # Adam's division by the root of a small number.
        assert apart <= 1e-5


# What goes wrong


def bad_id() -> list[str]:
    """Runs on a rank: the errors of three steps, in the second of which rank 1 has an id outside its table."""
    fresh()
    compiled = torch.compile(seeded(), backend=backend.dmt, options={"topology": Topology(2, 1), "inner": "aot_eager"})
    errors = []
    for step in range(3):
        dense, x, ids, offsets = batch(5, step)
        if step == 1 and dist.get_rank() == 1:
            x[2, 1] = 20
        try:
            loss(compiled(dense, x, ids, offsets)).backward()
            errors.append("")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def test_a_bad_id_on_one_rank_is_an_error_on_all(ranks: Ranks) -> None:
    (first, others, third), (own_first, own, own_third) = ranks(2, bad_id)
    assert first == third == own_first == own_third == ""
    assert own.startswith("InputError") and "has id 20, outside its table of 20 rows" in own and "tables.1" in own
    assert others.startswith("DistributedError") and "rank 1 could not use its batch" in others


def another_model() -> str:
    fresh()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4 + 4 * dist.get_rank()), nn.LazyLinear(1))
    compiled = torch.compile(model, backend=backend.dmt, options={"topology": Topology(2, 1), "inner": "eager", "timeout": 5})
    try:
        compiled(torch.arange(5))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_with_other_models(ranks: Ranks) -> None:
    for found in ranks(2, another_model):
        assert "different" in found or "another rank failed" in found, found
    ranks.close()


def leave() -> str:
    import os

    fresh()
    compiled = torch.compile(seeded(), backend=backend.dmt, options={"topology": Topology(2, 1), "inner": "eager", "timeout": 5})
    compiled(*batch(5, 0))
    if dist.get_rank() == 1:
        os._exit(3)
    try:
        compiled(*batch(5, 1))
    except DistributedError as error:
        return str(error)
    return ""


def test_a_rank_that_dies(ranks: Ranks) -> None:
    from ranks import RankError

    with pytest.raises(RankError, match="exit code 3"):
        ranks(2, leave, patience=60)


def refused(options: dict[str, Any]) -> Sequence[str]:
    fresh()
    compiled = torch.compile(CASES["renormed"].build(), backend=backend.dmt, options=options)
    args, kwargs = CASES["renormed"].batch(4)
    try:
        compiled(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return ()


def test_refused_on_ranks(ranks: Ranks) -> None:
    for _, text in ranks(2, refused, {"topology": Topology(2, 1), "inner": "eager"}):
        assert "CaptureError" in text and "max_norm" in text and "plain_models.py:" in text
    for _, text in ranks(2, refused, {"topology": Topology(2, 2), "inner": "eager"}):
        assert "the process group has 2 ranks, the topology is 2 hosts x 2 ranks = 4" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tower": 2}, r"no option 'tower'; its options are topology, towers, partition, inner, free_unowned, timeout"),
        ({"tower_module": 2}, r"'tower_module' changes the model.*dmt_compile\.towerize\(model, topology, tower_module="),
        ({"topology": 4}, r"option 'topology' must be a dmt_compile\.Topology, got 4"),
        ({"towers": 0}, r"option 'towers' must be a number of towers"),
        ({"partition": "best"}, r"option 'partition' must be 'balanced' or 'strided', got 'best'"),
        ({"inner": "fast"}, r"option 'inner' must be a function, or one of .*inductor.*, got 'fast'"),
        ({"free_unowned": 1}, r"option 'free_unowned' must be True or False"),
        ({"timeout": -1}, r"option 'timeout' must be a number of seconds"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Options.of(options)


# On one device


def test_found_by_name_and_alone() -> None:
    assert "dmt" in torch._dynamo.list_backends()
    torch._dynamo.reset()
    model = seeded()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = torch.compile(model, backend="dmt", options={"inner": "aot_eager"})
        assert torch.equal(compiled(*batch(5, 0)), model(*batch(5, 0)))
        assert torch.equal(compiled(*batch(6, 0)), model(*batch(6, 0)))
    assert sum("there is one rank" in str(one.message) for one in caught) <= 1
    assert list(backend.full_state_dict(compiled)) == list(model.state_dict())


def test_explained() -> None:
    found = backend.explain(Breaking(), *batch(5, 0), topology=Topology(2, 2))
    assert (len(found.graphs), found.rewritten, len(found.breaks)) == (2, 2, 1)
    assert "test_backend.py" in found.breaks[0].location
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


def test_max_norm_is_refused() -> None:
    args, kwargs = CASES["renormed"].batch(4)
    with pytest.raises(Exception, match="does not take lookups with max_norm") as caught:
        backend.explain(CASES["renormed"].build(), *args, topology=Topology(2, 2), **kwargs)
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), CaptureError)
