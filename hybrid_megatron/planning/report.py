"""A plan as text for people; what its numbers are stands in plan.py."""

from collections.abc import Iterator

from hybrid_megatron.planning.choices import MOST_CONTEXT_RANKS
from hybrid_megatron.planning.memory import OPTIMIZER_STEP

_LAYOUTS_SHOWN = 12
_GROUPS_SHOWN = 4


def report(plan: dict) -> str:
    """All that is in the plan, in the order in which it is decided: model, schedule, sizes, then each number of GPUs."""
    lines = [_line("recipe", plan["recipe"]), _line("run", plan["run_dir"])]
    if plan.get("layers"):
        lines += [_line("layers", plan["layers"]), "", *_model(plan), ""]
    if "steps" in plan:
        lines += [*_schedule(plan), ""]
    if plan.get("layers"):
        lines += [*_possible_sizes(plan["possible_sizes"]), ""]
        for count in plan["layouts"]:
            lines += [*_on(plan, count), ""]
    return "\n".join(lines).rstrip()


def study_report(study: dict) -> str:
    """One line for each run of a study, on the GPUs it is meant for, and their sum."""
    rows = [("run", "GPUs", "parameters", "steps", "GiB a GPU", "GPU hours", "")]
    for run in study["runs"]:
        count = str(run["gpus"])
        memory, time = (run.get(key, {}).get(count) for key in ("memory_gib_per_gpu", "time"))
        suggestion = run.get("suggestion", {}).get(count)
        problems = [*run["problems"]["recipe"], *run["problems"][count]]
        remark = problems[0] if problems else ""
        if memory and not memory["fits"]:
            remark = f"does not fit; {' '.join(suggestion['overrides'])} does" if suggestion else "does not fit in any layout"
        rows.append(
            (
                run["run"],
                count,
                f"{run['parameters']['total'] / 1e6:,.1f}M" if "parameters" in run else "",
                f"{run['steps']:,}" if "steps" in run else "",
                _amount(memory["peak"], 1) if memory else "",
                f"{time['gpu_hours']:,.0f}" if time else "",
                remark,
            )
        )
    rows.append(("all", "", "", "", "", f"{study['gpu_hours']:,.0f}", ""))
    return "\n".join([_line("study", study["study"]), "", *_table(rows)])


def _line(what: str, value: str) -> str:
    return f"{what:<12}{value}"


