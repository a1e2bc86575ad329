"""What a certificate must not overlook: every kind of output, every bit, every gradient; and what it must not refuse."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import PooledOnly, collection, dense, jagged, table
from mutants import Mutant, remade
from torch import nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dmt_compile import Certificate, InputError, Topology, TowerProgram, VerificationError, towerize
from dmt_compile.graphs import copy_graph, extras_of, graph_module_over
from dmt_compile.runtime.gradients import scale_gradient
from dmt_compile.runtime.pooled import MakeOutput
from dmt_compile.runtime.tables import TowerLookups
from dmt_compile.stage import Stage
from dmt_compile.verify.compare import bits_differ, furthest, tensors_in
from dmt_compile.verify.equivalence import Verifier
from dmt_compile.verify.layout import check_layout


def replaced(program: TowerProgram, name: str, stage: Stage) -> TowerProgram:
    """The program with another stage under a name."""
    stages = {**program.stages, name: stage}
    program._dmt = dataclasses.replace(program._dmt, stages={True: stages, False: stages})
    return program


def failed(certificate: Certificate) -> dict[str, str]:
    return {check.name: check.found for check in certificate.checks if not check.passed}


class TestComparison:
    """Two outputs that differ in one thing."""

    KEYED = KeyedTensor(keys=["a", "b"], length_per_key=[1, 2], values=torch.ones(2, 3))

    @pytest.mark.parametrize(
        "one, other",
        [
            (KEYED, KeyedTensor(keys=["b", "a"], length_per_key=[1, 2], values=torch.ones(2, 3))),
            (KEYED, KeyedTensor(keys=["a", "b"], length_per_key=[2, 1], values=torch.ones(2, 3))),
            (JaggedTensor(torch.ones(3), lengths=torch.tensor([1, 2])), JaggedTensor(torch.ones(3), lengths=torch.tensor([2, 1]))),
            (JaggedTensor(torch.ones(3), lengths=torch.tensor([3])), JaggedTensor(torch.zeros(3), lengths=torch.tensor([3]))),
            (
                JaggedTensor(torch.ones(1), lengths=torch.tensor([1])),
                JaggedTensor(torch.ones(1), lengths=torch.tensor([1]), weights=torch.ones(1)),
            ),
            (
                KeyedJaggedTensor(["a", "b"], torch.ones(2), lengths=torch.ones(2, dtype=torch.int32)),
                KeyedJaggedTensor(["a", "c"], torch.ones(2), lengths=torch.ones(2, dtype=torch.int32)),
            ),
            (1, 2),
            (1, True),
            (1, 1.0),
            (0.0, -0.0),
            ("a", "b"),
            (None, 0),
            (None, {}),
            (None, torch.ones(1)),
            ([], ()),
            (torch.float32, torch.float64),
            ({1, 2}, {1, 3}),
            (torch.tensor([0.0]), torch.tensor([-0.0])),
            (torch.tensor(0.0), torch.tensor(-0.0)),
            (torch.tensor([0j]), torch.tensor([complex(0.0, -0.0)])),
            (torch.zeros(2, dtype=torch.bfloat16), -torch.zeros(2, dtype=torch.bfloat16)),
            (torch.tensor([True]), torch.tensor([False])),
            (torch.eye(2).to_sparse(), torch.eye(2)),
            (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
        ],
    )
    def test_what_is_told_apart(self, one: Any, other: Any) -> None:
        for a, b in ((one, other), (other, one)):
            assert bits_differ({"x": [a]}, {"x": [b]}) is not None
        for same in (one, other):
            assert bits_differ({"x": [same]}, {"x": [copy.deepcopy(same)]}) is None

    def test_nan_equals_nan_of_other_bits(self) -> None:
        quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
        assert bits_differ(quiet, other) is None
        assert bits_differ(float("nan"), float("nan")) is None
        assert bits_differ(torch.ones(2, 3).t(), torch.ones(3, 2)) is None

    def test_an_unknown_object_is_named(self) -> None:
        for look in (lambda x: bits_differ(x, x), lambda x: list(tensors_in(x))):
            with pytest.raises(VerificationError, match=r"output\['x'\]\[0\] is a types.SimpleNamespace"):
                look({"x": [SimpleNamespace(a=torch.ones(1))]})

    def test_terms_are_the_scale_of_what_cancels(self) -> None:
        terms = {"small": torch.ones(3), "big": torch.ones(3)}
        expected = {"small": torch.full((3,), 1e-6), "big": torch.full((3,), 1e-6)}
        rounded = {**expected, "small": expected["small"] + 64 * torch.finfo(torch.float32).eps}
        assert furthest(rounded, expected)[0] > 1
        assert furthest(rounded, expected, terms)[0] <= 1
        assert furthest({"a": torch.ones(1)}, {"a": torch.tensor([1.001])}, {"a": torch.tensor([10.0])})[0] > 1


class Everything(nn.Module):
    """Returns ``make(columns)`` beside the columns."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.ebc = collection(table("a", ["x"], 3), table("b", ["y"], 2))
        self.make = make

    def forward(self, sparse: KeyedJaggedTensor) -> Any:
        columns = self.ebc(sparse).values()
        return columns, self.make(columns)


