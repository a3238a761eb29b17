"""Hybrid Megatron: training long-context hybrid language models on megatron-core.

The packages stand in the order in which a run passes them: config, platform, parallel, model (with ops), data, training, checkpoint.
"""
