"""Training and evaluation, shared by the flat model on one process and the towers on many.

B is the size of a global batch, W the number of ranks: a rank sees `B / W` samples per step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.functional.classification import binary_auroc
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import dmt_compile
from examples.data import DataError, RecDataset, criteo, movielens
from examples.data.dataset import deal

# TorchRec's KeyedJaggedTensor calls a function that torch has since renamed; one warning per process.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)

WAIT = timedelta(seconds=60)
"""Longest wait of a rank for another one."""

# The flat model and the towers add up the same gradients in a different order. Adagrad divides a
# gradient by its own running size, and so blows the rounding of a gradient that cancels to almost
# nothing up to a full step; an eps well above the rounding prevents it.
_TABLE_RATE, _DENSE_RATE, _EPS = 0.05, 0.02, 1e-5
_EVAL_BATCH = 4096


@dataclass(frozen=True)
class Settings:
    """Everything both runs have in common; picklable, every rank gets a copy.

    `criteo_path` is None for MovieLens-100K. `batch_size` counts the samples of a global batch.
    """

    criteo_path: Path | None
    criteo_rows: int
    limit: int
    hosts: int
    ranks_per_host: int
    epochs: int
    batch_size: int
    seed: int
    dim: int

    @property
    def world_size(self) -> int:
        """Number of ranks of the tower run."""
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True)
class Result:
    """Outcome of one run on one rank; the losses and the AUC are those of all ranks together."""

    train_loss: float
    test_loss: float
    auc: float
    seconds: float
    steps: int
    inside_host: int = 0
    across_hosts: int = 0


def load_data(settings: Settings) -> tuple[RecDataset, RecDataset]:
    """Train and test part, the same on every rank."""
    if settings.criteo_path is None:
        data = movielens.load()
    else:
        data = criteo.load(settings.criteo_path, settings.criteo_rows, settings.limit)
    train, test = data.split(seed=settings.seed)
    if test.labels.min() == test.labels.max():
        raise DataError(
            f"{data.title}: all {len(test)} test samples have the same label, which leaves their AUC undefined; use more data"
        )
    return train, test


def build_model(settings: Settings, data: RecDataset) -> DLRMTrain:
    """An unmodified TorchRec DLRM; the same seed gives the same weights on every rank."""
    torch.manual_seed(settings.seed)
    dim = settings.dim
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t_{name}", embedding_dim=dim, num_embeddings=rows, feature_names=[name])
            for name, rows in data.table_sizes.items()
        ],
        device=torch.device("cpu"),
    )
    return DLRMTrain(DLRM(tables, len(data.dense_names), [64, dim], [128, 64, 1]))


def train_here(
    settings: Settings, module: nn.Module, train: RecDataset, test: RecDataset, console: Console, *, first_epoch: int = 0
) -> Result:
    """Train a flat model, or a program compiled from it, on whole global batches in this process.

    The order of the batches of `first_epoch` and the epochs after it is taken.
    """
    torch.set_num_threads(1)  # as every rank has; a second one gains nothing at this size
    tables = [p for name, p in module.named_parameters() if ".embedding_bags." in name]
    dense = [p for name, p in module.named_parameters() if ".embedding_bags." not in name]
    loss, seconds, steps = _train(settings, module, tables, dense, train, console, first_epoch)
    test_loss, auc = evaluate(module, test)
    return Result(loss, test_loss, auc, seconds, steps)


def train_towers(settings: Settings, weights: Path, width: int) -> Result:
    """One rank of the tower run, started by `torch.distributed.launcher`.

    Rank 0 saves the trained weights, under the names of the flat model, to the file `weights` and
    draws the progress bar `width` columns wide.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=WAIT)
    rank = dist.get_rank()
    train, test = load_data(settings)
    model = build_model(settings, train)
    topology = dmt_compile.Topology(hosts=settings.hosts, ranks_per_host=settings.ranks_per_host)
    module = dmt_compile.towerize(model, topology).distribute()
    tables, dense = list(module.table_parameters()), list(module.dense_parameters())
    module.traffic.reset()
    console = Console(width=width, quiet=rank != 0)
    loss, seconds, steps = _train(settings, module, tables, dense, train, console)
    inside, across = module.traffic.inside_host, module.traffic.across_hosts
    test_loss, auc = evaluate(module, test)
    state = module.full_state_dict()
    if rank == 0:
        torch.save(state, weights)
    # Not after an error: a rank that closes its connections early makes the others report the consequence.
    module.close()
    dist.destroy_process_group()
    return Result(loss, test_loss, auc, seconds, steps, inside, across)


