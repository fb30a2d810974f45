"""Every product of two matrices: schedules, mainloops, prologues and epilogues that are put together to kernels."""
