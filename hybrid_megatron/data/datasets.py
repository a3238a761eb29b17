"""One epoch of samples over one indexed dataset: megatron-core's GPTDataset, from index maps that `data_prep build-cache` made beforehand,
or whole documents, which need no maps.

A training run never builds index maps: many processes on a shared file system would race for them. One epoch's maps depend on the dataset,
the context and the seed alone, so one cache serves every token budget and every layout.
"""

import hashlib
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from torch import Tensor

import hybrid_megatron.platform  # noqa: F401  before megatron.core
from data_prep.manifest import manifest_path, read_manifest
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.data.vocabulary import check_ids
from hybrid_megatron.data.whole_documents import WholeDocuments
from hybrid_megatron.errors import DataError, NoIndexMaps
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import _INDEX_HEADER, DType, IndexedDataset
from megatron.core.datasets.utils import Split

SPLITS = ("train", "valid")
_HEADER = struct.Struct("<9sQBQQ")  # of a .idx: magic, version, type of a token, number of sequences, number of document borders


@dataclass(frozen=True)
class Dataset:
    """One epoch of samples."""

    key: str
    """What sentences about it begin with."""
    prefix: Path
    samples: GPTDataset | WholeDocuments
    fingerprint: str
    """Identity of the token files, stored in checkpoints: a run does not resume on other data."""
    words: int
    """Of the model's vocabulary."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """tokens and labels [context] int64, and under `data.document_mask` cu_seqlens. Raises DataError for an id that is no word."""
        sample = self.samples[index]
        for name in ("tokens", "labels"):
            check_ids(sample[name], self.words, self.key, self.prefix)
        return sample


def open_dataset(config: RunConfig, split: str) -> Dataset:
    """Open `data.train` or `data.valid` for training. Raises DataError: missing or damaged files, another tokenizer, too few
    tokens, no index maps."""
    prefix = _prefix(config, split)
    if config.data.whole_documents:
        return _open_whole_documents(config, split, prefix)
    key = f"data.{split}={prefix}"
    fingerprint = _check_files(config, key, prefix)
    cache = _cache_dir(config, prefix)
    # defer_npy_index_mmap makes no maps and reads none yet, but knows their names and the number of samples
    named = _gpt_dataset(config, prefix, fingerprint, cache, deferred=True)
    _check_enough(config, split, prefix, named)
    if split == "train" and not config.data.repeat:
        _check_once_through(config, prefix, len(named))
    if not all(path.is_file() for path in _map_files(named)):
        raise NoIndexMaps(f"{key}: there are no index maps for train.context={config.train.context} and seed={config.seed} in {cache}")
    for path in _map_files(named):
        try:
            np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{key}: the index map {path} is damaged ({error}); remove it and run build-cache again") from None
    return Dataset(key, prefix, named, fingerprint, config.model.vocab_size)


def _open_whole_documents(config: RunConfig, split: str, prefix: Path) -> Dataset:
    key, context = f"data.{split}={prefix}", config.train.context
    stream = open_tokens(config, key, prefix)
    samples = WholeDocuments(stream.tokens, stream.borders, context, config.seed)
    if not len(samples):
        raise DataError(
            f"{key}: with data.whole_documents=true a sample is the beginning of one document, and none holds the {context + 1:,} tokens "
            f"of train.context={context}, the longest {samples.longest:,}; lower train.context, add longer documents, or set it to false"
        )
    if split == "train" and not config.data.repeat:
        _check_once_through(config, prefix, len(samples))
    return Dataset(key, prefix, samples, stream.fingerprint, config.model.vocab_size)


def files_of(dataset: Dataset) -> list[Path]:
    """Every file that is read when `dataset` is: tokens, their index, the manifest if there is one, index maps."""
    prefix = dataset.prefix
    files = [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]
    files += [manifest_path(prefix)] if manifest_path(prefix).is_file() else []
    return files + (_map_files(dataset.samples) if isinstance(dataset.samples, GPTDataset) else [])


def train_fingerprint(config: RunConfig) -> str:
    """Identity of `data.train`, without its index maps. Raises DataError."""
    prefix = _prefix(config, "train")
    return _check_files(config, f"data.train={prefix}", prefix)


@dataclass(frozen=True)
class TokenStream:
    """The tokens of an indexed dataset, one document after the other, as they lie in its file."""

    key: str
    """What sentences about it begin with."""
    prefix: Path
    tokens: np.ndarray
    borders: np.ndarray
    """int64 [documents + 1]: where each document begins, and the number of tokens."""
    fingerprint: str
    words: int
    """Of the model's vocabulary."""


