"""The arguments that say where documents come from, for every command that reads some."""

import argparse
from pathlib import Path

from data_prep.arguments import fraction
from data_prep.sources import CORPORA, Source, open_source


def add_source(parser: argparse.ArgumentParser) -> None:
    kinds = "dclm, longwanjuan, jsonl: a record a line; fineweb_edu, parquet: a record a row; pg19, text: a document a file; "
    kinds += "webdataset: tar shards. All but Parquet plain, .gz, .zst or .bz2"
    parser.add_argument("--source", choices=tuple(CORPORA), required=True, help=kinds)
    inputs = "files, folders, quoted globs, @FILE with one of these a line, or - for standard input"
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help=inputs)
    keys = "the first of these keys (or columns, or a.b for b within a) in a record holds its text; default by --source, mostly text"
    parser.add_argument("--text-key", metavar="KEY[,KEY]", help=keys)
    cuts = "text, pg19: cut files into documents at each match; matches are dropped, so use (?=...) to keep a heading"
    parser.add_argument("--split-on", metavar="REGEX", help=cuts)
    where = "keep only records where this is true, as in --where score '>=' 3; OP: == != < <= > >= in contains matches; may be repeated"
    parser.add_argument("--where", nargs=3, action="append", default=[], metavar=("FIELD", "OP", "VALUE"), help=where)
    parser.add_argument("--language", metavar="CODE", help="keep only records in this language, such as en")
    parser.add_argument("--min-language-score", type=fraction(True), default=0.0, metavar="F", help="and only with this score")
    field = "which field holds the language (and which its score; default FIELD_score), or an object of scores; known for dclm, fineweb_edu"
    parser.add_argument("--language-field", metavar="FIELD[,SCORE]", help=field)


def source_of(options: argparse.Namespace, output: Path | None = None) -> Source:
    """The source that the arguments describe; files of `output` are no input."""
    return open_source(
        options.source,
        options.input,
        options.text_key,
        options.split_on,
        output,
        options.where,
        options.language,
        options.min_language_score,
        options.language_field,
    )
