"""What context parallelism and windows build on: a span's summary, the rule for a slice of heads, documents as sequences of a kernel."""

import pytest
import torch
from torch import Tensor

from hybrid_megatron.ops.documents import over_documents
from tests.cpu.recurrence_cases import EXACT, KINDS, SCALE, definition_of, draw, draw_state, forms_of, results, rule_of, starts_at
from tests.definitions import relative_error

TRANSITIONS = {"gdn": (8, 8), "gla": (8, 1), "kda": (8, 8), "lightning": (1, 1), "mamba2": (8, 1), "rwkv7": (8, 8)}
STARTS = {"none": None, "documents": ((0, 30, 69), ()), "at both ends": ((0,), (69,))}


def starts_of(name: str) -> Tensor | None:
    return None if STARTS[name] is None else starts_at(70, *STARTS[name])


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_summary_turns_the_first_state_into_the_last(kind, starts):
    rule, inputs, starts = rule_of(kind), draw(kind, 70), starts_of(starts)
    state = draw_state(inputs)
    transition, added = rule.summary(tuple(x.requires_grad_() for x in inputs), starts)
    _, expected = definition_of(rule)(inputs, state, starts)
    assert relative_error(rule.apply(transition, state, added), expected.detach()) <= EXACT
    assert not transition.requires_grad and not added.requires_grad


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_pass_from_the_last_state_to_the_first(kind, starts):
    """That of the outputs, whatever the state was, and that of the last state."""
    rule, inputs, starts = rule_of(kind), draw(kind, 70), starts_of(starts)
    state = draw_state(inputs).requires_grad_()
    o, last = definition_of(rule)(inputs, state, starts)
    random = torch.Generator().manual_seed(5)
    of_o, of_last = (torch.randn(x.shape, generator=random, dtype=x.dtype) for x in (o, last))
    torch.autograd.backward((o, last), (of_o, of_last))
    transition, _ = rule.summary(inputs, starts)
    found = rule.apply_back(transition, of_last, rule.initial_state_gradient(inputs, of_o, scale=SCALE, document_starts=starts))
    assert (state.grad - found).norm() <= EXACT * max(state.grad.norm(), 1)  # zero where documents start at once


@pytest.mark.parametrize("kind", KINDS)
def test_a_transition_is_zero_where_a_document_starts(kind):
    inputs = draw(kind, 70)
    transition, added = rule_of(kind).summary(inputs, starts_at(70, (30,), ()))
    assert transition.shape == (2, 3, *TRANSITIONS[kind]) and added.shape == (2, 3, 8, 6)
    assert not transition[0].any() and transition[1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_summary_of_bfloat16_is_float32(kind):
    rule, inputs = rule_of(kind), tuple(x.bfloat16() if i < 3 else x.float() for i, x in enumerate(draw(kind, 70)))
    state = draw_state(inputs).float()
    transition, added = rule.summary(inputs)
    assert transition.dtype == added.dtype == torch.float32
    _, expected = definition_of(rule)(tuple(x.double() for x in inputs), state.double(), None)
    assert relative_error(rule.apply(transition, state, added), expected) <= 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_of_heads_is_a_slice_of_the_result(kind):
    rule, inputs, heads = rule_of(kind), draw(kind, 40), slice(1, 3)
    whole, last = forms_of(rule)["chunked"](inputs, None, None)
    part, part_last = forms_of(rule.for_heads(heads))["chunked"](tuple(x[:, :, heads] for x in inputs), None, None)
    assert relative_error(part, whole[:, :, heads]) <= EXACT and relative_error(part_last, last[:, heads]) <= EXACT


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("starts", [((0, 1, 2, 69), (20, 50)), ((), (0,))])
def test_documents_become_sequences(starts, with_state):
    """`over_documents` around a kernel that knows sequences alone, as FLA's, each with a state of its own."""
    rule, inputs = rule_of("gla"), draw("gla", 70)

    def kernel(*inputs, initial_state, cu_seqlens):
        assert inputs[0].shape[0] == 1 and (initial_state is None or len(initial_state) == len(cu_seqlens) - 1)
        outputs, finals = [], []
        for i, (begin, end) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:])):
            state = None if initial_state is None else initial_state[i : i + 1]
            o, final = definition_of(rule)(tuple(x[:, begin:end] for x in inputs), state, None)
            outputs.append(o)
            finals.append(final)
        return torch.cat(outputs, 1), torch.cat(finals, 0)

    state, starts = draw_state(inputs) if with_state else None, starts_at(70, *starts)
    found = results(lambda inputs, *rest: over_documents(kernel, inputs, *rest), inputs, state, starts, rule.input_names)
    exact = results(definition_of(rule), inputs, state, starts, rule.input_names)
    for name, expected in exact.items():
        assert relative_error(found[name], expected) <= EXACT, name


def test_the_scale_multiplies_the_output_alone():
    for kind in KINDS:
        rule, inputs = rule_of(kind), draw(kind, 20)
        (o, last), (double, same) = (rule.run(inputs, scale=scale) for scale in (SCALE, 2 * SCALE))
        assert relative_error(double, 2 * o) <= EXACT and torch.equal(last, same)
