"""The short examples, started as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / "examples" / "train_dlrm.py")


def _run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_plain_models() -> None:
    output = _run(str(ROOT / "examples" / "plain_models.py"))
    for name, numbers in (("WideAndDeep", "12 +12 +0"), ("FactorisationMachine", "12 +12 +0"), ("NextItem", "4 +3 +1")):
        assert re.search(rf"^{name} .* {numbers} +yes *$", output, re.MULTILINE), output
    assert "FactorisationMachine: factorisation machine, concat-MLP, linear term" in output
    assert "NextItem.position.weight: plain_models.py:" in output
    assert all(len(line) <= 80 for line in output.split("\n"))


def _losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss of rank 0: ([0-9.]+)", output)]


@pytest.mark.slow
@pytest.mark.multi_rank
def test_train_dlrm_under_torchrun() -> None:
    output = _run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", SCRIPT, "--hosts", "2")
    losses = _losses(output)
    assert len(losses) == 5
    across = [int(sent.replace(",", "")) for sent in re.findall(r"([0-9,]+) across hosts", output)]
    assert len(across) == 4
    assert min(across) > 0
    assert losses[-1] < losses[0]
    assert output.count("tensors loaded into the flat model") == 1


def test_train_dlrm_on_one_device() -> None:
    output = _run(SCRIPT)
    losses = _losses(output)
    assert losses[-1] < losses[0]
    assert "not started with torchrun" in output
