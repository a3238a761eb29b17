"""Checkpoints: save, load, choose, retain.

`store.py` is the folder and its rules, `save_load.py` the contents, `rng.py` random states, `untrusted.py` keeps code in
files from running.
"""
