"""Real text that needs no hub: three Debian packages, by `apt-get download`; 68 MB, 19 million tokens of Llama 3's.

linux         linux-doc (GPL-2): the documentation of Linux, a file a document, 24 MB, some of more than 32,768 tokens
dictionary    dict-gcide (GPL-2+): the Collaborative International Dictionary of English, an entry a document, 40 MB
austen        r-cran-janeaustenr (public domain): six novels of 100,000 to 210,000 tokens, 4 MB
"""

import gzip
import re
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

_ENTRY = re.compile(r"\n\n(?=\S)")


def linux(folder: Path) -> list[str]:
    """Raises LookupError, as the others do, where the package cannot be had."""
    root = _unpacked(folder, "linux-doc-6.1", "linux-doc-6.12")
    return [
        text for file in sorted(root.rglob("*.rst.gz")) if (text := gzip.decompress(file.read_bytes()).decode("utf-8", "replace")).strip()
    ]


def dictionary(folder: Path) -> list[str]:
    file = _unpacked(folder, "dict-gcide") / "usr/share/dictd/gcide.dict.dz"
    return [entry for entry in _ENTRY.split(gzip.decompress(file.read_bytes()).decode("utf-8", "replace")) if entry.strip()]


def austen(folder: Path) -> list[str]:
    file = _unpacked(folder, "r-cran-janeaustenr") / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    return ["\n".join(lines) for lines in _r_strings(file.read_bytes())]


TEXTS: dict[str, Callable[[Path], list[str]]] = {"linux": linux, "dictionary": dictionary, "austen": austen}


def _unpacked(folder: Path, *packages: str) -> Path:
    """The folder with the files of the first package that can be had."""
    for package in packages:
        if (folder / package).is_dir():
            return folder / package
        try:
            done = subprocess.run(["apt-get", "download", package], cwd=folder, capture_output=True)
        except FileNotFoundError:
            break
        found = list(folder.glob(f"{package}_*.deb"))
        if done.returncode == 0 and found:
            subprocess.run(["dpkg-deb", "-x", str(found[0]), str(folder / package)], check=True)
            found[0].unlink()
            return folder / package
    raise LookupError(f"{' or '.join(packages)}: no such package can be downloaded by apt-get here")


def _r_strings(data: bytes) -> list[list[str]]:
    """The character vectors of an R lazy-load database: blocks of a length and a zlib stream in R's XDR form ("R Internals", 1.8)."""
    vectors = []
    while data:
        stream = zlib.decompressobj()
        block = stream.decompress(data[4:])
        data = stream.unused_data
        (name,) = struct.unpack(">i", block[14:18])  # behind "X\n" and three version numbers: the length of the encoding's name
        at = 18 + name
        kind, count = struct.unpack(">ii", block[at : at + 8])
        if kind & 0xFF != 16:  # STRSXP
            continue
        at, lines = at + 8, []
        for _ in range(count):
            (length,) = struct.unpack(">i", block[at + 4 : at + 8])
            lines.append(block[at + 8 : at + 8 + length].decode())
            at += 8 + length
        vectors.append(lines)
    return vectors
