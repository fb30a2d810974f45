"""Benchmark and verification: ``python -m fusedlayers.bench NAME``. Correct first, then timed, then shown."""
