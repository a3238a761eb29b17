"""A check of the linear mixers' kernels on the device at hand, before a run trusts them.

Versions of Triton exist that compile flash-linear-attention's kernels into wrong gradients without a word (its issue 640). So each
recurrence that a model uses runs once, forward and backward, at the model's head size, number of heads and type, against its definition in
float64. The kernels it compiles are the ones that training uses.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.fixed_decay import FixedDecay, lightning_log_decay
from hybrid_megatron.ops.gated_delta_rule import GatedDeltaRule
from hybrid_megatron.ops.gated_linear_attention import GatedLinearAttention
from hybrid_megatron.ops.generalized_delta_rule import STRONGEST_GATE, GeneralizedDeltaRule
from hybrid_megatron.ops.kimi_delta_rule import KimiDeltaRule
from hybrid_megatron.ops.recurrence import Recurrence
from hybrid_megatron.ops.scalar_decay import ScalarDecay

TOKENS = 150
"""Two whole chunks of 64 tokens, and one that is not."""
_BOUND = {torch.bfloat16: 2e-2, torch.float32: 4e-3}
"""Largest relative error: a right kernel stands at 2e-3 to 5e-3 in bf16 and, through TF32, at 5e-4 to 1e-3 in float32; a wrong one at 0.1
and more."""
_WAY_OUT = (
    "triton and flash-linear-attention must fit each other and the GPU: install the tested pair with "
    "pip install triton==3.7.1 flash-linear-attention==0.6.0"
)


def kernel_problem(mixer: str, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """What is wrong with the kernels of a linear mixer on this device, in one sentence; None if nothing is."""
    recurrence, inputs = example(mixer, heads, width, dtype, device)
    try:
        errors = relative_errors(recurrence, inputs)
    except Exception as error:  # FLA refuses the pairs of triton and GPU that it knows to be wrong, and Triton has exceptions of its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"the kernels of mixer {mixer} do not run on {_device_name(device)}: {reason}; {_WAY_OUT}"
    name = max(errors, key=errors.get)
    if errors[name] <= _BOUND[dtype]:
        return None
    return (
        f"the kernels of mixer {mixer} compute wrong values on {_device_name(device)} (relative error of {name}: {errors[name]:.1e}, a "
        f"right one is below {_BOUND[dtype]:.0e}); {_WAY_OUT}"
    )


def relative_errors(recurrence: Recurrence, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    """Of the output and of the gradient by each input, against the definition in float64; NaN counts as infinite."""
    found = _with_gradients(recurrence.run, inputs)
    expected = _with_gradients(recurrence.recurrent, tuple(x.double() for x in inputs))
    names = ("the output", *(f"the gradient of {name}" for name in recurrence.input_names))
    return {name: _relative(mine, theirs) for name, mine, theirs in zip(names, found, expected)}


def _with_gradients(form, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    with torch.enable_grad():
        o, _ = form(leaves, scale=leaves[0].shape[-1] ** -0.5)
        o.backward(torch.linspace(-1, 1, o.numel(), device=o.device, dtype=torch.float32).view_as(o).to(o.dtype))
    return [o.detach(), *(x.grad for x in leaves)]


def _relative(mine: Tensor, theirs: Tensor) -> float:
    error = float((mine.double() - theirs).norm() / theirs.norm())
    return error if error == error else float("inf")


def example(
    mixer: str, heads: int, width: int, dtype: torch.dtype, device: torch.device, batch: int = 1, tokens: int = TOKENS
) -> tuple[Recurrence, tuple[Tensor, ...]]:
    """A linear mixer's recurrence and inputs of ordinary size [batch, tokens, heads, ...]."""
    random = torch.Generator().manual_seed(0)
    q, k, v, gate = (torch.randn(batch, tokens, heads, width, generator=random).to(device) for _ in range(4))
    if mixer == "lightning":
        return FixedDecay(lightning_log_decay(heads).to(device)), tuple(x.to(dtype) for x in (q, k, v))
    if mixer == "gla":
        return GatedLinearAttention(), (*(x.to(dtype) for x in (q, k, v)), F.logsigmoid(gate) / 16)
    if mixer == "mamba2":
        return ScalarDecay(), (*(x.to(dtype) for x in (q, k, v)), F.logsigmoid(gate[..., 0]) / 16)
    if mixer == "rwkv7":
        removed, rate = F.normalize(gate, dim=-1), gate.flip(1).sigmoid()
        q, k, v, a, b = (x.to(dtype) for x in (q, k, v, -removed, removed * rate))
        return GeneralizedDeltaRule(), (q, k, v, STRONGEST_GATE * gate.flip(2).sigmoid(), a, b)
    q, k, v = (x.to(dtype) for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v))
    g, beta = F.logsigmoid(gate) / 16, 2 * gate[..., 1].sigmoid()
    return (KimiDeltaRule(), (q, k, v, g, beta)) if mixer == "kda" else (GatedDeltaRule(), (q, k, v, g[..., 0], beta))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