def _table(rows: list[tuple[str, ...]], indent: str = "") -> list[str]:
    """The first column to the left, numbers to the right, the last column to the left if it holds words."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    last = len(widths) - 1

    def cells(row: tuple[str, ...]) -> Iterator[str]:
        for i, (cell, width) in enumerate(zip(row, widths)):
            yield cell.ljust(width) if i in (0, last) else cell.rjust(width)

    return [indent + "  ".join(cells(row)).rstrip() for row in rows]


def _model(plan: dict) -> list[str]:
    total, flops = plan["parameters"]["total"], plan["forward_flops_per_token"]
    forward = sum(flops.values())
    rows = [("", "parameters", "share", "forward FLOPs a token", "share", "")]
    for part, count in plan["parameters"]["parts"].items():
        mine = flops.get(part, 0)
        rows.append((part, f"{count:,}", f"{count / total:.1%}", f"{mine / 1e6:,.2f} M", f"{mine / forward:.1%}", ""))
    short = plan["flops_per_token"] - 3 * forward
    if short > 1e-6 * forward:
        rows.append(("longce", "", "", f"{short / 1e6:,.2f} M", "", "forward passes over short contexts, on top of forward and backward"))
    rows.append(("all", f"{total:,}", "", f"{forward / 1e6:,.2f} M", "", f"forward and backward {plan['flops_per_token'] / 1e6:,.1f} M"))
    states = ", ".join(f"{mixer} {_amount(size / 2**20, 1)}" for mixer, size in plan["state_bytes"].items())
    return [*_table(rows), _line("states", f"MiB that one sample leaves for its continuation: {states}")]


def _schedule(plan: dict) -> list[str]:
    lines = [_line("steps", f"{plan['steps']:,} for {plan['tokens']:,} tokens")]
    if plan["schedule"]:
        rows = [("schedule", "step", "tokens", "lr", "batch tokens", "")]
        rows += [("", f"{p['step']:,}", f"{p['tokens']:,}", f"{p['lr']:.3g}", f"{p['batch_tokens']:,}", "") for p in plan["schedule"]]
        lines += _table(rows)
    return lines


def _possible_sizes(possible: dict) -> list[str]:
    units = ", ".join(f"{count} units in {layer}" for layer, count in possible["units"].items())
    limits = f"{units}; FFN {possible['ffn_size']:,}, vocabulary {possible['vocab_size']:,}"
    virtual = "; ".join(f"{', '.join(map(str, sizes))} at {stages}" for stages, sizes in possible["virtual_pipeline"].items())
    return [
        _line("tensor", f"{_numbers(possible['tensor'])} possible ({limits})"),
        _line("context", f"{_numbers(possible['context'])} possible, of up to {MOST_CONTEXT_RANKS}"),
        _line("pipeline", f"{_numbers(possible['pipeline'])} possible; virtual_pipeline {virtual or 'none'}"),
    ]


def _numbers(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes)) or "none"


def _on(plan: dict, count: str) -> list[str]:
    gpus = f"{count} GPU{'s' if int(count) > 1 else ''}"
    problems = [*plan["problems"]["recipe"], *plan["problems"][count]]
    if problems:
        lines = [f"on {gpus}: not as the recipe stands", *(f"  {problem}" for problem in problems)]
    else:
        lines = [f"on {gpus}", *(f"  {line}" for line in _own_layout(plan, count))]
    return lines + [
        f"  {line}" for line in [*_layouts(plan["layouts"][count]), *_suggestion(plan["suggestion"][count], gpus, bool(problems))]
    ]


def _own_layout(plan: dict, count: str) -> Iterator[str]:
    batch, grid, memory, time = (plan[key][count] for key in ("batch", "rank_grid", "memory_gib_per_gpu", "time"))
    yield _line(
        "batch",
        f"{batch['tokens']:,} tokens = {batch['samples']} samples = {batch['data']} data ranks x {batch['micro_batches']} micro-batches "
        f"of {batch['micro_batch']}",
    )
    for kind, groups in grid["groups"].items():
        if len(groups[0]) > 1:
            across = "" if grid["within_nodes"][kind] else "; over several nodes of 8"
            yield _line("ranks", f"{kind.replace('_', ' and ')}: {_groups(groups)}{across}")
    parts = ", ".join(f"{part} {_amount(memory[part], 2)}" for part in ("weights", "gradients", "optimizer", "activations"))
    where = f" on stage {memory['stage']}" if len(memory["stages"]) > 1 else ""
    need = memory["moments"][memory["moment"]] - sum(memory[part] for part in ("weights", "gradients", "optimizer"))
    if memory["moment"] != OPTIMIZER_STEP:
        need -= memory["activations"]
    verdict = "fits" if memory["fits"] else f"DOES NOT FIT in the {memory['usable']:.0f} usable"
    yield _line("memory", f"{_amount(memory['peak'], 1)} GiB of {memory['device']:.0f}, its peak at: {memory['moment']}{where}; {verdict}")
    if memory["in_flight"] > 1:
        parts += f" (of {memory['in_flight']} passes in flight)"
    if memory["context"]:
        parts += f", {_amount(memory['context'], 2)} of them for context ranks"
    yield _line("", f"{parts}; {memory['moment']} {_amount(need, 2)}")
    sent = ", ".join(f"{kind} {_amount(size, 2)}" for kind, size in plan["communication_gib_per_step"][count].items() if size)
    yield _line("sends", f"GiB a step and GPU: {sent or 'nothing'}")
    saved = plan["checkpoint_gib"][count]
    yield _line(
        "checkpoint",
        f"{_amount(saved['disk'], 1)} GiB on disk; host memory a GPU: {_amount(saved['copy'], 2)} GiB to write it beside training, "
        f"{_amount(saved['gather'], 1)} GiB for a moment to gather a permanent one",
    )
    yield _line(
        "time",
        f"{_duration(time['hours'])} = {time['gpu_hours']:,.1f} GPU hours; {time['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU, "
        f"{time['step_seconds']:.2f} s a step",
    )
    yield _line("", f"MFU {time['mfu']:.1%} of {time['device']}'s {time['peak_flops'] / 1e12:.0f} TFLOP/s, {time['mfu_from']}")


def _groups(groups: list[list[int]]) -> str:
    shown = [_ranks(group) for group in groups[:_GROUPS_SHOWN]]
    more = f", ... ({len(groups)} groups)" if len(groups) > _GROUPS_SHOWN else ""
    return ", ".join(f"[{group}]" for group in shown) + more


def _ranks(group: list[int]) -> str:
    """0-7, or 0 2 4, or the first and last of many with their distance."""
    step = group[1] - group[0]
    even = group == list(range(group[0], group[-1] + 1, step))
    if even and step == 1:
        return f"{group[0]}-{group[-1]}"
    if even and len(group) > 4:
        return f"{group[0]} {group[1]} .. {group[-1]}"
    return " ".join(map(str, group))


def _amount(number: float, places: int) -> str:
    """With so many decimal places, or where they would show nothing of it, one digit."""
    text = f"{number:,.{places}f}"
    return text if not number or float(text.replace(",", "")) else f"{number:.1g}"


def _duration(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 0.1 else f"{hours * 60:.1f} minutes"


def _layouts(found: list[dict]) -> Iterator[str]:
    if not found:
        yield _line("layouts", "none at this micro_batch and recompute")
        return
    names = ("tensor", "context", "pipeline", "data", "micro_batches")
    rows = [("layouts", *names, "GiB", "")]
    for layout in found[:_LAYOUTS_SHOWN]:
        rows.append(("", *(str(layout[name]) for name in names), _amount(layout["memory_gib"], 1), "" if layout["fits"] else "too much"))
    yield from _table(rows)
    if len(found) > _LAYOUTS_SHOWN:
        yield f"        and {len(found) - _LAYOUTS_SHOWN} more: --json"


def _suggestion(suggestion: dict | None, gpus: str, broken: bool) -> Iterator[str]:
    if suggestion is None:
        why = (
            "no layout with other parallel sizes and micro-batches keeps the rules above and fits"
            if broken
            else f"no layout of {gpus} fits in memory"
        )
        yield _line("suggested", f"nothing: {why}")
        return
    words = " ".join(suggestion["overrides"]) or "the recipe as it stands"
    yield _line("suggested", words)
    yield _line("", f"{_amount(suggestion['memory_gib'], 1)} GiB, {_duration(suggestion['hours'])}")
