"""What linear attention with one gate a head has alone. The rest: tests/cpu/test_recurrence_forms.py."""

import pytest

from hybrid_megatron.ops.gated_linear_attention import GatedLinearAttention
from hybrid_megatron.ops.scalar_decay import ScalarDecay
from tests.cpu.recurrence_cases import EXACT, definition_of, draw, draw_state, forms_of, starts_at
from tests.definitions import relative_error

RULE = ScalarDecay()
FORMS = tuple(forms_of(RULE))


@pytest.mark.parametrize("form", FORMS)
def test_the_same_gate_in_every_channel_is_gated_linear_attention(form):
    q, k, v, g = draw("mamba2", 100)
    state, starts = draw_state((q, k, v)), starts_at(100, (0, 40), (63,))
    wide = (q, k, v, g[..., None].expand(*g.shape, q.shape[-1]))
    for mine, theirs in zip(forms_of(RULE)[form]((q, k, v, g), state, starts), definition_of(GatedLinearAttention())(wide, state, starts)):
        assert relative_error(mine, theirs) <= EXACT
