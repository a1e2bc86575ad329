"""Train a flat TorchRec DLRM, and the tower program compiled from it, to the same AUC.

    python examples/demo.py                          # MovieLens-100K
    python examples/demo.py --data criteo PATH       # a Criteo-format file
    python examples/demo.py --ratio 4                # also with tower modules that compress 4 times

Prints the plan, the diff and the certificate; then trains the flat model in this process and the
towers on `hosts * ranks-per-host` gloo processes of this machine that stand for the ranks of as many
hosts, with the same seed and the same global batches. With tower modules (`--tower-module`, or `--ratio`
for short) the model is another one; it is trained on one device and its AUC stands beside the flat
model's. Exit status: 0 if both agree, 1 if they do not
or a rank failed, 2 if the input cannot be used.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

if __name__ == "__main__":  # run as a script: import `examples` from the repository root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dmt_compile.errors import DmtError
from examples.data import DataError, RecDataset, criteo
from examples.tower_modules import FORMS, RATIOS, TowerModule, compression, described, narrowed, tower_module, tower_program
from examples.training import (
    WAIT,
    Result,
    Settings,
    build_model,
    evaluate,
    evaluate_flat,
    load_data,
    train_here,
    train_towers,
)

TOLERANCE = 1e-3
"""Largest accepted difference of the test loss and of the AUC. The two runs add up the same gradients in a
different order; over ten seeds of MovieLens that alone was measured to move the test loss by up to 2.0e-4
and the AUC by up to 1.1e-4."""
SAME_WEIGHTS = 1e-5
"""The same for the towers' weights loaded into the flat model: one forward pass, hardly any rounding."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit status."""
    console = Console()
    errors = Console(stderr=True)
    try:
        settings, choice, timeout = _parse(arguments)
        train, test = load_data(settings)
        settings = _fit_batch(settings, train)
        _demo(console, settings, choice, train, test, timeout)
        return 0
    except DataError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except (DmtError, RuntimeError, TimeoutError) as error:
        console.show_cursor()  # a progress bar that was cut off has hidden it
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1


@dataclass(frozen=True)
class Choice:
    """The tower module to try, if any, how its model begins ("layer" or "preserve"), and whether vectors are expanded."""

    module: TowerModule | None
    init: str
    expand: bool


def _demo(console: Console, settings: Settings, choice: Choice, train: RecDataset, test: RecDataset, timeout: int) -> None:
    rows = sum(train.table_sizes.values())
    positive = float(train.labels.mean())
    bags = sum(feature.multi_hot for feature in train.sparse)
    console.rule(Text(f"{train.title}, TorchRec DLRM"))
    tail = len(train) % settings.batch_size
    console.print(
        f"{len(train):,} samples to train on, {len(test):,} to test; {positive:.0%} have label 1. "
        f"{len(train.dense_names)} dense and {len(train.sparse)} sparse features ({bags} multi-hot), "
        f"{rows:,} table rows of width {settings.dim}. "
        f"Both models see the same global batches of {settings.batch_size}"
        + (f"; the last {tail} samples of an epoch are dropped." if tail else "."),
        highlight=False,
    )
    program = tower_program(settings, build_model(settings, train), train)

    console.rule("Plan")
    _show(console, program)
    console.rule("Diff, flat to SPTT")
    _show(console, program.diff("flat", "sptt"))
    console.rule("Certificate")
    certificate = program.verify(next(train.batches(settings.batch_size, settings.seed)))
    _show(console, certificate)
    if not certificate.passed:
        raise RuntimeError("the tower program was not proved equal to the flat model")

    console.rule("Flat, one process")
    model = build_model(settings, train)
    flat = train_here(settings, model, train, test, console)
    ranks = settings.world_size
    console.rule(f"Towers, {ranks} gloo processes")
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "towers.pt"
        towers = launch(settings, weights, console.width, timeout)
        back = evaluate_flat(settings, test, weights)

    console.rule("Result")
    console.print(_results(flat, towers[0], back, ranks))
    console.print(_traffic(towers, settings.ranks_per_host))
    _judge(console, flat, towers[0], back)
    if choice.module is not None:
        console.rule("Tower modules, one process")
        _tower_modules(console, settings, choice, choice.module, model, flat, train, test)


