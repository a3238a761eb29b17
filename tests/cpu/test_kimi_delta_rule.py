"""What the delta rule with a gate of each channel has alone. The rest: tests/cpu/test_recurrence_forms.py."""

import pytest
import torch

from hybrid_megatron.ops.gated_delta_rule import GatedDeltaRule
from hybrid_megatron.ops.kimi_delta_rule import KimiDeltaRule
from tests.cpu.recurrence_cases import EXACT, definition_of, draw, draw_state, forms_of, starts_at
from tests.definitions import relative_error

RULE = KimiDeltaRule()
FORMS = tuple(forms_of(RULE))


@pytest.mark.parametrize("form", FORMS)
def test_the_order_of_gate_and_key(form):
    """The state decays before the key reads it: a second token with the same key and beta 1 leaves nothing but its own value there."""
    eye = torch.eye(4, dtype=torch.float64)
    k = (eye[0] + eye[1]).div(2**0.5).expand(1, 2, 1, 4)
    v = torch.tensor([1.0, 10.0], dtype=torch.float64).view(1, 2, 1, 1)
    g = torch.tensor([0.0, -2.0, 0.0, 0.0], dtype=torch.float64).expand(1, 2, 1, 4)
    _, last = forms_of(RULE)[form]((k, k, v, g, torch.ones(1, 2, 1, dtype=torch.float64)), None, None)
    assert float(torch.einsum("bnk,bnkv->bnv", k[:, 1], last)) == pytest.approx(10, rel=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_one_gate_for_all_channels_is_the_gated_delta_rule(form):
    q, k, v, g, beta = draw("gdn", 100)
    state, starts = draw_state((q, k, v)), starts_at(100, (0, 40), (63,))
    wide = (q, k, v, g[..., None].expand(*g.shape, q.shape[-1]), beta)
    narrow = definition_of(GatedDeltaRule())((q, k, v, g, beta), state, starts)
    for mine, theirs in zip(forms_of(RULE)[form](wide, state, starts), narrow):
        assert relative_error(mine, theirs) <= EXACT


def test_a_summary_is_update_and_transition():
    """The transition is the product of the tokens' matrices, the latest on the left, gates and keys in their order."""
    q, k, v, g, beta = draw("kda", 40)
    eye, product = torch.eye(8, dtype=torch.float64), torch.eye(8, dtype=torch.float64).expand(2, 3, 8, 8)
    for t in range(40):
        outer = torch.einsum("bni,bnj->bnij", k[:, t], k[:, t])
        product = (eye - beta[:, t, :, None, None] * outer) * g[:, t, :, None, :].exp() @ product
    transition, added = RULE.summary((q, k, v, g, beta))
    assert relative_error(transition, product) <= EXACT
    assert relative_error(added, definition_of(RULE)((q, k, v, g, beta), None, None)[1]) <= EXACT
