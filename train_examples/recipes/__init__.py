"""Fused layers under common training tools, one short file each; all train the same small Llama."""
