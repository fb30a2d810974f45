"""Training examples: each is one short file to read from top to bottom; settings, data and the loop are shared."""
