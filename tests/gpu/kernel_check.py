"""A recurrence's kernels against its definition, token by token in float64, from the very same rounded inputs.

Errors are relative norms, ||x - x_ref|| / ||x_ref||: of the output, the final state, and the gradients of a sum of both under random
weights.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_megatron.ops.recurrence import Recurrence
from tests.gpu.kernel_table import record


def check(
    case: str,
    bound: float,
    recurrence: Recurrence,
    definition: Callable[..., tuple[Tensor, Tensor]],
    inputs: list[Tensor],
    state: Tensor | None = None,
    starts: Tensor | None = None,
    bound_of_g: float | None = None,
) -> None:
    """`definition` takes the inputs, scale, initial state and document starts, as in tests/definitions.py.

    `bound_of_g`: a wider bound for the gradient of g, which may be off by the same amount at all tokens of a chunk of 64; its steps from
    token to token within chunks are then held to `bound`.
    """
    q, v = inputs[0], inputs[2]
    scale = q.shape[-1] ** -0.5
    generator = torch.Generator(q.device).manual_seed(1)
    weights = [
        torch.randn(shape, generator=generator, device=q.device, dtype=torch.float64)
        for shape in (v.shape, (q.shape[0], q.shape[2], q.shape[3], v.shape[3]))
    ]

    def results(form: Callable, tensors: list[Tensor], first: Tensor | None) -> dict[str, Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        first = None if first is None else first.detach().clone().requires_grad_()
        o, final = form(leaves, first)
        ((o.double() * weights[0]).sum() + (final.double() * weights[1]).sum()).backward()
        names = [*recurrence.input_names, "initial state"]
        gradients = {f"gradient of {name}": x.grad for name, x in zip(names, [*leaves, first]) if x is not None}
        return {"output": o.detach(), "final state": final.detach()} | gradients

    fast = results(lambda x, first: recurrence.run(tuple(x), scale=scale, initial_state=first, document_starts=starts), inputs, state)
    exact = results(
        lambda x, first: definition(*x, scale, first, starts), [x.double() for x in inputs], None if state is None else state.double()
    )
    assert fast["output"].dtype == v.dtype and fast["final state"].dtype == torch.float32
    floors = {"gradient of initial state": 1e-30}  # exactly zero where all rows are cut or all is forgotten
    if "g" in recurrence.input_names:
        # The gradient of a gate that lets nothing through is next to zero, a difference of terms q dL/dq that are not.
        terms = q.double() * exact["gradient of q"]
        floors["gradient of g"] = float((terms if inputs[3].dim() == terms.dim() else terms.sum(-1)).norm())
    errors = {
        name: float((fast[name].double() - expected).norm()) / max(float(expected.norm()), floors.get(name, 0.0))
        for name, expected in exact.items()
    }
    if bound_of_g is not None and starts is None and q.shape[1] > 1:
        steps, expected = (_steps(each["gradient of g"].double()) for each in (fast, exact))
        errors["steps of the gradient of g"] = float((steps - expected).norm()) / max(float(expected.norm()), floors["gradient of g"])
    record(type(recurrence).__name__, case, errors, bound)
    bounds = {name: bound for name in errors} | ({} if bound_of_g is None else {"gradient of g": bound_of_g})
    assert all(error <= bounds[name] for name, error in errors.items()), errors  # a NaN is not below it


def _steps(g: Tensor) -> Tensor:
    """Differences of neighbours [b, s, n] that lie in one chunk of 64."""
    inside = torch.arange(1, g.shape[1], device=g.device) % 64 != 0
    return (g[:, 1:] - g[:, :-1])[:, inside]
