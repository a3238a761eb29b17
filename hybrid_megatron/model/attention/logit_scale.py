"""Logit scaling of attention without position on inputs longer than those of training."""

import math

import torch
from torch import Tensor

from hybrid_megatron.model.head_group import Inference
from hybrid_megatron.parallel import SequenceLayout


def scale_queries(q: Tensor, layout: SequenceLayout, inference: Inference) -> Tensor:
    """The factor on the logits, put on q [b, s, n, d].

    log: ln L / ln L0 for the whole input of L >= L0 tokens, L0 in training. hype: ln(t + a) / ln a at position t (HypeNet, arXiv
    2601.22156, equation 11). constant: a number.
    """
    if inference.logit_scale == "none":
        return q
    if inference.logit_scale == "log":
        return q * max(1.0, math.log(layout.context) / math.log(inference.trained_context))
    if inference.logit_scale == "constant":
        return q * inference.logit_scale_value
    base = inference.logit_scale_value
    factors = ((layout.positions(q.device).double() + base).log() / math.log(base)).to(torch.promote_types(q.dtype, torch.float32))
    return (q * factors[:, None, None]).to(q.dtype)
