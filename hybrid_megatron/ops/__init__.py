"""Recurrences of the linear mixers: the definition, a chunked form in torch, and FLA's kernels behind one function each."""
