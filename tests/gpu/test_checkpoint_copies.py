"""Copies of GPU tensors that checkpoints are written from."""

from types import SimpleNamespace

import torch

from hybrid_megatron.checkpoint import host_memory
from hybrid_megatron.checkpoint.host_memory import HostMemory


def tensors() -> list[torch.Tensor]:
    made = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(1000, 77, device="cuda", generator=made),
        torch.randn(33, device="cuda", generator=made).bfloat16(),
        torch.empty(0, device="cuda"),
        torch.randn(64, 64, device="cuda", generator=made).t()[3:],
    ]


def check(memory: HostMemory, locked: bool) -> None:
    """Copies are as the tensors were, whatever becomes of these, and the same memory serves the next."""
    places = []
    for _ in range(2):
        of = tensors()
        before = [tensor.cpu() for tensor in of]
        copies = memory.copies(of)
        for tensor in of:
            tensor.fill_(-1)
        torch.cuda.synchronize()
        assert all(torch.equal(copy, was) for copy, was in zip(copies, before, strict=True))
        assert all(copy.untyped_storage().nbytes() == copy.nbytes for copy in copies)
        assert [copy.is_pinned() for copy in copies if copy.numel()] == [locked] * 3
        assert memory.lacking(of) == 0
        places.append(copies[0].data_ptr())
    assert places[0] == places[1]
    memory.release()
    assert memory.lacking(tensors()) > 0


def test_copies_are_page_locked():
    check(HostMemory(), locked=True)


def test_without_page_locking_copies_are_right_all_the_same(monkeypatch):
    """And the refusal is not the error of a later kernel."""
    cudart = torch.cuda.cudart()
    refuses = SimpleNamespace(cudaHostRegister=lambda *_: cudart.cudaHostRegister(0, 0, 0))
    monkeypatch.setattr(host_memory.torch.cuda, "cudart", lambda: refuses)
    check(HostMemory(), locked=False)
    torch.ones(8, device="cuda").sum().item()
