"""State dicts of tower models: weights of towers of other features are refused, and all ranks begin with those of one model."""

from __future__ import annotations

import copy
import json
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import Tensors
from ranks import Ranks
from torch import nn
from tower_models import CASES, Dot, UserTower, program

from dmt_compile import CrossTower, DLRMTower, PassThrough, PlanError, Topology, TowerProgram, towerize
from dmt_compile.runtime.rank_module import RankModule

FIRST = [["tables.0", "tables.1", "tables.2"], ["tables.3", "tables.4"]]
OTHER = [["tables.0", "tables.3", "tables.2"], ["tables.1", "tables.4"]]
"""As many features in each tower, so that all shapes are the same."""
TURNED = [FIRST[1], FIRST[0]]


def of(towers: Any, module: Any = DLRMTower(c=1, p=0, dim=4), grid: tuple[int, int] = (2, 1), **more: Any) -> TowerProgram:  # noqa: B008
    case = CASES["dot"]
    return towerize(case.build(), Topology(*grid), towers=towers, example_inputs=case.inputs(6, 7), tower_module=module, **more)


@pytest.mark.parametrize("towers", [OTHER, TURNED])
@pytest.mark.parametrize(
    ("module", "more"),
    [
        (DLRMTower(c=1, p=0, dim=4), {}),
        (CrossTower(dim=8, rank=3), {}),
        (UserTower, {}),
        (DLRMTower(c=1, p=0, dim=4), {"expand": True}),
        ({0: DLRMTower(c=1, p=0, dim=8)}, {}),
    ],
)
def test_weights_of_other_features_are_refused(towers: Any, module: Any, more: dict[str, Any]) -> None:
    saved = of(FIRST, module, **more).state_dict()
    made = of(towers, module, **more)
    with pytest.raises(PlanError, match=r"dmt_towers.0 takes 3 features \('tables.0', 'tables.1', 'tables.2'\) there") as caught:
        made.load_state_dict(saved)
    assert f"compile with towers={FIRST}" in str(caught.value)
    again = of(FIRST, module, **more, seed=1)
    again.load_state_dict(saved)
    assert all(torch.equal(value, saved[key]) for key, value in again.state_dict().items())


def test_the_order_of_a_towers_features_does_not_matter() -> None:
    """They are given in the order in which the model reads them."""
    saved = of(FIRST).state_dict()
    made = of([names[::-1] for names in FIRST], seed=1)
    made.load_state_dict(saved)
    assert torch.equal(made(*CASES["dot"].inputs(5, 3)), of(FIRST)(*CASES["dot"].inputs(5, 3)))


def test_features_that_no_module_takes_may_lie_elsewhere() -> None:
    case = CASES["beside"]
    flat = towerize(case.build(), Topology(2, 1), example_inputs=case.inputs(6, 7))
    narrow = [name for name in flat.lookups.lookup if name.startswith("first")]
    wide = [name for name in flat.lookups.lookup if name not in narrow]
    both = [[*wide[:3], *narrow], wide[3:]], [wide[:3], [*wide[3:], *narrow]]
    one, two = (
        towerize(case.build(), Topology(2, 1), towers=towers, example_inputs=case.inputs(6, 7), tower_module=UserTower)
        for towers in both
    )
    names = two.state_dict()["dmt_towers.features_0"].clone()
    two.load_state_dict(one.state_dict())
    assert torch.equal(two.eval()(*case.inputs(5, 3)), one.eval()(*case.inputs(5, 3)))
    # It is saved with the features of its own plan.
    assert torch.equal(two.state_dict()["dmt_towers.features_0"], names)
    assert json.loads(bytes(names.tolist()))["features"] == wide[:3]


def test_in_a_module_of_the_users_and_in_copies() -> None:
    saved = {f"0.{key}": value for key, value in of(FIRST).state_dict().items()}
    with pytest.raises(PlanError, match="other towers"):
        nn.Sequential(copy.deepcopy(of(OTHER))).load_state_dict(saved)
    nn.Sequential(copy.deepcopy(of(FIRST, seed=1))).load_state_dict(saved)


def test_other_numbers_of_towers() -> None:
    saved = of(FIRST).state_dict()
    with pytest.raises(PlanError, match=r"dmt_towers.0 takes 3 features .* there, and 5 features \(.*, \.\.\.\) in this program"):
        of(1).load_state_dict(saved)
    with pytest.raises(PlanError, match="other towers"):
        of([["tables.0"], ["tables.1"], *FIRST[1:], ["tables.2"]], grid=(4, 1)).load_state_dict(saved)


def test_without_names() -> None:
    """Torch says what is missing; what is no list of names is refused."""
    made, state = of(FIRST), of(FIRST).state_dict()
    bare = {key: value for key, value in state.items() if "features_" not in key}
    with pytest.raises(RuntimeError, match=r'Missing key.*"dmt_towers.features_0", "dmt_towers.features_1"'):
        made.load_state_dict(bare)
    assert made.load_state_dict(bare, strict=False).missing_keys == ["dmt_towers.features_0", "dmt_towers.features_1"]
    with pytest.raises(PlanError, match=r"'dmt_towers.features_1' of the state dict does not hold the names"):
        made.load_state_dict({**state, "dmt_towers.features_1": torch.zeros(4096, dtype=torch.uint8)})


def test_what_passes_through_takes_the_flat_models_weights() -> None:
    flat = Dot()
    made = of(OTHER, PassThrough())
    made.load_state_dict(flat.state_dict())
    assert torch.equal(made(*CASES["dot"].inputs(5, 3)), flat(*CASES["dot"].inputs(5, 3)))


