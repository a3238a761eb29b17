"""Rules between LongCE's windows, the sample that they cut, and the ranks that share each of them."""

import math
from collections.abc import Iterator

from hybrid_megatron.config.schema import RunConfig


def longce_problems(config: RunConfig) -> Iterator[str]:
    longce, parallel, context = config.longce, config.parallel, config.train.context
    if not longce.enabled:
        return
    window, stride = longce.window, longce.stride
    if window + stride > context:
        yield (
            f"longce.window={window}: with longce.stride={stride} a short context is {window + stride} tokens, more than "
            f"train.context={context}; lower one of them"
        )
        return
    chunks = 2 * parallel.context if parallel.context > 1 else 1
    whole = math.lcm(chunks, parallel.context * parallel.tensor if parallel.sequence else 1)
    if (context - window) % stride == 0 and (window + stride) % whole == 0:
        return
    rule = f"it must divide train.context - longce.window = {context - window}"
    if whole > 1:
        rule += f", and longce.window + longce.stride must be a multiple of {whole} under this layout"
    possible = [d for d in range(1, context - window) if (context - window) % d == 0 and (window + d) % whole == 0]
    advice = f"use one of {', '.join(map(str, possible))}" if possible else f"no stride does with longce.window={window}; use another"
    yield f"longce.stride={stride}: {rule}; {advice}"
