"""`train-tokenizer`: a SentencePiece byte-pair tokenizer from a source of documents.

Text is taken as it is: no Unicode normalisation, no space put in front, runs of spaces and line feeds kept. So decode(encode(text)) is
the text, except that U+2581, SentencePiece's own sign for a space, comes back as a space.
"""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.manifest import SUFFIX, differences, sha256_file
from data_prep.progress import Progress
from data_prep.publish import Staging
from data_prep.sources import Record, Source
from data_prep.tokenizers import SentencePieceTokenizer
from hybrid_megatron.errors import DataError

UNK, BOS, EOS = 0, 1, 2
# SentencePiece skips longer "sentences" without a word; characters take up to four bytes.
PIECE_CHARACTERS = 4_000
SETTINGS: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "unk_id": UNK,
    "bos_id": BOS,
    "eos_id": EOS,
    "pad_id": -1,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "user_defined_symbols": ["\n"],
    "character_coverage": 0.9999,
    "max_sentence_length": 4 * PIECE_CHARACTERS,
    "num_threads": 1,  # written into the model file, so more would change its bytes
    "minloglevel": 2,
}


def train_tokenizer(
    source: Source, vocab_size: int, output: Path, max_characters: int, overwrite: bool = False
) -> tuple[dict[str, Any], bool]:
    """Train on the first `max_characters` of the source and write `output` (`.model`) with a manifest beside it.

    Returns the manifest and whether the tokenizer was trained now. The same input gives the same bytes. Raises `DataError` if the text
    cannot yield `vocab_size` words or another tokenizer is in the way.
    """
    import sentencepiece

    if output.suffix != ".model":
        raise DataError(f"--output {output} should be a file that ends in .model, such as {output.with_suffix('.model')}")
    manifest: dict[str, Any] = {
        "format": 1,
        "source": source.describe(),
        "options": {"vocab_size": vocab_size, "max_characters": max_characters, "settings": SETTINGS},
    }
    with Staging(output.parent, output.name) as staging:
        finished = _finished(output, manifest, overwrite, staging.was_interrupted)
        if finished is not None:
            return finished, False
        counts = {"documents": 0, "characters": 0, "unusable_records": 0}
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_pieces(source, max_characters, counts), model_writer=model, vocab_size=vocab_size, **SETTINGS
            )
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1] if counts["documents"] else "there is no usable document in --input"
            raise DataError(f"--vocab-size {vocab_size} cannot be trained on {counts['characters']} characters: {reason}") from None
        tokenizer = SentencePieceTokenizer(output.name, model.getvalue(), threads=1)
        manifest |= {"tokenizer": tokenizer.describe(), "trained_on": counts}
        staging.path(output.name).write_bytes(model.getvalue())
        staging.write_text(f"{output.name}{SUFFIX}", json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
        staging.publish([output.name], last=[f"{output.name}{SUFFIX}"])
    return manifest, True


def _finished(output: Path, manifest: dict[str, Any], overwrite: bool, was_interrupted: bool) -> dict[str, Any] | None:
    path = Path(f"{output}{SUFFIX}")
    if overwrite or was_interrupted and not path.exists() or not output.exists():
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
        old, new = ({key: values[key] for key in ("source", "options")} for values in (found, manifest))
        changed = differences(old, new)
        if found["tokenizer"]["fingerprint"] != f"sha256:{sha256_file(output)}":
            changed.append("the file itself, which is no longer what was trained")
    except (OSError, ValueError, KeyError, TypeError):
        changed = ["an unknown way, as it has no readable manifest"]
    if changed:
        raise DataError(
            f"{output}: another tokenizer is there and differs in {'; '.join(changed)}; add --overwrite or choose another --output"
        )
    return found


def _pieces(source: Source, max_characters: int, counts: dict[str, int]) -> Iterator[str]:
    """Lines, cut where they are longer than the trainer reads. Unusable records are counted; `tokenize` lists them one by one."""
    progress = Progress("reading", source.total_bytes)
    for record in source.records():
        progress.update(source.bytes_read, counts["documents"])
        if not isinstance(record, Record):
            counts["unusable_records"] += 1
            continue
        counts["documents"] += 1
        counts["characters"] += len(record.text)
        for line in record.text.split("\n"):
            for start in range(0, len(line), PIECE_CHARACTERS):
                yield line[start : start + PIECE_CHARACTERS]
        if counts["characters"] >= max_characters:
            break
    progress.close()
