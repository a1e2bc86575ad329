"""What compilation and the compiled program cost. Run as ``python -m benchmarks``; nothing here asserts a time."""
