"""python -m tests.cpu.interpreted_kernels, with TRITON_INTERPRET=1: our Triton kernels by Triton's interpreter, against float64.

Prints the largest relative errors as JSON.
"""

import json

import torch
import torch.nn.functional as F

from hybrid_megatron.ops import cross_entropy_kernels, rotary_kernel
from tests.definitions import relative_error


def cross_entropy(words: int, dtype: torch.dtype) -> dict[str, float]:
    """Targets of these words and of other ranks'; logits far apart; a weight of 0."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(5, words, generator=random) * 4 + torch.tensor([0.0, 80, -80, 0, 0])[:, None]
    targets, weights = torch.tensor([0, words - 1, -3, words, 2]), torch.tensor([1.0, 2, 3, 0.5, 0])
    exact = logits.double()
    highest, total, chosen = cross_entropy_kernels.row_sums(logits, targets)
    mine = (targets >= 0) & (targets < words)
    gradient = cross_entropy_kernels.gradient(logits.clone(), targets, highest, total, weights, dtype)
    one_hot = F.one_hot(targets.clamp(0, words - 1), words) * mine[:, None]
    assert torch.equal(highest, logits.amax(1)) and gradient.dtype is dtype
    return {
        "logsumexp": relative_error(highest + total.log(), exact.logsumexp(1)),
        "chosen": relative_error(chosen, exact.gather(1, targets.clamp(0, words - 1)[:, None])[:, 0] * mine),
        "gradient": relative_error(gradient, (exact.softmax(1) - one_hot) * weights[:, None]),
    }


def rotation(heads: int, width: int, tables: int) -> dict[str, float]:
    """A slice between other rows, and a gradient that lies head by head."""
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(2, 7, heads, 3 * width, generator=random).requires_grad_()
    angles = torch.rand(tables, 7, width // 2, generator=random) * 6
    out = rotary_kernel.Rotate.apply(rows[..., width : 2 * width], angles.cos(), angles.sin())
    grad = torch.randn(2, heads, 7, width, generator=random).transpose(1, 2)
    out.backward(grad)

    exact = rows.detach().double().requires_grad_()
    first, second = exact[..., width : 2 * width].chunk(2, -1)
    cos, sin = angles.double().cos()[:, :, None], angles.double().sin()[:, :, None]
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    expected.backward(grad.double())
    return {"output": relative_error(out, expected), "gradient": relative_error(rows.grad, exact.grad)}


if __name__ == "__main__":
    found = {
        f"cross entropy of {words} words, {dtype}": cross_entropy(words, dtype)
        for words in (9, 5000)
        for dtype in (torch.float32, torch.bfloat16)
    }
    found |= {f"rotation of {heads} heads of {width}": rotation(heads, width, tables) for heads, width, tables in ((3, 8, 1), (17, 6, 2))}
    print(json.dumps(found))
