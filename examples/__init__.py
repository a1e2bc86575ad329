"""Examples of `dmt_compile`: `demo.py` is what `make demo` runs."""
