"""The corpora that `fetch` knows: where they lie on the Hugging Face hub, which files are their shards, and how many tokens a byte holds.

Tokens are those of Llama 3's tokenizer, bytes those of the files as they lie on the hub, compressed. The ratios are estimates:

dclm          DCLM-Baseline (Li et al. 2024, arXiv 2406.11794). The pinned revision has 27,838 shards of 7,196,105,155,016 bytes; its card
              says 4T tokens of GPT-NeoX's tokenizer, 0.556 a byte. Llama 3's larger vocabulary needs some 6% fewer: 0.52.
fineweb_edu   FineWeb-Edu (Penedo et al. 2024, arXiv 2406.17557), the dumps under data/; the samples repeat them and are left out. The
              sample of 10B tokens (GPT-2) has 28.5 GB, 0.351 a byte; with Llama 3's some 6% fewer: 0.33.
pg19          PG-19 (Rae et al. 2019, arXiv 1911.05507). DeepMind's own repository holds a script instead of the text, so this is the
              Parquet copy emozilla/pg19: 23 shards of 11.45 GB of text in some 6.5 GB; English books have 4.2 bytes a token: 0.42. Its
              training part alone; `--pattern 'data/test-*.parquet'` fetches the 100 test books.
longwanjuan   LongWanjuan (Lv et al. 2024, arXiv 2402.13583) is published on OpenDataLab. Whether the hub has a faithful mirror is not
              known, so none is named: `--repository` names one, and the choice is the user's. Names of its files are not certain either;
              any JSON lines are taken. Plain English or Chinese text has about 4.2 bytes a token, 0.24; gzip and zstandard make it 2.7
              times as dense, 0.65.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Corpus:
    """One corpus. `patterns` are globs over paths in the repository, in which * also matches /; `tokens_per_byte` goes by file suffix."""

    repository: str | None
    revision: str
    patterns: tuple[str, ...]
    tokens_per_byte: Mapping[str, float]
    licence: str
    home: str
    text_key: str = "text"


CORPORA = {
    "dclm": Corpus(
        repository="mlfoundations/dclm-baseline-1.0",
        revision="a3b142c183aebe5af344955ae20836eb34dcf69b",
        patterns=("global-shard_*/local-shard_*/*.jsonl.zst",),
        tokens_per_byte={".jsonl.zst": 0.52},
        licence="CC-BY-4.0",
        home="https://huggingface.co/datasets/mlfoundations/dclm-baseline-1.0",
    ),
    "longwanjuan": Corpus(
        repository=None,
        revision="main",
        patterns=("*.jsonl", "*.jsonl.gz", "*.jsonl.zst"),
        tokens_per_byte={".jsonl": 0.24, ".jsonl.gz": 0.65, ".jsonl.zst": 0.65},
        licence="CC-BY-4.0",
        home="https://opendatalab.com/OpenLMLab/LongWanjuan",
        text_key="content",
    ),
    "fineweb_edu": Corpus(
        repository="HuggingFaceFW/fineweb-edu",
        revision="87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
        patterns=("data/CC-MAIN-*/*.parquet",),
        tokens_per_byte={".parquet": 0.33},
        licence="ODC-By-1.0",
        home="https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu",
    ),
    "pg19": Corpus(
        repository="emozilla/pg19",
        revision="c021754c8e01c5b1cc83a1f549c1f97fbbb756b8",
        patterns=("data/train-*.parquet",),
        tokens_per_byte={".parquet": 0.42},
        licence="Apache-2.0",
        home="https://huggingface.co/datasets/emozilla/pg19",
    ),
}
