"""What the gated delta rule has alone. The rest: tests/cpu/test_recurrence_forms.py.

In float32 a chunk sums up to 64 gates and takes differences of those sums: a sum of |G| carries an error of |G| 2^-24, and e^(G_t - G_j)
that much relative.
"""

import pytest
import torch
from torch import Tensor

from hybrid_megatron.ops.gated_delta_rule import GatedDeltaRule
from tests import definitions
from tests.cpu.recurrence_cases import EXACT, check, draw, draw_state, forms_of, starts_at, with_gates
from tests.definitions import relative_error

RULE = GatedDeltaRule()
FORMS = forms_of(RULE)


@pytest.mark.parametrize("form", FORMS)
def test_values_v_0_from_the_state_0_i_end_in_the_update_and_the_transition(form):
    q, k, v, g, beta = draw("gdn", 100)
    eye = torch.eye(8, dtype=torch.float64).expand(2, 3, 8, 8)
    g = g * 0.1  # so that something is left of the first state
    wide, start = torch.cat((v, v.new_zeros(2, 100, 3, 8)), -1), torch.cat((eye.new_zeros(2, 3, 8, 6), eye), -1)
    _, summary = FORMS[form]((q, k, wide, g, beta), start, None)
    _, update = definitions.gated_delta_rule(q, k, v, g, beta, 1.0)
    transition = definitions.transition_product(k, g, beta)
    assert relative_error(summary[..., :6], update) <= EXACT and relative_error(summary[..., 6:], transition) <= EXACT


@pytest.mark.parametrize("form", FORMS)
def test_one_key_for_all_tokens(form):
    """The hardest triangular system: every token overwrites what the one before it wrote, with beta near 2 and no decay."""
    q, k, v, g, beta = with_gates("gdn", "keep all", draw("gdn", 130))
    inputs = q, k[:, :1].expand_as(k).contiguous(), v, g, torch.full_like(beta, 1.99)
    check(RULE, form, inputs, draw_state(inputs))


def draw_half(length: int) -> tuple[Tensor, ...]:
    """As `draw`, with beta in (0, 1)."""
    *rest, beta = draw("gdn", length)
    return *rest, beta / 2


@pytest.mark.parametrize("case", ["plain", "documents", "keeps everything", "forgets everything", "beta 1.99"])
def test_float32(case):
    """Sums of 64 gates of about -0.2 carry 13 2^-24 = 8e-7 and each product 6e-8: 2e-6. Undamped steps with beta near 2 add up over
    all 200 tokens: 200 2^-24 = 1.2e-5."""
    inputs, starts, bound = draw_half(200), None, 2e-6
    if case == "documents":
        starts = starts_at(200, (0, 1, 64, 150), (30,))
    elif case == "keeps everything":
        inputs = with_gates("gdn", "keep all", inputs)
    elif case == "forgets everything":
        inputs = with_gates("gdn", "forget", inputs)
    elif case == "beta 1.99":
        *rest, beta = with_gates("gdn", "keep all", inputs)
        inputs, bound = (*rest, torch.full_like(beta, 1.99)), 1.2e-5
    check(RULE, "chunked", inputs, draw_state(inputs), starts, bound, torch.float32)


def test_float32_with_strong_and_weak_gates_side_by_side():
    """Sums of gates reach 300: 300 2^-24 = 1.8e-5."""
    inputs = with_gates("gdn", "at odds in time", draw_half(130))
    check(RULE, "chunked", inputs, draw_state(inputs), bound=1.8e-5, dtype=torch.float32)
