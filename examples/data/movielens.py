"""MovieLens-100K, read from the files that the `recbole` wheel ships.

`recbole` is located but never imported: its own dependencies are not needed. The files are RecBole
"atomic files": tab-separated UTF-8 text whose header gives `name:type` for every column.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from examples.data.dataset import DataError, RecDataset, SparseFeature

INSTALL = "pip install --no-deps recbole==1.2.1"
LIKED = 4.0
_TYPES = ("token", "float", "token_seq", "float_seq")
_FOLDER = Path("dataset_example") / "ml-100k"
_DENSE = ("age", "film age", "genres", "days as user", "user ratings", "film ratings")


@dataclass(frozen=True)
class AtomicFile:
    """A parsed atomic file: one tuple of strings per row, columns by name."""

    path: Path
    columns: dict[str, int]
    rows: list[tuple[str, ...]]

    def column(self, name: str) -> list[str]:
        """All values of a column."""
        if name not in self.columns:
            raise DataError(f"{self.path}:1: no column {name!r}; found {', '.join(self.columns)}")
        index = self.columns[name]
        return [row[index] for row in self.rows]

    def numbers(self, name: str) -> list[float]:
        """All values of a column, as finite numbers."""
        numbers = []
        for line, text in enumerate(self.column(name), start=2):
            try:
                number = float(text)
            except ValueError:
                number = math.nan
            if not math.isfinite(number):
                raise DataError(f"{self.path}:{line}: {name} is {text!r}, expected a number")
            numbers.append(number)
        return numbers


def read_atomic(path: Path) -> AtomicFile:
    """Parse one atomic file; malformed rows are errors that name the file and the line."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        byte = error.object[error.start]
        raise DataError(f"{path}:{number}: not UTF-8 text (byte 0x{byte:02x})") from error
    # Not splitlines(): titles may hold characters that Python, but not the format, takes for line ends.
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    columns: dict[str, int] = {}
    for index, field in enumerate(lines[0].split("\t")):
        name, _, kind = field.partition(":")
        if kind not in _TYPES or not name or name in columns:
            raise DataError(f"{path}:1: header field {field!r}, expected a new name:type with type one of {', '.join(_TYPES)}")
        columns[name] = index
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        row = tuple(line.split("\t"))
        if len(row) != len(columns):
            raise DataError(f"{path}:{number}: {len(row)} tab-separated fields, expected {len(columns)} ({', '.join(columns)})")
        rows.append(row)
    return AtomicFile(path, columns, rows)


def find_files() -> Path:
    """The folder of the MovieLens-100K files inside the installed `recbole` distribution."""
    spec = importlib.util.find_spec("recbole")  # of a top-level package: located, not imported
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(location) / _FOLDER
        if (folder / "ml-100k.inter").is_file():
            return folder
    problem = "is not installed" if spec is None else f"is installed, but has no {_FOLDER.as_posix()}"
    raise DataError(
        f"MovieLens-100K is read from the files of the recbole wheel, and recbole {problem}. "
        f"Install it without its dependencies (it is never imported):\n    {INSTALL}"
    )


def load(folder: Path | None = None) -> RecDataset:
    """All ratings in file order; the label is whether the rating is at least 4.

    Dense features use nothing that is later than the sample: age of the user and of the film, number
    of genres, days since the user's first rating, ratings so far of the user and of the film.
    """
    folder = find_files() if folder is None else folder
    ratings = read_atomic(folder / "ml-100k.inter")
    users = read_atomic(folder / "ml-100k.user")
    films = read_atomic(folder / "ml-100k.item")
    user_index, film_index = _index(users, "user_id"), _index(films, "item_id")
    user = _lookup(ratings, "user_id", user_index, users.path)
    film = _lookup(ratings, "item_id", film_index, films.path)
    stamps = ratings.numbers("timestamp")
    times = [datetime.fromtimestamp(stamp, tz=UTC) for stamp in stamps]

    years = [_year(text) for text in films.column("release_year")]

    sparse = [
        SparseFeature.single("user", len(user_index), user),
        SparseFeature.single("item", len(film_index), film),
        *(
            _vocabulary(name, ((token,) for token in tokens)).take(user)
            for name, tokens in (
                ("age", users.column("age")),
                ("gender", users.column("gender")),
                ("occupation", users.column("occupation")),
                ("zip_prefix", [code[:3].upper() for code in users.column("zip_code")]),
            )
        ),
        _vocabulary("release_year", [(year or "unknown",) for year in years]).take(film),
        _vocabulary("genres", (text.split() for text in films.column("class"))).take(film),
        SparseFeature.single("hour", 24, torch.tensor([time.hour for time in times])),
        SparseFeature.single("weekday", 7, torch.tensor([time.weekday() for time in times])),
    ]
    ages = torch.tensor(users.numbers("age"))[user] / 100
    released = torch.tensor([float(year or "nan") for year in years])[film]
    film_age = torch.tensor([time.year for time in times]) - released
    genres = torch.tensor([float(len(text.split())) for text in films.column("class")])[film]
    history = _history(user.tolist(), film.tolist(), stamps)
    dense = torch.stack([ages, film_age.nan_to_num(0.0).clamp_min(0).log1p(), genres, *history.log1p()], dim=1)
    labels = (torch.tensor(ratings.numbers("rating")) >= LIKED).float()
    return RecDataset("MovieLens-100K", _DENSE, dense.float(), tuple(sparse), labels)


def _index(table: AtomicFile, key: str) -> dict[str, int]:
    """Row number of every key; a repeated key is an error."""
    index: dict[str, int] = {}
    for line, token in enumerate(table.column(key), start=2):
        if token in index:
            raise DataError(f"{table.path}:{line}: {key} {token!r} for the second time")
        index[token] = line - 2
    return index


def _lookup(ratings: AtomicFile, key: str, index: dict[str, int], source: Path) -> Tensor:
    """Row numbers `(N,)` of the keys of all ratings."""
    found = []
    for line, token in enumerate(ratings.column(key), start=2):
        if token not in index:
            raise DataError(f"{ratings.path}:{line}: {key} {token!r} is not in {source.name}")
        found.append(index[token])
    return torch.tensor(found, dtype=torch.int64)


def _vocabulary(name: str, bags: Iterable[Sequence[str]]) -> SparseFeature:
    """Number the tokens of a feature in order of appearance."""
    ids: dict[str, int] = {}
    numbered = [[ids.setdefault(token, len(ids)) for token in bag] for bag in bags]
    return SparseFeature.bags(name, max(len(ids), 1), numbered)


def _year(text: str) -> str:
    """The year, or "" for the few films whose year is unknown or garbled."""
    return text if len(text) == 4 and text.isascii() and text.isdigit() else ""


def _history(user: list[int], film: list[int], stamps: list[float]) -> Tensor:
    """Days since the user's first rating, earlier ratings of the user, of the film: `(3, N)`."""
    first: dict[int, float] = {}
    by_user: dict[int, int] = {}
    by_film: dict[int, int] = {}
    history = [[0.0] * len(stamps) for _ in range(3)]
    for n in sorted(range(len(stamps)), key=stamps.__getitem__):
        u, f = user[n], film[n]
        history[0][n] = (stamps[n] - first.setdefault(u, stamps[n])) / 86_400
        history[1][n] = by_user.get(u, 0)
        history[2][n] = by_film.get(f, 0)
        by_user[u] = by_user.get(u, 0) + 1
        by_film[f] = by_film.get(f, 0) + 1
    return torch.tensor(history)