class Kept(nn.Module):
    """Calls what tracing cannot look into, and keeps it whole."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        # Control flow on data.
        return self.make(x) if x.numel() >= 0 and bool((x == x).all()) else None


def kept(make: Callable[[torch.Tensor], Any]) -> tuple[TowerProgram, Any]:
    torch.manual_seed(0)
    return towerize(Everything(Kept(make)), Topology(2, 2)), jagged(["x", "y"], 9)


def test_an_output_of_an_unknown_type_is_not_called_equal() -> None:
    program, batch = kept(lambda x: SimpleNamespace(value=x))
    found = failed(program.verify(batch, steps=0))
    assert "types.SimpleNamespace" in found["outputs, stage towers"] and "output[1]" in found["outputs, stage lowered"]


def test_jagged_and_plain_outputs_are_equal() -> None:
    def make(x: torch.Tensor) -> Any:
        lengths = torch.ones(len(x), dtype=torch.int32)
        return {"jagged": JaggedTensor(x[:, 0], lengths=lengths), "n": 3, "name": "x", "on": True, "none": None}

    program, batch = kept(make)
    certificate = program.verify(batch)
    assert certificate.passed, str(certificate)


def test_keys_and_plain_values_of_outputs_are_compared() -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc = collection(table("a", ["x"], 2), table("b", ["y"], 2))

        def forward(self, sparse: KeyedJaggedTensor) -> Any:
            return {"pooled": self.ebc(sparse), "version": 1}

    program, batch = towerize(Keyed(), Topology(2, 2)), jagged(["x", "y"], 9)
    assert program.verify(batch).passed

    def other_keys(old: MakeOutput) -> MakeOutput:
        return MakeOutput(dataclasses.replace(old.output, keys=("y", "x")), program.lookups)

    def other_version(m: Mutant) -> None:
        m.nodes["output"].args = ({**m.nodes["output"].args[0], "version": 2},)  # type: ignore[dict-item]

    towers = program.stages["towers"]
    for spoil, where in ((lambda m: m.swap_module("output_0", other_keys), ".keys"), (other_version, "['version']")):
        found = failed(replaced(program, "towers", remade(towers, spoil)).verify(batch, steps=0))
        assert where in found["outputs, stage towers"]


class TestLayoutOfOutputs:
    def test_other_widths_of_keys(self) -> None:
        class Keyed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.ebc = collection(table("a", ["x"], 3), table("b", ["y"], 2))

            def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
                return self.ebc(sparse).to_dict()["x"]

        stage = towerize(Keyed(), Topology(2, 2)).stages["lowered"]

        def make(old: MakeOutput) -> MakeOutput:
            made = copy.copy(old)
            made._dims = [2, 3]
            return made

        with pytest.raises(VerificationError, match=r"node 'output_0'.*widths \[2, 3\], the lookups make \[3, 2\]"):
            check_layout(remade(stage, lambda m: m.swap_module("output_0", make)))

    def test_a_shape_that_does_not_hold_the_columns(self) -> None:
        class Plain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(5, 4)

            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                return self.table(ids).sum(dim=1)

        stage = towerize(Plain(), Topology(2, 2), example_inputs=(torch.ones(6, 3, dtype=torch.long),)).stages["lowered"]
        check_layout(stage)
        (output,) = stage.lookups.outputs
        wrong = dataclasses.replace(output, shape=(-1, 5, 4))
        lookups = dataclasses.replace(stage.lookups, outputs=(wrong,))
        mutant = remade(stage, lambda m: m.swap_module("output_0", lambda _: MakeOutput(wrong, lookups)))
        with pytest.raises(VerificationError, match="does not hold them"):
            check_layout(dataclasses.replace(mutant, lookups=lookups))


class Two(nn.Module):
    """Six tables, two of equal values, and a layer behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = collection(*(table(f"t{i}", [f"x{i}"], 4, mean=i == 3) for i in range(6)))
        self.top = nn.Linear(24, 3)
        with torch.no_grad():
            self.ebc.embedding_bags["t1"].weight.copy_(self.ebc.embedding_bags["t0"].weight)

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return self.top(self.ebc(sparse).values())