def _tower_modules(
    console: Console,
    settings: Settings,
    choice: Choice,
    module: TowerModule,
    model: nn.Module,
    flat: Result,
    train: RecDataset,
    test: RecDataset,
) -> None:
    """Train the tower model like the flat one; with a warm start it begins with the weights of `model`, which is trained."""
    warm = choice.init == "preserve"
    begin = model if warm else build_model(settings, train)
    program = tower_program(settings, begin, train, module, choice.init, expand=choice.expand)
    console.print(described(program), highlight=False)
    before = evaluate(program, test) if warm else None
    trained = train_here(settings, program, train, test, console, first_epoch=settings.epochs if warm else 0)
    table = Table(
        caption="One seed. Ratio: columns of the embeddings over columns that cross hosts. "
        + (
            f"The warm start begins where the flat model's training ended and goes on for {settings.epochs} more epoch"
            f"{'s' if settings.epochs > 1 else ''}; the flat model was not trained on."
            if warm
            else "Both models are trained on the same batches."
        ),
        caption_justify="left",
    )
    table.add_column("model")
    for name in ("ratio", "test loss", "test AUC", "below flat", "seconds"):
        table.add_column(name, justify="right")
    ratio = f"{compression(program):.2f}"

    def row(title: str, test_loss: float, auc: float, seconds: float | None) -> None:
        values = f"{test_loss:.5f}", f"{auc:.5f}", f"{flat.auc - auc:+.5f}"
        table.add_row(title, ratio, *values, "" if seconds is None else f"{seconds:.1f}")

    table.add_row("flat", "1.00", f"{flat.test_loss:.5f}", f"{flat.auc:.5f}", "", f"{flat.seconds:.1f}")
    if before is not None:
        row("towers, warm start", *before, None)
    row("towers, trained on" if warm else "towers", trained.test_loss, trained.auc, trained.seconds)
    console.print(table)


def launch(settings: Settings, weights: Path, width: int, timeout: int) -> list[Result]:
    """Train the towers on `world_size` processes of this machine; the result of every rank."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are reported below, once
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings.world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"timeout": int(WAIT.total_seconds())},
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.05,
        shutdown_timeout=5,
    )
    try:
        with _deadline(timeout):
            results = elastic_launch(config, train_towers)(settings, weights, width)
    except ChildFailedError as error:
        raise RuntimeError(_first_failure(error)) from error
    except (RendezvousError, SignalException) as error:
        raise RuntimeError(f"the tower run was stopped: {error}") from error
    return [results[rank] for rank in range(settings.world_size)]


@contextmanager
def _deadline(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` in the main thread once `seconds` have passed."""

    def expire(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"the towers were not trained within {seconds} s (--timeout)")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def _results(flat: Result, towers: Result, back: tuple[float, float], ranks: int) -> Table:
    table = Table(
        caption="Seconds of training. All processes share the cores of this one machine.",
        caption_justify="left",
    )
    table.add_column("model")
    for name in ("steps", "train loss", "test loss", "test AUC", "seconds"):
        table.add_column(name, justify="right")
    for title, result in (("flat, 1 process", flat), (f"towers, {ranks} processes", towers)):
        values = f"{result.train_loss:.5f}", f"{result.test_loss:.5f}", f"{result.auc:.5f}"
        table.add_row(title, str(result.steps), *values, f"{result.seconds:.1f}")
    table.add_row("flat, towers' weights", "", "", f"{back[0]:.5f}", f"{back[1]:.5f}", "")
    return table


