"""Datasets, before training: corpora in, tokenised documents in Megatron's indexed format out, and tools for these.

Commands: `python -m data_prep {fetch-sample,train-tokenizer,tokenize,split,merge,blend,verify,stats,inspect,build-cache}`. Nothing here
imports torch; only `build-cache` does, through `hybrid_megatron`, when it runs.
"""
