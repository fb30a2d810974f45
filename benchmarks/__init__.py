"""The benchmarks that only the documentation needs, and their results; a clone has them, a wheel does not."""
