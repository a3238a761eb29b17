"""What wandb's own files of a run hold: which steps would reach the server if `wandb sync` sent them.

A run-ID.wandb is a log in LevelDB's format (blocks of 32 KiB; a header of 7 bytes before each piece of a record) behind a header of 7 bytes
that begins with `:W&B`; its records are wandb's protobuf messages. wandb 0.31 has no reader of it in Python.
"""

import contextlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path

_BLOCK, _HEADER = 1 << 15, struct.Struct("<IHB")  # checksum, length, kind
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def recorded_steps(folder: Path, run_id: str) -> set[int]:
    """Steps whose rows lie in the files of all starts of a run, online ones too; `folder` is RUN_DIR/wandb."""
    steps: set[int] = set()
    for path in folder.glob(f"*run-*-{run_id}/run-{run_id}.wandb"):
        with contextlib.suppress(OSError):
            steps |= set(_steps(path.read_bytes()))
    return steps


def _steps(data: bytes) -> Iterator[int]:
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    for body in _records(data):
        record = Record()
        try:
            record.ParseFromString(body)
        except DecodeError:
            return
        if record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                if (item.key or ".".join(item.nested_key)) == "step":
                    yield json.loads(item.value_json)


def _records(data: bytes) -> Iterator[bytes]:
    """Up to the first that is cut off: its writer was killed."""
    at, pieces = 7, b""
    while data[:4] == b":W&B":
        if _BLOCK - at % _BLOCK < _HEADER.size:
            at += _BLOCK - at % _BLOCK
        if at + _HEADER.size > len(data):
            return
        _, length, kind = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        piece = data[at : at + length]
        if len(piece) < length or kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST):
            return
        pieces = piece if kind in (_WHOLE, _FIRST) else pieces + piece
        if kind in (_WHOLE, _LAST):
            yield pieces
        at += length
