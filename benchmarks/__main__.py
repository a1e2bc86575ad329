"""``python -m benchmarks [NAME ...] [--quick]``: print figures beside their targets."""

from __future__ import annotations

import argparse
import importlib
import logging
import time

BENCHMARKS = {
    "compile-time": "compile_time",
    "compile-steps": "compile_steps",
    "stages": "stages",
    "memory": "memory",
    "overhead": "overhead",
    "torch-compile": "torch_compile",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Print figures beside their targets.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"benchmarks to run, by default all: {', '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="smaller cases and fewer repetitions; figures are rougher")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called '{unknown[0]}'; there are {', '.join(BENCHMARKS)}")

    # torch warns of each library that asks whether fx is tracing, once per process.
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    from .report import machine

    print(machine())
    start = time.perf_counter()
    for name in options.names or BENCHMARKS:
        importlib.import_module(f"benchmarks.{BENCHMARKS[name]}").run(options.quick)
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
