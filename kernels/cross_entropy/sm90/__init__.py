"""Tiles of logits on Hopper, from a product that never leaves the chip: their statistics, and their gradient."""
