"""`stats` counts exactly; counts in any notation; arguments that are wrong are one sentence."""

import json

import numpy as np
import pytest

from hybrid_megatron.quantities import parse_count
from data_prep.stats import dataset_stats
from tests.cpu.token_files import run, write_arrays, write_dataset


def test_stats_are_those_of_all_lengths_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.indexed_dataset.PIECE_DOCUMENTS", 64)
    lengths = (2 ** np.random.default_rng(3).uniform(0, 17, 500)).astype(np.int32)
    prefix = write_arrays(tmp_path / "documents", np.ones(lengths.sum(), np.int64), lengths)
    stats = dataset_stats(prefix)
    assert (stats.documents, stats.tokens) == (500, lengths.sum())
    assert (stats.shortest, stats.longest, stats.mean) == (lengths.min(), lengths.max(), lengths.mean())
    assert stats.quantiles == {q: np.quantile(lengths, q, method="inverted_cdf") for q in (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)}
    for least in (4_096, 32_768, 1_048_576):
        long = lengths[lengths >= least]
        assert stats.at_least[least] == {"documents": len(long), "tokens": long.sum()}
    assert 0 < stats.at_least[32_768]["documents"] < stats.at_least[4_096]["documents"]


def test_the_command(tmp_path):
    prefix = write_arrays(tmp_path / "documents", np.ones(4_096 + 3 * 1_000, np.int64), np.array([4_096, 1_000, 1_000, 1_000]))
    code, said = run("stats", prefix, "--plot", tmp_path / "lengths.png")
    assert code == 0 and (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    lines = said.out.splitlines()
    assert lines[0] == f"{prefix}: 4 documents, 7,096 tokens"
    assert lines[1] == "length in tokens: shortest 1,000, mean 1,774.0, longest 4,096"
    assert lines[4].split() == ["4,096", "1", "25.00%", "4,096", "57.72%"]
    code, said = run("stats", prefix, "--json")
    values = json.loads(said.out)
    assert code == 0 and values["quantiles"]["0.5"] == 1_000 and values["at_least"]["4096"] == {"documents": 1, "tokens": 4_096}


def test_a_plot_that_cannot_be_written(tmp_path):
    prefix = write_dataset(tmp_path / "documents", [[1, 2]])
    for name, sentence in (("lengths.pdf", "should be a file that ends in .png"), ("no/lengths.png", "cannot be written (No such file")):
        code, said = run("stats", prefix, "--plot", tmp_path / name)
        assert code == 2 and said.err.startswith(f"error: --plot {tmp_path / name} {sentence}") and said.err.count("\n") == 1


def test_counts_as_people_write_them():
    written = {
        "0": 0,
        "4096": 4_096,
        "10_240": 10_240,
        "10,240": 10_240,
        "4K": 4_000,
        "1.5M": 1_500_000,
        "5b": 5 * 10**9,
        "50B": 50 * 10**9,
        "0.001K": 1,
        "1.3T": 13 * 10**11,
    }
    assert {word: parse_count(word) for word in written} == written
    for word in ("", "B", "-1", "1.5", "1.2345K", "5 B", "5G", "1e9", "1__0", "_1", "nan", "٣"):
        with pytest.raises(ValueError, match="is not a whole number such as"):
            parse_count(word)


WRONG = {
    "no command": ([], "the following arguments are required: COMMAND; see python -m data_prep --help"),
    "no such command": (["mrege"], "argument COMMAND: invalid choice: 'mrege'"),
    "a missing one": (["merge", "--input", "a"], "the following arguments are required: --output; see python -m data_prep merge --help"),
    "an unknown one": (["stats", "a", "--plto", "x"], "unrecognized arguments: --plto x"),
    "a count": (
        ["blend", "--input", "1", "a", "--output", "b", "--tokens", "many"],
        "argument --tokens: many is not a whole number of at least 1",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_one_sentence(case):
    words, sentence = WRONG[case]
    code, said = run(*words)
    assert code == 2 and said.err.startswith(f"error: {sentence}") and said.err.count("\n") == 1 and not said.out