def _traffic(towers: list[Result], ranks_per_host: int) -> Table:
    table = Table(caption="Bytes of ids and embeddings, forward and backward.", caption_justify="left")
    for name in ("host", "rank", "sent inside its host", "sent across hosts"):
        table.add_column(name, justify="right")
    for rank, result in enumerate(towers):
        sent = f"{result.inside_host:,}", f"{result.across_hosts:,}"
        table.add_row(str(rank // ranks_per_host), str(rank), *sent)
    return table


def _judge(console: Console, flat: Result, towers: Result, back: tuple[float, float]) -> None:
    """Compare the test losses and AUCs with the tolerances."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("compared")
    for name in ("loss off by", "AUC off by", "tolerance", ""):
        table.add_column(name, justify="right")
    agree = True
    for what, loss, auc, tolerance in (
        ("towers, flat", flat.test_loss, flat.auc, TOLERANCE),
        ("towers, flat with their weights", *back, SAME_WEIGHTS),
    ):
        differences = abs(loss - towers.test_loss), abs(auc - towers.auc)
        equal = max(differences) <= tolerance
        agree = agree and equal
        verdict = "[green]equal[/]" if equal else "[bold red]DIFFER[/]"
        table.add_row(what, *(f"{value:.1e}" for value in differences), f"{tolerance:.0e}", verdict)
    console.print()
    console.print(table)
    if not agree:
        raise RuntimeError("the towers do not agree with the flat model to the stated tolerance")


def _parse(arguments: Sequence[str] | None) -> tuple[Settings, Choice, int]:
    parser = argparse.ArgumentParser(description="Flat DLRM against its towers, on real processes.")
    parser.add_argument(
        "--data",
        nargs="+",
        default=["movielens"],
        metavar=("movielens | criteo", "PATH"),
        help="default: movielens",
    )
    for name, default, text in (
        ("--hosts", 2, "hosts of the topology"),
        ("--ranks-per-host", 2, "ranks on every host"),
        ("--epochs", 1, "passes over the training samples"),
        ("--batch-size", None, "samples of a global batch (512, fewer for small data)"),
        ("--dim", 16, "width of the embeddings"),
        ("--criteo-rows", criteo.ROWS, "rows of every Criteo table"),
        ("--limit", criteo.LIMIT, "lines to read of a Criteo file"),
        ("--timeout", 600, "seconds the tower run may take"),
    ):
        suffix = "" if default is None else f" (default: {default})"
        parser.add_argument(name, type=_positive, default=default, metavar="N", help=text + suffix)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, split and order")
    modules = parser.add_mutually_exclusive_group()
    modules.add_argument("--tower-module", type=tower_module, metavar="MODULE", help=f"train it beside the flat model: {FORMS}")
    modules.add_argument("--ratio", type=int, choices=RATIOS, help="short for dlrm:c=1,p=0 with dim = --dim / ratio")
    parser.add_argument(
        "--init",
        choices=("layer", "preserve"),
        help="the tower model's first weights: drawn (default), or kept from the trained flat model",
    )
    parser.add_argument(
        "--expand", action="store_true", help="bring the towers' vectors back to their old width: all layers keep their shapes"
    )
    options = parser.parse_args(arguments)
    module = options.tower_module
    if options.ratio is not None:
        try:
            module = narrowed(options.dim, options.ratio)
        except ValueError as error:
            parser.error(f"--ratio {options.ratio}: {error}")
    for given, about in ((options.init and f"--init {options.init}", "weights"), (options.expand and "--expand", "vectors")):
        if given and module is None:
            parser.error(f"{given}: give --tower-module or --ratio, whose {about} it is about")
    match options.data:
        case ["movielens"]:
            path = None
        case ["criteo", text]:
            path = Path(text)
        case _:
            parser.error(f"--data {' '.join(options.data)}: expected 'movielens' or 'criteo PATH'")
    settings = Settings(
        criteo_path=path,
        criteo_rows=options.criteo_rows,
        limit=options.limit,
        hosts=options.hosts,
        ranks_per_host=options.ranks_per_host,
        epochs=options.epochs,
        batch_size=options.batch_size or 0,
        seed=options.seed,
        dim=options.dim,
    )
    return settings, Choice(module, options.init or "layer", options.expand), options.timeout


def _fit_batch(settings: Settings, train: RecDataset) -> Settings:
    """Check the batch size; without one, 512 or what gives a small data set some ten steps."""
    ranks = settings.world_size
    size = settings.batch_size or max(min(512, len(train) // 10) // ranks * ranks, ranks)
    if size % ranks:
        raise DataError(f"--batch-size {size} is not divisible by the {ranks} ranks")
    if size > len(train):
        raise DataError(f"a global batch of {size} does not fit in the {len(train)} training samples")
    return replace(settings, batch_size=size)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def _first_failure(error: ChildFailedError) -> str:
    """Which rank failed and why; ranks that merely suffered from it come last."""
    reasons = []
    for rank, failure in error.failures.items():
        message: Any = failure.message
        text = str(message.get("message", message) if isinstance(message, dict) else message).strip()
        consequence = "connection" in text.lower() or text.startswith("DistributedError")
        reasons.append((consequence, failure.timestamp, f"rank {rank} failed: {text}"))
    return min(reasons)[-1]


def _show(console: Console, item: Any) -> None:
    """Print rich renderables as such, and everything else as its text."""
    if hasattr(item, "__rich__") or hasattr(item, "__rich_console__"):
        console.print(item)
    else:
        console.print(str(item), markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
