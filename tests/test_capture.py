"""Capture: the user's objects stay as they are, every node knows the user's line, and what cannot be traced is explained."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from models import BATCH, Net, PooledOnly, Shell, inputs, line_of, table, torchrec_inputs, torchrec_model
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from dmt_compile import CaptureError, InputError, Topology, towerize
from dmt_compile.errors import source_location

TOPOLOGY = Topology(4, 2)


def proved(model: nn.Module, *given: Any) -> Any:
    program = towerize(model, TOPOLOGY)
    certificate = program.verify(*(given or inputs()), steps=1)
    assert certificate.passed, str(certificate)
    return program


# The user's model stays as it is


def snapshot(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name] = (
            id(module), type(module), module.training, list(module.__dict__), list(module._forward_hooks), list(module._modules),
            {k: id(v) for k, v in module.__dict__.items() if not k.startswith("_")},
        )  # fmt: skip
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        found[f"tensor {name}"] = (id(value), value.data_ptr(), value.requires_grad, value._version, id(value.grad), value.clone())
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("make", [Net, lambda: torchrec_model("DLRM")])
def test_model_is_untouched(make: Any) -> None:
    model = make()
    given = inputs() if isinstance(model, Net) else torchrec_inputs(BATCH)
    for name, module in model.named_modules():
        # Hooks on the model itself or on its lookups are refused.
        if name and not any(isinstance(child, EmbeddingBagCollection | nn.EmbeddingBag) for child in (module, *module.children())):
            module.register_forward_hook(lambda *_: None)
    list(model.children())[-1].eval()
    keys = list(model.state_dict())
    before = snapshot(model)
    program = towerize(model, TOPOLOGY)
    program.simulate(*given)
    program.verify(*given, steps=1)
    after = snapshot(model)
    assert before.keys() == after.keys() and [k for k in before if not same(before[k], after[k])] == []
    assert list(model.state_dict()) == keys


def test_parameters_are_the_models_own() -> None:
    model = Net()
    program = towerize(model, TOPOLOGY)
    mine, theirs = dict(program.named_parameters()), dict(model.named_parameters())
    assert list(mine) == list(theirs) and all(mine[name] is theirs[name] for name in mine)
    for stage in program.stages.values():
        assert {id(p) for p in stage.graph_module.parameters()} == {id(p) for p in theirs.values()}
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(program.buffers(), model.buffers(), strict=True))


def test_state_dict_is_the_flat_models() -> None:
    model = Net()
    program = towerize(model, TOPOLOGY)
    mine, theirs = program.state_dict(), model.state_dict()
    assert list(mine) == list(theirs) and "never_read" in mine and "not_saved" not in mine
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    other = Net()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    program.load_state_dict(other.state_dict())
    assert torch.equal(program(*inputs()), other(*inputs()))
    torch.testing.assert_close(torch.cat(program.simulate(*inputs())), other(*inputs()))


def test_train_and_eval() -> None:
    class Drops(Net):
        def make(self) -> nn.Module:
            return nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(5))

    model = Drops()
    program = towerize(model, TOPOLOGY)
    assert program.training and program.eval() is program
    modules = [program, *(stage.graph_module for stage in program.stages.values())]
    assert not any(m.training for root in modules for name, m in root.named_modules() if not name.startswith("dmt"))
    assert model.training and model.extra[0].training
    assert torch.equal(program(*inputs()), copy.deepcopy(model).eval()(*inputs()))
    assert program.verify(*inputs(), steps=1).passed
    program.train()
    assert all(m.training for m in modules)
    torch.manual_seed(3)
    found = program(*inputs())
    torch.manual_seed(3)
    assert torch.equal(found, copy.deepcopy(model)(*inputs()))


def test_deepcopy_is_independent() -> None:
    model = Net()
    program = towerize(model, TOPOLOGY)
    other = copy.deepcopy(program)
    assert other.plan == program.plan and list(other.state_dict()) == list(program.state_dict())
    before = program(*inputs())
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    assert torch.equal(program(*inputs()), before) and torch.equal(model(*inputs()), before)
    assert not torch.equal(other(*inputs()), before)
    assert other.verify(*inputs(), steps=1).passed
    assert {id(p) for p in other.parameters()}.isdisjoint(id(p) for p in program.parameters())


def test_to_another_type_reaches_every_stage() -> None:
    program = towerize(copy.deepcopy(Net()), TOPOLOGY)
    program.bottom.double()
    for stage in program.stages.values():
        assert stage.graph_module.get_submodule("bottom").weight.dtype is torch.float64


def test_meta_device() -> None:
    with torch.device("meta"):
        model = Net()
    program = towerize(model, TOPOLOGY)
    assert all(p.is_meta for p in program.parameters())
    with pytest.raises(InputError, match="on the meta device and has no values to compare"):
        program.verify(*inputs())


# Where nodes come from


def test_every_node_knows_the_users_line() -> None:
    program = towerize(Net(), TOPOLOGY)
    expected = {"ebc": "self.ebc(", "bottom": "self.bottom(", "scale": "self.scale", "not_saved": "self.not_saved"}
    for stage in program.stages.values():
        lines = {str(n.target): source_location(n) for n in stage.graph.nodes if n.op in ("call_module", "get_attr")}
        for target, text in expected.items():
            if target in lines:
                assert lines[target] == f"{models.__file__}:{line_of(Net.forward, text)}", (stage.name, target)
        if stage.name != "flat":
            (ids,) = [n for n in stage.graph.nodes if n.name == "ids_0" or n.name == "request"][:1]
            assert source_location(ids) == f"{models.__file__}:{line_of(Net.forward, 'self.ebc(')}"
    assert program.lookups.outputs[0].location == f"{models.__file__}:{line_of(Net.forward, 'self.ebc(')}"


# What cannot be traced and holds no lookup is kept whole


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) + self.first.bias * 2
        if y.sum() > 0:
            return self.second(y)
        return y


class WithBranches(Net):
    def make(self) -> nn.Module:
        return Branches()


def test_untraceable_submodule() -> None:
    program = proved(WithBranches())
    line = line_of(Branches.forward, "if y.sum()")
    assert list(program.leaves) == ["extra"]
    assert program.leaves["extra"].startswith(f"{__file__}:{line}: `if y.sum() > 0:`")
    names = [str(n.target) for n in program.stages["flat"].graph.nodes]
    assert "extra" in names and "extra.first" not in names, "what was traced before the failure must be gone"


def test_untraceable_submodule_that_shares_parameters_with_traced_code() -> None:
    class Shares(Net):
        """The leaf fails after it has read a parameter that traced code reads later, and earlier."""

        def make(self) -> nn.Module:
            self.gain = nn.Parameter(torch.rand(5))
            leaf = Branches()
            leaf.gain = self.gain
            leaf.first.bias = self.bottom.bias
            return leaf

        def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
            columns = self.ebc(sparse).values() * self.bottom.bias
            return columns + self.extra(self.bottom(dense)) * self.gain + self.extra.first.bias

    program = proved(Shares())
    assert list(program.leaves) == ["extra"]
    assert list(program.state_dict()) == list(Shares().state_dict())


def test_leaf_called_twice_and_inside_a_traced_module() -> None:
    class Twice(Net):
        def make(self) -> nn.Module:
            shared = Branches()
            return nn.Sequential(shared, nn.ReLU(), shared)

    program = proved(Twice())
    assert set(program.leaves) == {"extra.0"}
    assert [str(n.target) for n in program.stages["flat"].graph.nodes].count("extra.0") == 2


# What cannot be traced on the way to a lookup is explained


class Diverts(Net):
    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        if dense.sum() > 0:
            return self.bottom(dense)
        return self.ebc(sparse).values()


class Iterates(Net):
    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return sum(self.ebc(part).values() for part in sparse.split([1, 1]))


@pytest.mark.parametrize("model, text", [(Diverts(), "if dense.sum() > 0:"), (Iterates(), "for part in sparse.split")])
@pytest.mark.parametrize("wrap", [lambda m: m, Shell])
def test_control_flow_before_a_lookup(model: nn.Module, text: str, wrap: Any) -> None:
    with pytest.raises(CaptureError) as caught:
        towerize(wrap(model), TOPOLOGY)
    message = str(caught.value)
    assert f"{__file__}:{line_of(type(model).forward, text)}: `" in message and text in message
    assert "must not branch or loop on tensor values" in message


class Reuses(Net):
    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return self.ebc(sparse).values() @ torch.ones(5, 3) @ self.ebc.embedding_bags["a"].weight.t()


class TiedTop(Net):
    def make(self) -> nn.Module:
        top = nn.Linear(3, 12, bias=False)
        top.weight = self.ebc.embedding_bags["a"].weight
        return top

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return self.extra(self.ebc(sparse)["x"])


@pytest.mark.parametrize("kind, text", [(Reuses, "embedding_bags"), (TiedTop, "self.extra(")])
def test_table_used_as_a_weight_elsewhere(kind: type[Net], text: str) -> None:
    with pytest.raises(CaptureError) as caught:
        towerize(kind(), TOPOLOGY)
    assert "table 'a' is also used as a weight by node" in str(caught.value)
    assert f"{__file__}:{line_of(kind.forward, text)}" in str(caught.value)


@pytest.mark.parametrize(
    "model, reason",
    [
        (nn.Linear(2, 2), "no embedding lookup was found"),
        (nn.EmbeddingBag(4, 2), "pass example_inputs"),
        ("DLRM", "towerize takes an nn.Module, got str"),
        (nn.DataParallel(nn.Linear(1, 1)), "already wrapped in DataParallel: pass the module inside it"),
    ],
)
def test_refused(model: Any, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        towerize(model, TOPOLOGY)


def test_lookup_that_is_never_called() -> None:
    class Unused(Net):
        def forward(self, dense: torch.Tensor) -> torch.Tensor:
            return self.bottom(dense)

    with pytest.raises(CaptureError, match="no embedding lookup was found"):
        towerize(Unused(), TOPOLOGY)


def test_name_that_the_program_needs() -> None:
    model = Net()
    model.dmt = nn.Identity()
    with pytest.raises(CaptureError, match="submodule called 'dmt'"):
        towerize(model, TOPOLOGY)


def test_quantised_table() -> None:
    model = PooledOnly(table("a", ["x"]))
    bag = model.ebc.embedding_bags["a"]
    bag.weight = nn.Parameter(torch.zeros(12, 8, dtype=torch.int8), requires_grad=False)
    with pytest.raises(CaptureError, match=r"table 'a' of 'ebc' holds torch.int8: quantised tables"):
        towerize(model, TOPOLOGY)


def test_bag_that_changes_its_table() -> None:
    model = PooledOnly(table("a", ["x"]))
    model.ebc.embedding_bags["a"].max_norm = 1.0
    with pytest.raises(CaptureError, match="sets max_norm, scale_grad_by_freq or padding_idx"):
        towerize(model, TOPOLOGY)


def test_already_distributed() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(CaptureError, match="already wrapped in DistributedDataParallel: pass the module inside it"):
            towerize(nn.parallel.DistributedDataParallel(Net()), TOPOLOGY)
        from torchrec.distributed.model_parallel import DistributedModelParallel

        sharded = DistributedModelParallel.__new__(DistributedModelParallel)
        nn.Module.__init__(sharded)
        for model, name in ((sharded, "the model"), (Shell(sharded), "inner")):
            with pytest.raises(CaptureError, match=f"'{name}' is a DistributedModelParallel, already sharded by TorchRec"):
                towerize(model, TOPOLOGY)
    finally:
        dist.destroy_process_group()
