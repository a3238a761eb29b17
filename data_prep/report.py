"""What a command says of what it made."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from data_prep.progress import human_bytes

if TYPE_CHECKING:
    from data_prep.manifest import Manifest


def say(built: bool, what: str, parts: Sequence[str]) -> None:
    print(f"{what}: {'' if built else 'already complete, nothing to do; '}{', '.join(parts)}")


def dataset_parts(manifest: "Manifest") -> list[str]:
    size = human_bytes(manifest.bin_bytes + manifest.idx_bytes)
    counts = [f"{manifest.documents:,} documents", f"{manifest.tokens:,} tokens"]
    return [*counts, f"{manifest.dtype}, {size}", f"tokenizer {manifest.tokenizer['name']}"]