FEATURES = [f"x{i}" for i in range(6)]


def two() -> tuple[TowerProgram, KeyedJaggedTensor]:
    return towerize(Two(), Topology(2, 2)), jagged(FEATURES, 40)


def test_the_program_itself_passes() -> None:
    program, batch = two()
    certificate = program.verify(batch)
    assert certificate.passed, str(certificate)
    assert {"table gradients, integers", "gradients", "gradients, stage towers"} <= {check.name for check in certificate.checks}
    assert all(len(line) <= 80 for line in str(certificate).split("\n"))


def _scaled(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return scale_gradient(x, 1.00001, 1.0) if x.requires_grad else x
    if isinstance(x, KeyedTensor):
        return KeyedTensor(x.keys(), x.length_per_key(), _scaled(x.values()))
    return [_scaled(part) for part in x]


NODES = {
    "lowered": [
        "lookup",
        "permute",
        "tower_pack",
        "tower_wait",
        "shuffle",
        "peer_unpack",
        "restore",
        "columns_0",
        "output_0",
        "top",
    ],
    "towers": ["tower_0", "columns", "columns_0", "output_0", "top"],
}


@pytest.mark.parametrize("stage, node", [(stage, node) for stage, nodes in NODES.items() for node in nodes])
def test_a_gradient_that_is_off_by_a_hundred_thousandth(stage: str, node: str) -> None:
    program, batch = two()

    def spoil(m: Mutant) -> None:
        with m.graph.inserting_after(m.nodes[node]):
            made = m.graph.call_function(_scaled, (m.nodes[node],))
        m.nodes[node].replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)

    mutant = replaced(program, stage, remade(program.stages[stage], spoil))
    found = failed(mutant.verify(batch, steps=0))
    assert f"stage {stage}" in found["table gradients, integers"].replace("'", "")
    assert not any(name.startswith("outputs") for name in found)


@pytest.mark.parametrize("stage", ["towers", "lowered"])
def test_detached_before_the_output(stage: str) -> None:
    program, batch = two()

    def spoil(m: Mutant) -> None:
        (result,) = m.nodes["output"].args
        with m.graph.inserting_before(m.nodes["output"]):
            m.nodes["output"].args = (m.graph.call_method("detach", (result,)),)

    found = failed(replaced(program, stage, remade(program.stages[stage], spoil)).verify(batch, steps=0))
    assert ("gradients" if stage == "lowered" else "gradients, stage towers") in found
    assert "table gradients, integers" in found
    assert not any(name.startswith("outputs") for name in found)


@pytest.mark.parametrize("only_unbound", [False, True])
def test_tables_of_equal_values_swapped_in_a_tower(only_unbound: bool) -> None:
    program, batch = two()
    towers = program.stages["towers"]

    def make(old: TowerLookups) -> TowerLookups:
        tables = dict(program.lookups.table)
        tables["t0"], tables["t1"] = tables["t1"], tables["t0"]
        swapped = TowerLookups(towers.root, old.tower, old.lookups, tables, old._arguments[1])
        if only_unbound:
            swapped._arguments = old._arguments
        return swapped

    def spoil(m: Mutant) -> None:
        for index in range(len(program.plan.towers)):
            m.swap_module(f"tower_{index}", make)

    found = failed(replaced(program, "towers", remade(towers, spoil)).verify(batch, steps=0))
    assert "towers" in found["table gradients, integers"]
    assert not any(name.startswith("outputs") for name in found)
    assert ("gradients, stage towers" in found) is not only_unbound


