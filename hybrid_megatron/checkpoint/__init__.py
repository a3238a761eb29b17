"""Checkpoints: save, load, choose, retain.

store.py      the folder: names, markers, retention          form.py         rolling and permanent, and the layouts each loads under
content.py    what a checkpoint holds; rng.py random states  dp_reshardable.py   the rolling form, where megatron-core's own is not enough
saver.py      one save at a time, beside training            shards.py, host_memory.py, writer.py   its parts: plan, copy, write
sizes.py      on disk and in host memory
choose.py     the newest whole one                           load.py         into a trainer, or the parameters alone
integrity.py  hashes of the files                            untrusted.py    keeps code in files from running
inventory.py  list, verify and prune, for a person
"""
