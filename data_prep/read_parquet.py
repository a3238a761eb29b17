"""Reader of Parquet tables, row by row, a batch in memory at a time. Needs pyarrow."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data_prep.records import Raw
from hybrid_megatron.errors import DataError

BATCH_ROWS = 512


def read_parquet(path: Path, names: list[str], text_keys: tuple[str, ...], on_part: Callable[[float], None]) -> Iterator[Raw]:
    """Rows of the columns that `names` (`column` or `column.field`) and `text_keys` need; `on_part` gets the part of the rows read, 0 to 1.

    Raises `DataError` for a file that is damaged or lacks all of `text_keys`.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path} is Parquet, which needs the package pyarrow; install it: pip install pyarrow==26.0.1") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            there = set(table.schema_arrow.names)
            columns = [name for name in dict.fromkeys(_column(name, there) for name in (*text_keys, *names)) if name in there]
            if not any(_column(key, there) in there for key in text_keys):
                found = ", ".join(sorted(there)[:20])
                raise DataError(f"{path} has no column {' or '.join(text_keys)}, only {found}; name the text's column with --text-key")
            line, rows = 0, table.metadata.num_rows
            for batch in table.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
                for values in _rows(batch, pyarrow):
                    line += 1
                    yield Raw(line, values)
                on_part(line / max(rows, 1))
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{path} is damaged or cut off (parquet: {reason}); fetch it again or leave it out") from None


def _column(name: str, there: set[str]) -> str:
    return name if name in there else name.split(".")[0]


def _rows(batch: Any, pyarrow: Any) -> Iterator[dict[str, Any]]:
    """Texts as bytes: pyarrow would decode a column at once, and one invalid text would take the others with it."""
    columns = []
    for column in batch.columns:
        if pyarrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
            binary = pyarrow.binary() if pyarrow.types.is_string(column.type) else pyarrow.large_binary()
            columns.append([_Text(value) if value is not None else None for value in column.cast(binary).to_pylist()])
        else:
            columns.append(column.to_pylist())
    for values in zip(*columns, strict=True):
        yield {name: value.decoded() if isinstance(value, _Text) else value for name, value in zip(batch.schema.names, values, strict=True)}


class _Text(bytes):
    def decoded(self) -> str | bytes:
        """The text, or its bytes where they are not UTF-8."""
        try:
            return self.decode("utf-8")
        except UnicodeDecodeError:
            return bytes(self)
