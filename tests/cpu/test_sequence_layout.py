"""SequenceLayout: the zig-zag cut of a sample over context ranks."""

import pytest
import torch

from hybrid_megatron.model.attention.rope import rotate
from hybrid_megatron.ops.documents import sequences_of
from hybrid_megatron.parallel import SequenceLayout
from hybrid_megatron.parallel.sequence_layout import gathered_order


def test_one_rank_holds_the_sample_as_one_chunk():
    layout = SequenceLayout(48)
    assert (layout.local_length, layout.chunks, layout.chunk_length) == (48, (0,), 48)
    whole = torch.arange(96).view(2, 48)
    assert torch.equal(layout.local(whole), whole)
    assert layout.local_document_starts() is None


def test_two_ranks_hold_the_ends_and_the_middle():
    """Written out: chunks of 3 of a sample of 12."""
    whole = torch.arange(12)[None]
    assert SequenceLayout(12, 2, 0).local(whole).tolist() == [[0, 1, 2, 9, 10, 11]]
    assert SequenceLayout(12, 2, 1).local(whole).tolist() == [[3, 4, 5, 6, 7, 8]]
    assert SequenceLayout(12, 2, 1).positions("cpu").tolist() == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_causal_work_is_the_same_on_every_rank(size):
    work = [sum(place + 1 for place in SequenceLayout(48, size, rank).positions("cpu").tolist()) for rank in range(size)]
    assert len(set(work)) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gathered_chunks_come_back_in_order(size):
    whole = torch.randn(2, 48, 5)
    layouts = [SequenceLayout(48, size, rank) for rank in range(size)]
    gathered = [chunk for layout in layouts for chunk in layout.local(whole).split(layout.chunk_length, dim=1)]
    assert torch.equal(torch.cat([gathered[place] for place in gathered_order(size)], 1), whole)


def test_it_is_the_cut_megatron_core_makes():
    """get_batch_on_this_cp_rank views a sample as 2 * size chunks and takes chunks rank and 2 * size - 1 - rank."""
    whole = torch.arange(2 * 64).view(2, 64)
    for size in (2, 4):
        for rank in range(size):
            chunks = whole.view(2, 2 * size, 64 // (2 * size))
            theirs = chunks.index_select(1, torch.tensor([rank, 2 * size - rank - 1])).view(2, -1)
            assert torch.equal(SequenceLayout(64, size, rank).local(whole), theirs)


def test_document_starts_stay_global_and_are_cut_on_demand():
    starts = torch.zeros(2, 12, dtype=torch.bool)
    starts[0, [0, 4]] = True
    starts[1, 11] = True
    layouts = [SequenceLayout(12, 2, rank, starts) for rank in range(2)]
    assert layouts[0].local_document_starts().nonzero().tolist() == [[0, 0], [1, 5]]
    assert layouts[1].local_document_starts().nonzero().tolist() == [[0, 1]]
    assert all(layout.document_starts is starts for layout in layouts)


@pytest.mark.parametrize("size", [1, 2])
def test_what_all_layers_need_is_made_once(size):
    """The same tensors by identity, since FLA's tables and ours go by it; of another micro-batch others."""
    starts = torch.zeros(2, 32, dtype=torch.bool)
    starts[0, 5] = starts[1, 17] = True
    layout, other = (SequenceLayout(32, size, size - 1, starts.clone()) for _ in range(2))
    local = layout.local_document_starts()
    assert local is layout.local_document_starts() and torch.equal(local, layout.local(starts))
    assert layout.documents() is layout.documents() and torch.equal(layout.documents(), starts.long().cumsum(1))
    assert local is not other.local_document_starts() and layout.documents() is not other.documents()
    assert sequences_of(local) is sequences_of(layout.local_document_starts())
    assert sequences_of(local) is not sequences_of(other.local_document_starts())
    assert SequenceLayout(32, size).once("a", lambda: 1) == 1 and SequenceLayout(32, size).documents() is None
    assert hash(SequenceLayout(32, size)) == hash(SequenceLayout(32, size)), "what was made for one is no part of what it is"


def test_rotations_of_one_layout_that_differ_in_their_base_do_not_share_a_table():
    starts = torch.zeros(1, 16, dtype=torch.bool)
    starts[0, 6] = True
    layout, x = SequenceLayout(16, document_starts=starts), torch.randn(1, 16, 2, 8)
    first, second = (rotate(x, layout, base, within_documents=True) for base in (100.0, 10.0))
    alone = rotate(x, SequenceLayout(16, document_starts=starts), 10.0, within_documents=True)
    assert torch.equal(second, alone) and not torch.equal(first, second)
