"""Everything before a `.bin`/`.idx` pair exists: corpora in, tokenised documents in Megatron's indexed format out.

Commands: `python -m data_prep {fetch-sample,train-tokenizer,tokenize,split,build-cache}`. Nothing here imports torch; only `build-cache`
does, through `hybrid_megatron`, when it runs.
"""
