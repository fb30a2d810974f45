"""Training examples: each is one short file that is read from top to bottom; settings, data and the loop are shared."""
