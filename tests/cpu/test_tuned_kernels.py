"""Tables of tuned kernels: what a GPU's table says is what FLA's autotuners of the installed version would look up."""

import json

import pytest

from hybrid_megatron.ops import tuned_kernels
from hybrid_megatron.ops.tuned_kernels import (
    TABLES,
    entry_of,
    give_to_autotuners,
    name_of,
    parts_of,
    table_of,
    tuners_of_fla,
    use_tuned_kernels,
)


@pytest.fixture(scope="module")
def tuners() -> dict:
    pytest.importorskip("triton")
    return {name_of(tuner): tuner for tuner in tuners_of_fla()}


def key_of(entry: dict, **instead: int) -> tuple:
    """As Triton makes it, with other numbers where asked for."""
    return (*(instead.get(name, value) for name, value in entry["key"]), *entry["dtypes"])


def test_keys_of_another_form_are_tuned_as_ever(tuners, monkeypatch):
    """Of a version of Triton or FLA that is not the table's."""
    entry = json.loads(table_of("NVIDIA H200").read_text())[0]
    tuner = tuners[entry["kernel"]]
    monkeypatch.setattr(tuner, "cache", {})
    give_to_autotuners([entry])
    assert key_of(entry) in tuner.cache and ("one", "too", "many", *key_of(entry)) not in tuner.cache


def test_name_of_a_table():
    assert table_of("NVIDIA H200") == TABLES / "nvidia_h200.json" and table_of("NVIDIA H200").exists()
    assert not use_tuned_kernels("NVIDIA H20")


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_entries_are_of_kernels_and_configurations_that_there_are(tuners, path):
    for entry in json.loads(path.read_text()):
        tuner = tuners[entry["kernel"]]
        assert [list(part) for part in parts_of(tuner, key_of(entry))[0]] == entry["key"]
        chosen = entry["config"]  # which configurations are tried depends on the GPU's shared memory
        assert chosen["kwargs"].keys() == tuner.configs[0].kwargs.keys() and chosen["num_warps"] in (1, 2, 4, 8, 16, 32)


@pytest.mark.slow
def test_autotuners_know_the_table_for_any_number_of_heads_and_samples(tuners, tmp_path, monkeypatch):
    monkeypatch.setattr(tuned_kernels, "TABLES", tmp_path)
    entries = json.loads((TABLES / "nvidia_h200.json").read_text())
    (tmp_path / "some_gpu.json").write_text(json.dumps(entries))
    found = {name: dict(tuner.cache) for name, tuner in tuners.items()}
    last, mine = tuners[entries[-1]["kernel"]], object()
    before, later = ((*key_of(entries[-1])[:-1], dtype) for dtype in ("torch.int8", "torch.int16"))  # of no table
    try:
        last.cache[before] = mine
        monkeypatch.setenv(tuned_kernels.VARIABLE, "1")
        assert not use_tuned_kernels("Some GPU")
        monkeypatch.delenv(tuned_kernels.VARIABLE)
        assert use_tuned_kernels("Some GPU") and use_tuned_kernels("Some GPU")
        for entry in entries:
            tuner = tuners[entry["kernel"]]
            key, other = key_of(entry, H=7, HV=7, B=3), (*key_of(entry)[:-1], "torch.float64")
            assert key in tuner.cache and other not in tuner.cache
            assert entry_of(tuner, key, tuner.cache[key])["config"] == entry["config"]
        last.cache[later] = last.cache[key] = mine  # what Triton finds itself counts too, and goes before
        for own in (before, later, key):
            assert own in last.cache and last.cache[own] is mine
    finally:
        for name, cache in found.items():
            tuners[name].cache = cache
