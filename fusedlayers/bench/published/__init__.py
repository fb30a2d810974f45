"""The benchmarks that nothing but the tables of docs/ needs; a clone has them, a wheel does not."""
