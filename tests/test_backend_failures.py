"""What goes wrong under ``torch.compile(model, backend="dmt")`` ends in an error on every rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend_models import batch, fresh, loss, seeded
from ranks import RankError, Ranks
from torch import nn

from dmt_compile import DistributedError, PlanError, Topology, backend
from dmt_compile.backend.options import Options


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
        assert "parameter '0.weight' is (20, 4) of torch.float32 on rank 0 and (20, 8)" in found, found
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
    with pytest.raises(RankError, match="exit code 3"):
        ranks(2, leave, patience=60)


def come_late() -> tuple[str, float]:
    """Runs on a rank: the error of a step that rank 1 comes too late to, and how long it took."""
    fresh()
    compiled = torch.compile(seeded(), backend=backend.dmt, options={"topology": Topology(2, 1), "inner": "eager", "timeout": 2})
    compiled(*batch(5, 0))
    if dist.get_rank() == 1:
        time.sleep(4)
    start = time.monotonic()
    try:
        compiled(*batch(5, 1))
    except DistributedError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


def test_a_rank_that_comes_too_late(ranks: Ranks) -> None:
    for message, waited in ranks(2, come_late, patience=60):
        # Nothing hangs: far less than the pool's own patience.
        assert "another rank failed, left or did not answer in time" in message and waited < 20


def other_options(kind: str) -> list[str]:
    """Runs on a rank: the errors of two steps of a model that rank 1 compiles otherwise, or cannot compile; then of another one."""
    fresh()
    own = dist.get_rank() == 1 and kind

    def inner(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        if own == "fails":
            raise ValueError("no compiler here")
        return module

    errors = []
    options = {"topology": Topology(2, 1), "inner": inner}
    more: dict[str, Any] = {"towers": {"towers": 1}, "partition": {"partition": "strided"}, "timeout": {"timeout": 30}}.get(
        str(own), {}
    )
    for given, steps in (({**options, **more}, 1), ({**options, "inner": "eager"}, 2)):
        compiled = torch.compile(seeded(), backend=backend.dmt, options=given)
        for step in range(steps):
            try:
                loss(compiled(*batch(5, step))).backward()
                errors.append("")
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
        torch._dynamo.reset()
    return errors


@pytest.mark.parametrize("option", ["towers", "partition", "timeout"])
def test_ranks_with_other_options(ranks: Ranks, option: str) -> None:
    for first, *others in ranks(2, other_options, option):
        assert f"option '{option}' is" in first and "on rank 0 and" in first and "ranks need the same options" in first
        assert others == ["", ""]


def test_a_rank_that_cannot_compile(ranks: Ranks) -> None:
    """The others learn of it at once, not when their patience ends; the next model runs on all."""
    mine, theirs = ranks(2, other_options, "fails")
    assert "no compiler here" in theirs[0] and "another rank failed" in mine[0]
    assert mine[1:] == theirs[1:] == ["", ""]


def refused(options: dict[str, Any]) -> str:
    fresh()
    try:
        torch.compile(seeded(), backend=backend.dmt, options=options)(*batch(5, 0))
    except Exception as error:
        return str(error)
    return ""


def test_refused_on_ranks(ranks: Ranks) -> None:
    for text in ranks(2, refused, {"topology": Topology(2, 2), "inner": "eager"}):
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