def test_parameters_that_are_copies() -> None:
    program, batch = two()
    towers = program.stages["towers"]
    root = copy.deepcopy(towers.root)
    module = graph_module_over(root, copy_graph(towers.graph), extras_of(towers.graph_module), "Copied")
    mutant = dataclasses.replace(towers, graph_module=module, root=root)
    found = failed(replaced(program, "towers", mutant).verify(batch, steps=0))
    assert "is not a parameter of the flat model" in found["gradients, stage towers"]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_parameter_that_only_the_flat_model_trains(steps: int) -> None:
    """Its gradient is zero, so only its presence tells."""

    class Idle(Two):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Parameter(torch.ones(3))

        def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
            return super().forward(sparse) + self.idle * 0.0

    program, batch = towerize(Idle(), Topology(2, 2)), jagged(FEATURES, 40)
    assert program.verify(batch, steps=steps).passed

    def spoil(m: Mutant) -> None:
        (idle,) = [node for node in m.graph.nodes if node.op == "get_attr" and node.target == "idle"]
        with m.graph.inserting_after(idle):
            made = m.graph.call_method("detach", (idle,))
        idle.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)

    found = failed(replaced(program, "lowered", remade(program.stages["lowered"], spoil)).verify(batch, steps=steps))
    names = {"gradients"} | ({"parameters after 1 steps"} if steps else set())
    assert names <= found.keys()
    assert all("'idle' gets a gradient in the flat model but not in the program" in found[name] for name in names)


def test_gradients_of_rows_that_many_ids_hit() -> None:
    """Thousands of equal terms, whose rounding all points one way, for each of four samples that cancel."""
    torch.manual_seed(0)
    count, longest = 60, 2000
    model = PooledOnly(*(table(f"t{i}", [f"x{i}"], 1, rows=3) for i in range(count)))
    ids = torch.zeros(4 * count * longest, dtype=torch.long)
    lengths = torch.full((4 * count,), longest, dtype=torch.int32)
    zeros = KeyedJaggedTensor([f"x{i}" for i in range(count)], ids, lengths=lengths, stride=4)
    for steps in (0, 2):
        certificate = towerize(model, Topology(2, 2)).verify(zeros, steps=steps)
        assert certificate.passed, str(certificate)


def test_no_samples() -> None:
    program, _ = two()
    with pytest.raises(InputError, match="needs at least one sample"):
        program.verify(jagged(FEATURES, 0))
    assert program.verify(jagged(FEATURES, 1)).batch_sizes == (1, 0, 0, 0)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_with_gradients_switched_off(off: Any) -> None:
    program, batch = two()
    with off():
        certificate = program.verify(batch)
        assert not torch.is_grad_enabled()
    assert certificate.passed, str(certificate)


@pytest.mark.parametrize("steps", [-1, 1.0, True, None, "2"])
def test_steps_that_are_no_number(steps: Any) -> None:
    program, batch = two()
    with pytest.raises(InputError, match="steps must be"):
        program.verify(batch, steps=steps)


def test_a_frozen_collection_beside_a_trained_one() -> None:
    """Outputs of the program may be differentiable where the flat model's are not."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = collection(table("a", ["x"], 3)).requires_grad_(False)
            self.top = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, sparse: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
            columns = self.frozen(sparse).values()
            return columns, self.top(x) + columns

    certificate = towerize(Half(), Topology(2, 2)).verify(dense(9), jagged(["x"], 9))
    assert certificate.passed, str(certificate)


def test_many_tables_take_time_in_proportion() -> None:
    def seconds(count: int) -> float:
        model = PooledOnly(*(table(f"t{i}", [f"x{i}"], 1, rows=3) for i in range(count)))
        program, batch = towerize(model, Topology(2, 2)), jagged([f"x{i}" for i in range(count)], 4, rows=3)
        verifier = Verifier(program.stages, [((part,), {}) for part in batch_of(batch)], (1, 1, 1, 1), 0)
        start = time.process_time()
        assert verifier.exact_gradients()[0]
        return time.process_time() - start

    def batch_of(batch: Any) -> Any:
        from dmt_compile.adapters.torchrec import deal

        return deal(batch, [1, 1, 1, 1])

    seconds(10)
    assert seconds(400) < 12 * seconds(100)
