"""What tower modules cost in AUC: MovieLens-100K, over several seeds.

    python examples/tower_quality.py                  # 5 seeds, under ten minutes on one core
    python examples/tower_quality.py --seeds 10 --epochs 1 --dim 64

Trains the flat DLRM of the demo, the program compiled from it without tower modules (SPTT, which computes
the same), and programs with DLRM towers (c=1, p=0) that make vectors 2, 4 and 8 times narrower than the
embeddings. A seed decides the first weights and the order of the batches; the split into training and test
samples is the same for all. Then warm starts: the flat model of the seed is trained, compiled with
`init="preserve"`, tested as it is, and trained further, beside the flat model trained further for as long.
All runs are in one process, on one thread.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

if __name__ == "__main__":  # run as a script: import `examples` from the repository root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from dmt_compile import DLRMTower
from examples.data import DataError, RecDataset
from examples.tower_modules import RATIOS, compression, narrowed, tower_program
from examples.training import Settings, build_model, evaluate, load_data, train_here

FLAT = "flat"


@dataclass
class Row:
    """A model of the study: its AUC and test loss by seed."""

    title: str
    ratio: float = 1.0
    auc: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)

    def add(self, loss: float, auc: float) -> None:
        """One more seed."""
        self.auc.append(auc)
        self.loss.append(loss)


def study(
    settings: Settings, seeds: Sequence[int], more: int, train: RecDataset, test: RecDataset, console: Console
) -> tuple[dict[str, Row], dict[str, Row]]:
    """The models trained from drawn weights, and the warm starts with `more` epochs behind them."""
    drawn: dict[str, Row] = {}
    warm: dict[str, Row] = {}
    quiet = Console(quiet=True)
    for seed in seeds:
        own = replace(settings, seed=seed)
        after = replace(own, epochs=more)

        def trained(row: Row, module: nn.Module, own: Settings = own) -> None:
            result = train_here(own, module, train, test, quiet)
            row.add(result.test_loss, result.auc)

        flat = build_model(own, train)
        trained(_row(drawn, FLAT), flat)
        trained(_row(drawn, "SPTT"), tower_program(own, build_model(own, train), train))
        for ratio in RATIOS:
            program = tower_program(own, build_model(own, train), train, narrowed(own.dim, ratio))
            trained(_row(drawn, f"towers of {own.dim // ratio}", compression(program)), program)

        _row(warm, FLAT).add(drawn[FLAT].loss[-1], drawn[FLAT].auc[-1])
        later = {}
        for dim in (own.dim, *(own.dim // ratio for ratio in RATIOS)):
            # A program shares the model's tables, so training it would train them too.
            program = tower_program(own, copy.deepcopy(flat), train, DLRMTower(c=1, p=0, dim=dim), init="preserve")
            _row(warm, f"towers of {dim}", compression(program)).add(*evaluate(program, test))
            later[f"towers of {dim}"] = program
        if more:
            for title, module in {FLAT: flat, **later}.items():
                result = train_here(after, module, train, test, quiet, first_epoch=own.epochs)
                row = _row(warm, f"{title}, trained on", warm[title].ratio)
                row.add(result.test_loss, result.auc)
        aucs = ", ".join(f"{row.title} {row.auc[-1]:.4f}" for row in drawn.values())
        console.print(f"seed {seed}: {aucs}", highlight=False, soft_wrap=True)
    return drawn, warm


def _row(rows: dict[str, Row], title: str, ratio: float = 1.0) -> Row:
    return rows.setdefault(title, Row(title, ratio))


def table(rows: dict[str, Row], references: dict[str, str]) -> Table:
    """Median and spread of each row; differences are taken seed by seed from the row that `references` names."""
    made = Table(box=box.MARKDOWN)
    made.add_column("model", no_wrap=True)
    for name in ("ratio", "AUC, median", "min..max", "std", "loss, median", "below flat", "min..max", "difference"):
        made.add_column(name, justify="right")
    for title, row in rows.items():
        cells = [f"{row.ratio:.1f}", f"{statistics.median(row.auc):.4f}", _range(row.auc), f"{_spread(row.auc):.4f}"]
        cells.append(f"{statistics.median(row.loss):.4f}")
        other = rows[references.get(title, FLAT)]
        if other is not row:
            less = [theirs - mine for mine, theirs in zip(row.auc, other.auc, strict=True)]
            cells += [f"{statistics.median(less):+.4f}", _range(less, "+"), verdict(row.auc, other.auc)]
        made.add_row(title, *cells)
    return made


def verdict(auc: Sequence[float], flat: Sequence[float]) -> str:
    """What the spread lets one say of two models, given seed by seed.

    "equal" is to the last bit; "apart": no seed of one is within the other's min..max; "every seed": min..max overlap, but in
    every seed the same one is better; otherwise the difference is "within spread".
    """
    less = [theirs - mine for mine, theirs in zip(auc, flat, strict=True)]
    if not any(less):
        return "equal"
    if max(auc) < min(flat) or max(flat) < min(auc):
        return "apart"
    return "every seed" if min(less) > 0 or max(less) < 0 else "within spread"


def _range(values: Sequence[float], sign: str = "") -> str:
    return f"{min(values):{sign}.4f}..{max(values):{sign}.4f}"


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study; the exit status."""
    console = Console(width=140)
    parser = argparse.ArgumentParser(description="AUC of tower modules on MovieLens-100K, over several seeds.")
    for name, default, text in (
        ("--seeds", 5, "number of seeds"),
        ("--epochs", 2, "passes over the training samples"),
        ("--more", 1, "passes after a warm start, 0 for none"),
        ("--batch-size", 512, "samples of a batch"),
        ("--dim", 16, "width of the embeddings, a multiple of 8"),
        ("--limit", 0, "samples to train on and to test, 0 for all"),
    ):
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    options = parser.parse_args(arguments)
    for name, least in (("seeds", 2), ("epochs", 1), ("more", 0), ("batch_size", 1), ("dim", 1), ("limit", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be {least} or more")
    if options.dim % max(RATIOS):
        parser.error(f"--dim {options.dim} is not a multiple of {max(RATIOS)}")
    settings = Settings(
        criteo_path=None,
        criteo_rows=0,
        limit=0,
        hosts=2,
        ranks_per_host=2,
        epochs=options.epochs,
        batch_size=options.batch_size,
        seed=0,
        dim=options.dim,
    )
    try:
        train, test = (_first(part, options.limit) for part in load_data(settings))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if len(train) < options.batch_size:
        parser.error(f"--batch-size {options.batch_size} is larger than the {len(train)} training samples")
    console.print(
        f"{train.title}: {len(train):,} samples to train on, {len(test):,} to test; batches of {options.batch_size}; "
        f"{len(train.sparse)} features in 2 towers, embeddings {options.dim} wide",
        highlight=False,
        soft_wrap=True,
    )
    drawn, warm = study(settings, range(options.seeds), options.more, train, test, console)
    console.rule(f"From drawn weights; epochs: {options.epochs}, seeds: {options.seeds}")
    console.print(table(drawn, {}))
    console.rule(f"Warm starts from the trained flat model; further epochs: {options.more}")
    console.print(table(warm, {title: f"{FLAT}, trained on" for title in warm if title.endswith(", trained on")}))
    return 0


def _first(data: RecDataset, limit: int) -> RecDataset:
    return data.take(torch.arange(min(limit, len(data)))) if limit else data


if __name__ == "__main__":
    sys.exit(main())
