"""What the compiled graphs run: id routing, pooled lookups, exchanges, process groups and the per-rank module."""
