"""What linear attention with a fixed decay has alone: its decays. The rest: tests/cpu/test_recurrence_forms.py."""

import pytest
import torch

from hybrid_megatron.ops.fixed_decay import FixedDecay, lightning_log_decay
from tests.cpu.recurrence_cases import check, draw, draw_state, forms_of, rule_of, starts_at

RULE = rule_of("lightning")
FORMS = tuple(forms_of(RULE))


@pytest.mark.parametrize("heads", [1, 3, 8, 12])
def test_lightnings_decays(heads):
    """HypeNet, equation 19, also where the number of heads is no power of two: head H decays by 2^-8 a token."""
    expected = [-(2.0 ** (-8 * h / heads)) for h in range(1, heads + 1)]
    assert lightning_log_decay(heads).tolist() == pytest.approx(expected, rel=1e-15)
    assert lightning_log_decay(heads)[-1] == -(2.0**-8)


@pytest.mark.parametrize("form", FORMS)
def test_decays_that_keep_everything_and_decays_that_keep_nothing(form):
    inputs = draw("lightning", 130)
    check(FixedDecay(torch.tensor([0.0, -30.0, -1e4], dtype=torch.float64)), form, inputs, draw_state(inputs))


@pytest.mark.parametrize("case", ["lightning", "documents", "keeps everything"])
def test_float32(case):
    """Each product carries 2^-24 = 6e-8 and each power 64 times that at most, where it is small: 2e-6."""
    inputs = draw("lightning", 150)
    rule = FixedDecay(torch.zeros(3)) if case == "keeps everything" else RULE
    starts = starts_at(150, (0, 1, 64, 140), (30,)) if case == "documents" else None
    check(rule, "chunked", inputs, draw_state(inputs), starts, 2e-6, torch.float32)


def test_decays_in_bfloat16_are_refused():
    """0.9961 would become 1: a module turned to bf16 must not take its decays along."""
    with pytest.raises(AssertionError, match="decays in torch.bfloat16"):
        FixedDecay(lightning_log_decay(4).bfloat16())
