"""Fixtures that all tests may use."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ranks import Ranks

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several processes share the cores; threads that wait for each other would only take them away.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Graphs, symbols and modules of all tests so far would be looked through again and again, for a sixth of the time of a run.
gc.set_threshold(200_000, 20, 100)


# Files whose tests share a fixture that is costly to make.
_TOGETHER = ("test_capture_export", "test_mutants", "test_plain_docs", "test_render")


# Before xdist's own hook, which reads the marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes run the tests, all that need several ranks run in one of them, so that ranks are started once."""
    for item in items:
        if {"ranks", "pool"} & set(getattr(item, "fixturenames", ())) or item.get_closest_marker("multi_rank"):
            item.add_marker(pytest.mark.xdist_group("ranks"))
        elif item.path.stem in _TOGETHER:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="session")
def pool() -> Iterator[Ranks]:
    """The session's pool of ranks; it starts with the first test that uses it."""
    from ranks import Ranks

    pool = Ranks(8)
    yield pool
    pool.close()


@pytest.fixture
def ranks(pool: Ranks) -> Iterator[Ranks]:
    """Run functions on real gloo processes: ``ranks(4, function, *args)`` returns what each of four ranks returned.

    This process computes with one thread meanwhile, as the ranks do: it is what their bits are compared with, and it shares its
    cores with them.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield pool
    torch.set_num_threads(threads)
