"""Where the ranks find each other: torchrun's one store for all its starts, and keys of a start's own."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from hybrid_megatron.parallel.state import _store


@pytest.fixture
def store_of(monkeypatch):
    """(restarts that the agent counted, ranks on this node) -> what a rank of two gets."""
    shared = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda url, timeout: iter([(shared, 0, 2)]))
    monkeypatch.setenv("WORLD_SIZE", "2")

    def of(restarts: int, local: int) -> dist.Store:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        return _store(timedelta(seconds=1))

    return of


def test_a_start_does_not_see_what_an_earlier_one_wrote(store_of):
    store_of(0, local=2).set("address of rank 1", "from before")
    again = store_of(1, local=2)
    assert not again.check(["address of rank 1"])
    again.set("address of rank 1", "from now")
    other = store_of(1, local=2)
    assert other.check(["address of rank 1"]) and other.get("address of rank 1") == b"from now"


def test_nodes_whose_agents_count_restarts_differently_meet(store_of):
    store_of(0, local=1).set("address of rank 0", "here")
    other = store_of(1, local=1)
    assert other.check(["address of rank 0"]) and other.get("address of rank 0") == b"here"


def test_without_torchrun_nobody_is_asked(store_of, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(dist, "rendezvous", lambda *arguments, **more: pytest.fail("one process has no need of it"))
    assert isinstance(_store(timedelta(seconds=1)), dist.HashStore)