def _train(
    settings: Settings,
    module: nn.Module,
    tables: list[nn.Parameter],
    dense: list[nn.Parameter],
    data: RecDataset,
    console: Console,
    first_epoch: int = 0,
) -> tuple[float, float, int]:
    """Train on this rank's share of every global batch: mean loss of the last epoch, seconds, steps."""
    rank, world_size = _rank()
    groups = [(tables, _TABLE_RATE), (dense, _DENSE_RATE)]
    optimizer = torch.optim.Adagrad([{"params": params, "lr": rate} for params, rate in groups if params], eps=_EPS)
    steps = len(data) // settings.batch_size
    what = "loss" if world_size == 1 else "loss of rank 0"
    total = torch.zeros((), dtype=torch.float64)
    start = time.perf_counter()
    with _progress(console) as progress:
        for epoch in range(first_epoch, first_epoch + settings.epochs):
            task = progress.add_task(f"epoch {epoch + 1}", total=steps, what=what, loss=math.nan)
            total.zero_()
            batches = data.batches(settings.batch_size, settings.seed, epoch=epoch, rank=rank, world_size=world_size)
            for step, batch in enumerate(batches, start=1):
                optimizer.zero_grad()
                loss, _ = module(batch)
                loss.backward()
                optimizer.step()
                total += loss.detach()
                progress.update(task, advance=1, loss=float(total) / step)
    seconds = time.perf_counter() - start
    if world_size > 1:
        dist.all_reduce(total)
    mean = float(total) / (steps * world_size)
    if not math.isfinite(mean):
        raise RuntimeError(f"training diverged: the mean loss of the last epoch is {mean}")
    return mean, seconds, steps


@torch.no_grad()
def evaluate(module: nn.Module, data: RecDataset) -> tuple[float, float]:
    """Mean loss and AUC over all samples, the same on every rank.

    The last batch is padded with repeats so that it can be dealt evenly; they are not counted.
    """
    rank, world_size = _rank()
    module.eval()
    logits = torch.zeros(len(data), dtype=torch.float64)
    size = _EVAL_BATCH // world_size * world_size or world_size
    for start in range(0, len(data), size):
        samples = torch.arange(start, min(start + size, len(data)))
        padding = samples[-1:].expand(-samples.numel() % world_size)
        share = deal(torch.cat([samples, padding]), rank, world_size)
        counted = deal(torch.arange(samples.numel() + padding.numel()), rank, world_size) < samples.numel()
        _, (_, predicted, _) = module(data.batch(share))
        logits[share[counted]] = predicted[counted].double()
    if world_size > 1:
        dist.all_reduce(logits)  # every sample is non-zero on one rank: nothing is rounded
    module.train()
    return metrics(logits, data.labels)


def metrics(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean binary cross entropy and area under the ROC curve of float64 `logits (N,)`."""
    loss = binary_cross_entropy_with_logits(logits, labels.double())
    return float(loss), float(binary_auroc(logits.sigmoid(), labels.long()))


def evaluate_flat(settings: Settings, test: RecDataset, weights: Path) -> tuple[float, float]:
    """Test loss and AUC of the flat model with the weights that `train_towers` saved."""
    model = build_model(settings, test)
    model.load_state_dict(torch.load(weights, weights_only=True))
    return evaluate(model, test)


def _rank() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _progress(console: Console) -> Progress:
    columns: Iterable[str | TextColumn | BarColumn | MofNCompleteColumn | TimeElapsedColumn] = (
        "  {task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[what]} {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console)