def open_tokens(config: RunConfig, key: str, prefix: Path) -> TokenStream:
    """Open a dataset without index maps, to be read in its own order. Raises DataError in sentences that begin with `key`."""
    fingerprint = _check_files(config, key, prefix)
    indexed = IndexedDataset(str(prefix), mmap=True)
    ends = np.concatenate(([0], np.cumsum(indexed.sequence_lengths, dtype=np.int64)))
    borders = ends[indexed.document_indices]
    tokens = np.memmap(f"{prefix}.bin", indexed.index.dtype, mode="r") if borders[-1] else np.zeros(0, indexed.index.dtype)
    return TokenStream(key, prefix, tokens, borders, fingerprint, config.model.vocab_size)


def build_index_caches(config: RunConfig) -> list[Path]:
    """Make the index maps of a recipe's datasets where they are missing; returns the cache folders, none for whole documents, which need no
    maps. For data_prep, one process."""
    folders = []
    for split in SPLITS:
        if split == "valid" and config.data.valid is None:
            continue
        prefix = _prefix(config, split)
        if config.data.whole_documents:
            _open_whole_documents(config, split, prefix)
            continue
        fingerprint = _check_files(config, f"data.{split}={prefix}", prefix)
        cache = _cache_dir(config, prefix)
        try:
            named = _gpt_dataset(config, prefix, fingerprint, cache, deferred=True)
            _check_enough(config, split, prefix, named)
            cache.mkdir(parents=True, exist_ok=True)
            if not all(path.is_file() for path in _map_files(named)):
                with TemporaryDirectory(dir=cache, prefix=".making-") as making:  # moved when whole: a killed build leaves no half map
                    _gpt_dataset(config, prefix, fingerprint, Path(making), deferred=False)
                    for file in Path(making).iterdir():
                        file.replace(cache / file.name)
        except OSError as error:
            raise DataError(f"data.{split}: cannot write index maps into {cache}: {error.strerror}; set data.cache_dir") from None
        folders.append(cache)
    return folders


def _prefix(config: RunConfig, split: str) -> Path:
    return Path(getattr(config.data, split))


def _cache_dir(config: RunConfig, prefix: Path) -> Path:
    return Path(config.data.cache_dir) if config.data.cache_dir else prefix.parent / "cache"


def _check_enough(config: RunConfig, split: str, prefix: Path, dataset: GPTDataset) -> None:
    """megatron-core also needs the token after a sample's last."""
    if len(dataset) < 1:
        held = int(dataset.dataset.sequence_lengths.sum(dtype=np.int64))
        raise DataError(
            f"data.{split}={prefix}: it holds {held:,} tokens, fewer than the {config.train.context + 1:,} of one sample of "
            f"train.context={config.train.context}; lower train.context or add documents"
        )


def _check_once_through(config: RunConfig, prefix: Path, samples: int) -> None:
    """For a run that may not go through its training data again. Its last step is a whole one."""
    plan, once = config.batch_plan, samples * config.train.context
    if plan.total_tokens > once:
        possible = plan.tokens(plan.steps_within(once))
        raise DataError(
            f"data.repeat=false: the {plan.num_steps:,} steps of train.tokens={config.train.tokens} take {plan.total_tokens:,} tokens, and "
            f"data.train={prefix} holds {once:,} in {samples:,} samples of train.context={config.train.context}; "
            + (f"set train.tokens to {possible} or less" if possible else f"lower train.batch_tokens={config.train.batch_tokens}")
            + ", add documents, or set data.repeat=true"
        )


def _map_files(dataset: GPTDataset) -> list[Path]:
    """The index maps of a dataset opened with `deferred`."""
    return [Path(path) for path in (dataset.path_to_document_index, dataset.path_to_sample_index, dataset.path_to_shuffle_index)]


def _gpt_dataset(config: RunConfig, prefix: Path, fingerprint: str, cache: Path, deferred: bool) -> GPTDataset:
    settings = GPTDatasetConfig(
        random_seed=config.seed,
        sequence_length=config.train.context,
        blend_per_split=[([str(prefix)], None), None, None],
        path_to_cache=str(cache.resolve()),
        tokenizer=_NoTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        inter_document_masking=config.data.document_mask,
        defer_npy_index_mmap=deferred,
    )
    indexed = IndexedDataset(str(prefix), mmap=True)
    documents = np.arange(len(indexed.document_indices) - 1, dtype=np.int32)
    # Index maps go by what the dataset holds, not by where it lies. Each file is a whole "train" split to megatron-core.
    return GPTDataset(indexed, f"{prefix.name}-{fingerprint[:16]}", documents, None, Split.train, settings)


class _NoTokenizer:
    """GPTDataset asks its tokenizer for these; nothing here depends on their values."""

    vocab_size = None
    eod = None
    unique_identifiers = {"class": "none"}


