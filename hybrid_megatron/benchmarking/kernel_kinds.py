"""What a kernel is for, by its name: one table, the first rule that matches counts.

Names are those of CUDA kernels as the profiler reports them (`_row_sums`, `_gradient`, `_rotate` and `_silu` are of ops/kernels/), and of
torch's operators, which stand for them on a CPU. A name says what a kernel does, not who asked for it: the product for the logits is a
matrix product, a copy of master weights an elementwise one.
"""

import re

KINDS = (
    "attention",
    "linear mixers",
    "matrix products",
    "norms and elementwise",
    "loss",
    "optimizer",
    "communication",
    "gaps",
    "host",
)
"""In the order of the stacked bar. `communication` is that which no computation hides. `gaps`: the device waits for less than
GAP_MICROSECONDS, between two kernels; `host`: it waits for longer, and the program is behind."""

_RULES: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl|^c10d::|gloo:|all_?reduce_kernel|one_shot|multimem"),
    ("optimizer", r"adam|lpnorm|multi_tensor_|FusedOptimizer"),
    # torch.compile's templates (FlexAttention), cuDNN and flash.
    ("attention", r"flex_attention|flash|fmha|sdpa|scaled_dot_product"),
    ("loss", r"cross_entropy|nll_loss|softmax|logsumexp|^_(gradient|row_sums)$"),
    ("norms and elementwise", r"l2norm|layer_?norm|rms_?norm|norm_gated|silu|swiglu|rotary|^_rotate$|^_rwkv7_|^_token_shift"),
    # FLA's recurrences, the projections of a state that they need, gates, convolutions.
    (
        "linear mixers",
        r"^chunk_|^fused_recurrent|^fused_chunk|^parallel_simple_gla|recompute_w_u|prepare_wy|solve_tril|merge_16x16|gdn_gate"
        r"|fused_beta|causal_conv1d|^wu_fwd|_kda_|^kda_|linear_attn|^_gates|^_gla_",
    ),
    (
        "matrix products",
        r"nvjet|gemm|gemv|cutlass|cublas|splitk|xmma|matmul|triton_tem_fused_(mm|addmm|bmm)|^aten::(mm|bmm|addmm|baddbmm)$",
    ),
    (
        "norms and elementwise",
        r"elementwise|reduce|Memcpy|Memset|CatArray|triton_(poi|red|per)_|index|gather|scatter|embedding|copy|arange|where|fill|cumsum"
        r"|RadixSort|unrolled|dropout|^aten::",
    ),
)
OTHER = "other"


def kind_of(name: str) -> str:
    """One of KINDS, or OTHER."""
    return next((kind for kind, pattern in _RULES if re.search(pattern, name, re.IGNORECASE)), OTHER)
