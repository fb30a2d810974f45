"""Fused layers under the tools that people train with, one short file each; all train the same small Llama."""
