"""Criteo click logs: label, 13 integers and 26 hexadecimal categories per line.

The classic form is tab-separated without a header. A comma-separated file and a header that names the
columns `label`, `I1`..`I13`, `C1`..`C26` (in any order) are accepted as well, and so is gzip.
"""

from __future__ import annotations

import gzip
import math
import re
from array import array
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO

import torch

from examples.data.dataset import DataError, RecDataset, SparseFeature

DENSE = tuple(f"I{k}" for k in range(1, 14))
SPARSE = tuple(f"C{k}" for k in range(1, 27))
COLUMNS = ("label", *DENSE, *SPARSE)
ROWS = 10_000
LIMIT = 200_000
_HEX = re.compile(r"[0-9a-fA-F]{1,16}")


def load(path: Path, rows: int = ROWS, limit: int | None = LIMIT) -> RecDataset:
    """Read at most `limit` lines.

    Dense values become `log(1 + max(x, 0))`, 0 where missing. A category becomes `1 + hex % (rows - 1)`;
    row 0 of every table of `rows` rows stands for "missing".
    """
    if rows < 2:
        raise DataError(f"tables need at least 2 rows, got {rows}")
    dense, labels, ids = array("f"), array("f"), array("q")
    known: dict[str, int] = {"": 0}
    for where, fields in _records(path, limit):
        if fields[0] not in ("0", "1", "0.0", "1.0"):
            raise DataError(f"{where}: label is {fields[0]!r}, expected 0 or 1")
        labels.append(float(fields[0]))
        for name, text in zip(DENSE, fields[1:14], strict=True):
            dense.append(_log(text, name, where) if text else 0.0)
        for name, text in zip(SPARSE, fields[14:], strict=True):
            if text not in known:
                if not _HEX.fullmatch(text):
                    raise DataError(f"{where}: {name} is {text!r}, expected a hexadecimal category or nothing")
                known[text] = 1 + int(text, 16) % (rows - 1)
            ids.append(known[text])
    if not labels:
        raise DataError(f"{path}: no rows")
    columns = torch.tensor(ids, dtype=torch.int64).reshape(-1, len(SPARSE)).T.contiguous()
    return RecDataset(
        f"Criteo ({path.name})",
        DENSE,
        torch.tensor(dense, dtype=torch.float32).reshape(-1, len(DENSE)),
        tuple(SparseFeature.single(name, rows, column) for name, column in zip(SPARSE, columns, strict=True)),
        torch.tensor(labels, dtype=torch.float32),
    )


def _records(path: Path, limit: int | None) -> Iterator[tuple[str, list[str]]]:
    """`file:line` and the 40 fields of every row, in the order of `COLUMNS`."""
    try:
        with _open(path) as file:
            first = file.readline()
            separator, kind = ("\t", "tab") if "\t" in first else (",", "comma")
            names = [name.strip() for name in first.rstrip("\r\n").split(separator)]
            order: list[int] | None = None
            lines: Iterator[str] = chain([first], file)
            start = 1
            if "label" in names:
                missing = [name for name in COLUMNS if name not in names]
                if missing:
                    raise DataError(f"{path}:1: the header has no {', '.join(missing)}")
                order = [names.index(name) for name in COLUMNS]
                lines, start = file, 2
            width = len(names) if order else len(COLUMNS)
            for number, line in enumerate(islice(lines, limit), start=start):
                if not line:
                    return
                fields = line.rstrip("\r\n").split(separator)
                if len(fields) != width:
                    raise DataError(
                        f"{path}:{number}: {len(fields)} {kind}-separated fields, expected {width} "
                        "(label, 13 integers, 26 hexadecimal categories)"
                    )
                yield f"{path}:{number}", [fields[k] for k in order] if order else fields
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a text file: {error}") from error


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="\n")
    return path.open(encoding="utf-8-sig", newline="\n")


def _log(text: str, name: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{where}: {name} is {text!r}, expected a number or nothing")
    return math.log1p(max(value, 0.0))
