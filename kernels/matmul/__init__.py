"""Every product of two matrices, with what happens to it before it reaches memory: ``generic`` is portable Triton."""
