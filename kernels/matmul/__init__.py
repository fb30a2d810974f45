"""Products of two matrices: kernels composed of schedules, prologues, mainloops and epilogues."""