def _check_files(config: RunConfig, key: str, prefix: Path) -> str:
    """Refuse what would fail or mislead later, in sentences that begin with `key`; returns the fingerprint of the tokens."""
    for suffix in (".bin", ".idx"):
        if not prefix.with_name(prefix.name + suffix).is_file():
            raise DataError(
                f"{key}: {prefix}{suffix} does not exist; make the dataset with python -m data_prep tokenize, or correct the path"
            )
    bin_file, idx_file = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
    try:
        held = _bytes_described(idx_file)
    except (OSError, ValueError) as error:
        raise DataError(f"{key}: {idx_file} is damaged ({error}); make the dataset again") from None
    size = bin_file.stat().st_size
    if size != held:
        raise DataError(
            f"{key}: {bin_file} has {size:,} bytes and its index describes {held:,}; the file is truncated or belongs to another index; "
            "make the dataset again"
        )
    manifest_file = manifest_path(prefix)
    if not manifest_file.is_file():
        warnings.warn(f"{key}: there is no {manifest_file.name} beside it, so neither its tokenizer nor its hashes can be checked")
        return hashlib.sha256(idx_file.read_bytes()).hexdigest()
    manifest = read_manifest(prefix)
    _check_tokenizer(config, key, manifest.tokenizer)
    return manifest.bin_sha256


def _bytes_described(idx_file: Path, block: int = 1 << 22) -> int:
    """Size of the `.bin` that an index describes. Raises ValueError unless sequences follow each other and documents are made of them.

    megatron-core's own reader would believe any positions, and fails on a damaged header with remarks of its own.
    """
    content = np.memmap(idx_file, mode="r")
    if len(content) < _HEADER.size:
        raise ValueError("it is shorter than a header")
    magic, version, code, sequences, documents = _HEADER.unpack(content[: _HEADER.size].tobytes())
    if magic != _INDEX_HEADER or version != 1 or code not in {kind.value for kind in DType}:
        raise ValueError("it does not begin as an index does")
    if len(content) != _HEADER.size + sequences * (4 + 8) + documents * 8:
        raise ValueError(f"it has {len(content):,} bytes, which is not what {sequences:,} sequences and {documents:,} documents take")
    lengths, pointers, borders = (
        np.frombuffer(content, kind, count, _HEADER.size + skipped)
        for kind, count, skipped in ((np.int32, sequences, 0), (np.int64, sequences, 4 * sequences), (np.int64, documents, 12 * sequences))
    )
    if sequences < 1 or documents < 2 or pointers[0] != 0 or borders[0] != 0 or borders[-1] != sequences:
        raise ValueError("it does not begin or end where its documents do")
    itemsize = DType.size(DType.dtype_from_code(code))
    for at in range(0, sequences, block):  # in blocks: there may be a hundred million
        ends = pointers[at : at + block] + lengths[at : at + block].astype(np.int64) * itemsize
        following = pointers[at + 1 : at + 1 + block]
        if (lengths[at : at + block] < 0).any() or (ends[: len(following)] != following).any():
            raise ValueError("its lengths and positions contradict each other")
    if any((np.diff(borders[at : at + block + 1]) < 0).any() for at in range(0, documents, block)):
        raise ValueError("its documents are out of order")
    return int(pointers[-1]) + int(lengths[-1]) * itemsize


def _check_tokenizer(config: RunConfig, key: str, made_with: dict) -> None:
    wanted = config.data.tokenizer
    if wanted is not None:
        file = Path(wanted)
        if wanted != made_with["name"] and _is_path(wanted) and not file.exists():
            raise DataError(f"data.tokenizer={wanted} does not exist; correct the path, or leave it out to take any tokenizer that fits")
        if file.is_file():
            same = "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest() == made_with["fingerprint"]
        else:
            same = wanted == made_with["name"] or ("/" in wanted and file.name == made_with["name"])
        if not same:
            raise DataError(
                f"{key}: it was made with the tokenizer {made_with['name']} ({made_with['fingerprint'][:19]}...), not with "
                f"data.tokenizer={wanted}; use the dataset's own tokenizer or make the dataset again"
            )
    if made_with["vocab_size"] > config.model.vocab_size:
        raise DataError(
            f"{key}: its tokenizer {made_with['name']} has {made_with['vocab_size']} words, more than "
            f"model.vocab_size={config.model.vocab_size}; set model.vocab_size to at least that"
        )


def _is_path(tokenizer: str) -> bool:
    """Whether this can only be meant as a path, not as a name such as llama3 or a hub's OWNER/NAME."""
    path = Path(tokenizer)
    return path.is_absolute() or tokenizer.startswith(".") or path.suffix in (".model", ".json") or tokenizer.count("/") > 1
