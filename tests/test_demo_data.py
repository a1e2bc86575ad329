"""The demo's data sets: parsing, malformed input, deterministic and dealt batches."""

from __future__ import annotations

import gzip
import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from torchrec.datasets.utils import Batch

from examples.data import DataError, RecDataset, SparseFeature, criteo, movielens
from examples.data.dataset import deal

INTER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
USER = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
ITEM = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A MovieLens folder of three users, three films and five ratings."""
    (tmp_path / "ml-100k.user").write_text(
        USER + "7\t24\tM\ttechnician\t85711\n8\t53\tF\tother\tv1g4l\n9\t24\tF\tother\t85799\n", "utf-8"
    )
    (tmp_path / "ml-100k.item").write_text(
        ITEM
        + "30\tToy Story\t1995\tAnimation Children's Comedy\n"
        + "10\tNénette\x85 et Boni\t1996\tDrama\n"
        + "20\tunknown\tV\t\n",
        "utf-8",
    )
    (tmp_path / "ml-100k.inter").write_text(
        INTER
        + "8\t10\t4\t881250949\n"  # 1997-12-04 15:55 UTC, a Thursday
        + "7\t30\t3\t881337349\n"  # a day later
        + "8\t30\t5\t881337349\n"
        + "9\t20\t3.5\t881250000\n"
        + "7\t30\t1\t881423749\n",
        "utf-8",
    )
    return tmp_path


def bag(feature: SparseFeature, sample: int) -> list[int]:
    return feature.gather(torch.tensor([sample]))[0].tolist()


def same(one: Batch, other: Batch) -> bool:
    return (
        torch.equal(one.dense_features, other.dense_features)
        and one.sparse_features.keys() == other.sparse_features.keys()
        and torch.equal(one.sparse_features.values(), other.sparse_features.values())
        and torch.equal(one.sparse_features.lengths(), other.sparse_features.lengths())
        and torch.equal(one.labels, other.labels)
    )


def test_movielens_features(folder: Path) -> None:
    data = movielens.load(folder)
    assert data.labels.tolist() == [1, 0, 1, 0, 0]
    assert data.table_sizes == {
        "user": 3, "item": 3, "age": 2, "gender": 2, "occupation": 2, "zip_prefix": 2,
        "release_year": 3, "genres": 4, "hour": 24, "weekday": 7,
    }  # fmt: skip
    sparse = {feature.name: feature for feature in data.sparse}
    assert sparse["user"].values.tolist() == [1, 0, 1, 2, 0]
    assert sparse["item"].values.tolist() == [1, 0, 0, 2, 0]
    assert sparse["zip_prefix"].values.tolist() == [1, 0, 1, 0, 0], "three characters count"
    assert sparse["hour"].values.tolist() == [15, 15, 15, 15, 15]
    assert sparse["weekday"].values.tolist() == [3, 4, 4, 3, 5]
    assert [bag(sparse["genres"], n) for n in range(5)] == [[3], [0, 1, 2], [0, 1, 2], [], [0, 1, 2]]
    assert [name for name, feature in sparse.items() if feature.multi_hot] == ["genres"]


def test_movielens_dense_features_look_back_only(folder: Path) -> None:
    data = movielens.load(folder)
    column = dict(zip(data.dense_names, data.dense.T, strict=True))
    torch.testing.assert_close(column["age"], torch.tensor([0.53, 0.24, 0.53, 0.24, 0.24]))
    years = torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0])  # unknown year: 0
    torch.testing.assert_close(column["film age"], years.log1p())
    assert column["genres"].tolist() == [1, 3, 3, 0, 3]
    for name, expected in (
        ("days as user", [0, 0, 1, 0, 1]),
        ("user ratings", [0, 0, 1, 0, 1]),
        ("film ratings", [0, 0, 1, 0, 2]),
    ):
        torch.testing.assert_close(column[name], torch.tensor(expected).log1p())


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("inter", INTER + "8\t10\t4\n", "2: 3 tab-separated fields, expected 4 .user_id, item_id"),
        ("inter", INTER + "8\t10\tfour\t1\n", "2: rating is 'four', expected a number"),
        ("inter", INTER + "8\t10\t4\t1\n8\t11\t4\t1\n", "3: item_id '11' is not in ml-100k.item"),
        ("inter", "user_id\titem_id:token\n", "1: header field 'user_id', expected a new name:type"),
        ("inter", INTER.replace("rating", "stars"), "1: no column 'rating'; found user_id, item_id, stars"),
        ("user", USER + "7\t1\tM\tx\t0\n" * 2, "3: user_id '7' for the second time"),
    ],
)
def test_movielens_malformed(folder: Path, name: str, text: str, message: str) -> None:
    (folder / f"ml-100k.{name}").write_text(text, "utf-8")
    with pytest.raises(DataError, match=rf"ml-100k\.{name}:{message}"):
        movielens.load(folder)


def test_movielens_wrong_encoding(folder: Path) -> None:
    (folder / "ml-100k.item").write_bytes((ITEM + "10\tNénette\t1996\tDrama\n").encode("latin-1"))
    with pytest.raises(DataError, match=r"ml-100k\.item:2: not UTF-8 text \(byte 0xe9\)"):
        movielens.load(folder)


def test_movielens_accepts_windows_line_ends_and_byte_order_mark(folder: Path) -> None:
    expected = movielens.load(folder)
    for path in list(folder.iterdir()):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    every = torch.arange(len(expected))
    assert same(movielens.load(folder).batch(every), expected.batch(every))


def test_recbole_is_found_without_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tmp_path / "recbole" / "dataset_example" / "ml-100k"
    files.mkdir(parents=True)
    (tmp_path / "recbole" / "__init__.py").write_text("raise RuntimeError('imported')")
    (files / "ml-100k.inter").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert movielens.find_files() == files
    assert "recbole" not in sys.modules


def test_recbole_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"recbole is not installed(.|\n)*pip install --no-deps recbole==[\d.]+$"):
        movielens.load()


def test_recbole_without_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recbole").mkdir()
    (tmp_path / "recbole" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match="is installed, but has no dataset_example/ml-100k"):
        movielens.load()


def criteo_row(label: str = "1", dense: str = "3", category: str = "05db9164") -> list[str]:
    return [label, dense, *["2"] * 12, category, *["ff"] * 25]


def test_criteo_tsv(tmp_path: Path) -> None:
    rows = [criteo_row(), criteo_row("0", "", ""), criteo_row("0", "-2", "0000000a")]
    path = tmp_path / "train.txt"
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    data = criteo.load(path, rows=100)
    assert len(data) == 3
    assert data.labels.tolist() == [1, 0, 0]
    assert data.dense.shape == (3, 13)
    torch.testing.assert_close(data.dense[:, 0], torch.tensor([math.log(4), 0.0, 0.0]))
    assert data.sparse[0].values.tolist() == [1 + 0x05DB9164 % 99, 0, 1 + 10 % 99]
    assert data.sparse[25].values.tolist() == [1 + 0xFF % 99] * 3
    assert set(data.table_sizes.values()) == {100}
    assert len(criteo.load(path, limit=2)) == 2

    packed = tmp_path / "train.txt.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    every = torch.arange(3)
    assert same(criteo.load(packed, rows=100).batch(every), data.batch(every))


def test_criteo_csv_with_header_in_any_order(tmp_path: Path) -> None:
    plain, header = tmp_path / "plain.tsv", tmp_path / "header.csv"
    rows = [criteo_row(), criteo_row("0", "260.0", "")]
    plain.write_text("\n".join("\t".join(row) for row in rows))
    header.write_text("\n".join(",".join(["x", *reversed(row)]) for row in [list(criteo.COLUMNS), *rows]))
    every = torch.arange(2)
    assert same(criteo.load(header).batch(every), criteo.load(plain).batch(every))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (criteo_row()[1:], "39 tab-separated fields, expected 40 .label, 13 integers, 26 hexadecimal"),
        (criteo_row("2"), "label is '2', expected 0 or 1"),
        (criteo_row(dense="many"), "I1 is 'many', expected a number or nothing"),
        (criteo_row(dense="nan"), "I1 is 'nan', expected a number or nothing"),
        (criteo_row(category="0x1f"), "C1 is '0x1f', expected a hexadecimal category or nothing"),
    ],
)
def test_criteo_malformed(tmp_path: Path, row: list[str], message: str) -> None:
    path = tmp_path / "t.tsv"
    path.write_text("\t".join(criteo_row()) + "\n" + "\t".join(row) + "\n")
    with pytest.raises(DataError, match=rf"t\.tsv:2: {message}"):
        criteo.load(path)


def test_criteo_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent: cannot be read: No such file"):
        criteo.load(tmp_path / "absent")
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match=r"empty: no rows"):
        criteo.load(tmp_path / "empty")
    (tmp_path / "header").write_text("label,I1\n0,1\n")
    with pytest.raises(DataError, match=r"header:1: the header has no I2, I3"):
        criteo.load(tmp_path / "header")
    (tmp_path / "fake.gz").write_text("not gzip")
    with pytest.raises(DataError, match=r"fake\.gz: cannot be read"):
        criteo.load(tmp_path / "fake.gz")


@pytest.fixture
def numbered() -> RecDataset:
    """26 samples that carry their own number; sample n has n % 3 ids in its bag."""
    count = 26
    return RecDataset(
        "numbered",
        ("n",),
        torch.arange(count, dtype=torch.float32)[:, None],
        (
            SparseFeature.single("one", count, torch.arange(count)),
            SparseFeature.bags("many", count, [[n] * (n % 3) for n in range(count)]),
        ),
        torch.arange(count).remainder(2).float(),
    )


def test_batch_contents(numbered: RecDataset) -> None:
    batch = numbered.batch(torch.tensor([5, 3, 4, 5]))
    assert batch.dense_features.tolist() == [[5], [3], [4], [5]]
    assert batch.labels.tolist() == [1, 1, 0, 1]
    assert batch.sparse_features.keys() == ["one", "many"]
    assert batch.sparse_features["one"].values().tolist() == [5, 3, 4, 5]
    assert batch.sparse_features["many"].lengths().tolist() == [2, 0, 1, 2]
    assert batch.sparse_features["many"].values().tolist() == [5, 5, 4, 5, 5]


def test_batches_repeat_and_differ_by_seed_and_epoch(numbered: RecDataset) -> None:
    first = list(numbered.batches(8, seed=1))
    assert len(first) == 3, "the ragged tail is dropped"
    assert all(same(a, b) for a, b in zip(first, numbered.batches(8, seed=1), strict=True))
    assert not same(first[0], next(numbered.batches(8, seed=2)))
    assert not same(first[0], next(numbered.batches(8, seed=1, epoch=1)))
    seen = torch.cat([batch.dense_features for batch in first])
    assert seen.unique().numel() == 24


def test_ranks_share_every_global_batch_contiguously(numbered: RecDataset) -> None:
    dealt = [list(numbered.batches(8, 1, rank=rank, world_size=4)) for rank in range(4)]
    for step, whole in enumerate(numbered.batches(8, 1)):
        shares = [steps[step] for steps in dealt]
        assert torch.equal(torch.cat([share.dense_features for share in shares]), whole.dense_features)
        assert torch.equal(torch.cat([share.labels for share in shares]), whole.labels)
        for key in ("one", "many"):
            parts = [share.sparse_features[key] for share in shares]
            assert torch.equal(torch.cat([p.values() for p in parts]), whole.sparse_features[key].values())
            assert torch.equal(torch.cat([p.lengths() for p in parts]), whole.sparse_features[key].lengths())


def test_uneven_deals_are_refused(numbered: RecDataset) -> None:
    assert deal(torch.arange(6), 1, 3).tolist() == [2, 3]
    with pytest.raises(DataError, match="6 samples cannot be dealt evenly to 4 ranks"):
        deal(torch.arange(6), 0, 4)
    with pytest.raises(DataError, match="batch size 6 is not divisible by 4 ranks"):
        next(numbered.batches(6, 0, world_size=4))


def test_split_is_a_seeded_partition(numbered: RecDataset) -> None:
    train, test = numbered.split(0.25, seed=3)
    assert (len(train), len(test)) == (20, 6)
    both = torch.cat([train.dense, test.dense]).flatten()
    assert both.sort().values.tolist() == list(range(26))
    assert both.tolist() != list(range(26))
    assert torch.equal(numbered.split(0.25, seed=3)[1].dense, test.dense)
    assert not torch.equal(numbered.split(0.25, seed=4)[1].dense, test.dense)
    with pytest.raises(DataError, match="1 samples cannot be split"):
        numbered.take(torch.tensor([0])).split()


def test_inconsistent_data_is_refused(numbered: RecDataset) -> None:
    with pytest.raises(DataError, match=r"ids must be in \[0, 2\)"):
        SparseFeature.single("f", 2, torch.tensor([0, 2]))
    with pytest.raises(DataError, match="feature 'f' has 3 bags, expected 26"):
        RecDataset(
            "bad",
            numbered.dense_names,
            numbered.dense,
            (SparseFeature.single("f", 3, torch.arange(3)),),
            numbered.labels,
        )
