"""A tiny model and tiny data with the shape of the real ones: every mixer, several documents a sample, milliseconds a step."""

from pathlib import Path

import numpy as np

from data_prep.indexed_dataset import IndexedDatasetWriter, token_dtype
from data_prep.manifest import Manifest, manifest_path
from hybrid_megatron.config import RunConfig, load_recipe

VOCAB = 256
TOKENIZER = {"name": "tiny", "kind": "sentencepiece", "fingerprint": "sha256:" + "0" * 64, "vocab_size": VOCAB, "bos": 1, "eos": 2}

# Enough for all layouts of four ranks: 4 layers, 4 heads (2 key-value heads), 8 samples a step.
RECIPE = """
bases: [base]
model:
  {num_layers: 4, hidden_size: 32, num_heads: 4, num_kv_heads: 2, head_dim: 8, ffn_size: 48, vocab_size: 256}
pattern:
  - {mixer: gdn}
  - {mixer: attention, position: rope}
  - {mixer: gdn}
  - {mixer: attention, position: nope}
train: {tokens: 10_240, context: 64, batch_tokens: 512, micro_batch: 2, precision: fp32}
optimizer: {peak_lr: 3.0e-3, weight_decay: 0.1}
schedule: {warmup_tokens: 1_024}
validation: {interval_steps: 10, samples: 9}
checkpoint: {interval_steps: 10}
tracking: {wandb: disabled}
"""


def make_tiny_data(folder: Path) -> Path:
    """Documents of 5 to 60 tokens from a random word chain, so that there is something to learn; builds the index maps too."""
    random = np.random.default_rng(0)
    follower = random.integers(3, VOCAB, VOCAB)
    for name, count in (("train", 300), ("valid", 60)):
        prefix = folder / name
        writer = IndexedDatasetWriter(folder / f"{name}.bin", folder / f"{name}.idx", token_dtype(VOCAB))
        for _ in range(count):
            words = [int(random.integers(3, VOCAB))]
            for _ in range(int(random.integers(3, 58))):
                words.append(int(follower[words[-1]]) if random.random() < 0.7 else int(random.integers(3, VOCAB)))
            writer.add([1, *words, 2])
        manifest = Manifest.of(
            writer.finish(), tokenizer=TOKENIZER, adds_bos=True, adds_eos=True, source={"kind": "made", "inputs": []}, options={}
        )
        manifest_path(prefix).write_text(manifest.to_json())
    (folder / "tiny.yaml").write_text(RECIPE)
    from hybrid_megatron.data import build_index_caches

    build_index_caches(tiny_config(folder, "run_dir=unused"))
    return folder


def tiny_words(folder: Path, *overrides: str) -> list[str]:
    """The recipe and overrides as typed on a command line."""
    return [str(folder / "tiny.yaml"), f"data.train={folder / 'train'}", f"data.valid={folder / 'valid'}", *overrides]


def tiny_config(folder: Path, *overrides: str) -> RunConfig:
    return load_recipe(tiny_words(folder, *overrides))
