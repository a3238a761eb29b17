"""Samples that are beginnings of documents: which documents, in which order, and in a training."""

import numpy as np
import pytest

from hybrid_megatron.data import build_index_caches, open_dataset, open_tokens
from hybrid_megatron.data.whole_documents import WholeDocuments
from hybrid_megatron.errors import DataError
from tests.cpu.runs import checkpoints, computed, train
from tests.cpu.tiny import tiny_config, tiny_words

WHOLE = ["data.whole_documents=true", "train.context=32", "train.batch_tokens=256"]


def config_of(tiny_data, *overrides: str):
    return tiny_config(tiny_data, "run_dir=unused", *WHOLE, *overrides)


def test_each_sample_is_the_beginning_of_a_document_that_fills_it(tiny_data):
    config = config_of(tiny_data)
    data = open_dataset(config, "train")
    stream = open_tokens(config, "data.train", tiny_data / "train")
    documents = [stream.tokens[begin:end].tolist() for begin, end in zip(stream.borders, stream.borders[1:])]
    fitting = sorted(document[:33] for document in documents if len(document) >= 33)
    assert 0 < len(fitting) < len(documents)
    found = [[*data.samples[i]["tokens"].tolist(), int(data.samples[i]["labels"][-1])] for i in range(len(data))]
    assert sorted(found) == fitting and found != fitting
    assert all(row[0] == 1 and 1 not in row[1:] for row in found), "BOS stands at the beginning and nowhere else"
    assert all(data.samples[i]["labels"][:-1].tolist() == data.samples[i]["tokens"][1:].tolist() for i in range(len(data)))


def test_the_order_is_the_seed_s():
    tokens, borders = np.arange(100, dtype=np.uint16), np.array([0, 10, 13, 40, 44, 60, 100])
    order = [[int(WholeDocuments(tokens, borders, 5, seed)[i]["tokens"][0]) for i in range(4)] for seed in (0, 0, 1, 2, 3)]
    assert order[0] == order[1] and len({tuple(each) for each in order}) > 1
    assert all(sorted(each) == [0, 13, 44, 60] for each in order)
    assert len(WholeDocuments(tokens, borders, 9, 0)) == 4 and len(WholeDocuments(tokens, borders, 10, 0)) == 3, (
        "one token more than it has"
    )


def test_no_document_that_fills_a_sample(tiny_data):
    for act in (lambda config: open_dataset(config, "train"), build_index_caches):
        with pytest.raises(DataError, match="none holds the 65 tokens of train.context=64, the longest [56].; lower train.context"):
            act(config_of(tiny_data, "train.context=64"))
    assert build_index_caches(config_of(tiny_data)) == []


def test_a_training_stops_resumes_and_ends(ranks, tiny_data, tmp_path):
    words = tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", *WHOLE, "data.document_mask=true")
    assert train(ranks, 1, words, stop=(7, 0, "SIGTERM")).code == 143 and checkpoints(tmp_path / "run") == ["step_00000007"]
    assert train(ranks, 2, words).code == 0
    assert train(ranks, 1, [*words[:3], f"run_dir={tmp_path / 'whole'}", *words[4:]]).code == 0
    for mine, theirs in zip(computed(tmp_path / "run"), computed(tmp_path / "whole"), strict=True):
        assert abs(mine["loss"] - theirs["loss"]) <= 1e-5
