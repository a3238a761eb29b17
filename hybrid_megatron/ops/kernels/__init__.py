"""Our own Triton kernels for CUDA, each behind the operation of its name in ops/, which says what it computes and for whom."""