def test_other_types_and_devices_keep_the_names() -> None:
    made = of(FIRST).to(torch.bfloat16)
    made.load_state_dict(of(FIRST).state_dict())
    names = made.state_dict()["dmt_towers.features_1"]
    assert names.dtype == torch.uint8 and json.loads(bytes(names.tolist()))["taken"] == FIRST[1]
    emptied = of(FIRST).to("meta").to_empty(device="cpu")
    emptied.load_state_dict(of(FIRST).state_dict())
    assert torch.equal(emptied.state_dict()["dmt_towers.features_1"], names)


# On ranks


def load_on_ranks(towers: Any, full: Tensors, own: list[Tensors], folder: str) -> tuple[list[str], Tensors]:
    """Runs on a rank: what each way to load raises, and the full state at the end."""
    import torch.distributed.checkpoint as dcp

    module: RankModule = of(towers, grid=(2, 2), seed=1).distribute()
    errors = []
    checkpoint = module.state_dict()
    for state in (full, own[dist.get_rank()], checkpoint):
        if state is checkpoint:
            dcp.load(state, checkpoint_id=folder)
        try:
            module.load_state_dict(state)
            errors.append("")
        except PlanError as error:
            errors.append(str(error))
    result = module.full_state_dict()
    module.close()
    return errors, result


def save_on_ranks(folder: str) -> tuple[Tensors, Tensors]:
    """Runs on a rank: its own state dict and the full one, and a checkpoint in ``folder``."""
    import torch.distributed.checkpoint as dcp

    module = of(FIRST, grid=(2, 2)).distribute()
    own = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in module.state_dict().items()}
    dcp.save(module.state_dict(), checkpoint_id=folder)
    full = module.full_state_dict()
    module.close()
    return own, full


@pytest.mark.multi_rank
def test_on_ranks(ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = ranks(4, save_on_ranks, folder)
        full, own = saved[0][1], [one[0] for one in saved]
        assert list(full) == list(of(FIRST).state_dict())
        for tower in range(2):
            assert [key for key in own[2 * tower] if "features_" in key] == [f"dmt_towers.features_{tower}"]
        for errors, state in ranks(4, load_on_ranks, FIRST, full, own, folder):
            assert errors == [""] * 3
            assert list(state) == list(full) and all(torch.equal(state[key], full[key]) for key in full)
        for errors, _ in ranks(4, load_on_ranks, [FIRST[0][:2] + FIRST[1][:1], FIRST[0][2:] + FIRST[1][1:]], full, own, folder):
            assert all("other towers" in error for error in errors)
            # A whole state dict says the same on every rank.
            assert "dmt_towers.0 takes 3 features" in errors[0] and f"towers={FIRST}" in errors[0]


def begin_on_ranks(how: str) -> tuple[Tensors, Tensors, torch.Tensor, torch.Tensor]:
    """Runs on a rank: the program's state and the module's, and what both make of one batch."""
    rank = dist.get_rank()
    case = CASES["dot"]
    given = {
        "seed": {"seed": rank},
        "inputs": {"init": "preserve"},
        "expanded": {"init": "preserve", "expand": True, "seed": rank},
    }[how]
    compiled = towerize(
        case.build(), Topology(2, 2), example_inputs=case.inputs(30, 7 + rank), tower_module=DLRMTower(c=1, p=0, dim=4), **given
    ).eval()
    module = compiled.distribute().eval()
    batch = case.inputs(5, 3)
    with torch.no_grad():
        made = module(*batch), compiled(*batch)
    full = module.full_state_dict()
    module.close()
    return dict(compiled.state_dict()), full, *made


@pytest.mark.multi_rank
@pytest.mark.parametrize("how", ["seed", "inputs", "expanded"])
def test_all_ranks_begin_with_the_model_of_rank_0(ranks: Ranks, how: str) -> None:
    """Whatever they were compiled from: layers around the towers come from rank 0 and fit its modules only."""
    case = CASES["dot"]
    given = {"seed": {}, "inputs": {"init": "preserve"}, "expanded": {"init": "preserve", "expand": True}}[how]
    alone = towerize(
        case.build(), Topology(2, 2), example_inputs=case.inputs(30, 7), tower_module=DLRMTower(c=1, p=0, dim=4), **given
    ).eval()
    with torch.no_grad():
        expected = alone(*case.inputs(5, 3))
    for state, full, on_ranks, here in ranks(4, begin_on_ranks, how):
        for key, value in alone.state_dict().items():
            assert torch.equal(full[key], value) and torch.equal(state[key], value), key
        assert torch.equal(here, expected)
        torch.testing.assert_close(on_ranks, expected)


def first_alone_on_ranks() -> Tensors:
    """Runs on a rank: the full state where only rank 0's model has values."""
    case = CASES["dot"]
    model, inputs = case.build(), case.inputs(6, 7)
    if dist.get_rank():
        model, inputs = model.to("meta"), tuple(tensor.to("meta") for tensor in inputs)
    compiled = towerize(model, Topology(2, 2), example_inputs=inputs, tower_module=DLRMTower(c=1, p=0, dim=4))
    module = compiled.distribute(device="cpu")
    full = module.full_state_dict()
    module.close()
    return full


@pytest.mark.multi_rank
def test_values_on_rank_0_only(ranks: Ranks) -> None:
    expected = program("dot", (2, 2, 2), "each").state_dict()
    for full in ranks(4, first_alone_on_ranks):
        assert all(torch.equal(full[key], value) for key, value in expected.items() if not key.startswith("tables"))
