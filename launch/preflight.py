"""python -m launch preflight RECIPE [section.key=value ...] [--json] [--wait SECONDS]

Examines whether a recipe can begin here, in less than a minute: software, GPUs and their speed, disks, data and checkpoints as every node
sees them, locks, clocks, network. Alone it examines one device; on N, or on the nodes of a job, start it as training: torchrun
--nproc-per-node N -m launch preflight ... A line for each finding that matters, the verdict last; --json prints everything instead. --wait
says how long to wait for a process that does not answer (120 s). Nothing is left in the run folder.

Exit code 0: go. 2: a mistake in recipe, data or settings. 3: a bad node, named. 1: it could not be found out. Since torchrun makes 1 of all
that are not 0, the environment may name files: HYBRID_MEGATRON_PREFLIGHT, which gets `ok`, `refused SENTENCE`, `bad_nodes` or `failed
SENTENCE`, and HYBRID_MEGATRON_BAD_NODES, which gets the names of bad nodes, one a line.
"""

import json
import os
import sys

from hybrid_megatron.errors import ConfigError, exit_with_code_2
from hybrid_megatron.preflight import report as reports
from hybrid_megatron.preflight.finding import Finding, Level


def main(words: list[str]) -> None:
    if not words or {"-h", "--help"} & set(words):
        print(__doc__.strip())
        raise SystemExit(0 if words else 2)
    speaks = os.environ.get("RANK", "0") == "0"
    with exit_with_code_2(speaks=speaks):
        if speaks:
            reports.forget_verdict()
        try:
            recipe, as_json, wait = _split(words)
        except ConfigError as error:
            if speaks:
                reports.write_verdict(reports.Report("", findings=[Finding("words", Level.REFUSED, str(error))]))
            raise
        from hybrid_megatron.preflight.run import WAIT_SECONDS, preflight  # after the words are read: this imports torch and megatron-core

        def tell(report: reports.Report) -> None:
            print(json.dumps(reports.as_dict(report), indent=2) if as_json else reports.as_text(report), flush=True)
            reports.write_verdict(report)

        try:
            report = preflight(recipe, tell, WAIT_SECONDS if wait is None else wait)
        except OSError as error:
            print(f"error: preflight cannot be made: {error}", file=sys.stderr, flush=True)
            raise SystemExit(1) from None
    if report.stuck:
        sys.stdout.flush()
        os._exit(report.code)  # a thread waits in a collective for ever
    raise SystemExit(report.code)


def _split(words: list[str]) -> tuple[list[str], bool, float | None]:
    """The recipe with its overrides, whether --json is there, and the seconds of --wait."""
    recipe, as_json, wait, rest = [], False, None, iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if word == "--json":
            as_json = True
        elif name == "--wait":
            wait = _seconds(value if equals else next(rest, ""))
        elif word.startswith("--"):
            raise ConfigError(f"preflight has no option {word}; options are --json and --wait SECONDS")
        else:
            recipe.append(word)
    if not recipe or "=" in recipe[0]:
        raise ConfigError("no recipe given: name it first, e.g. python -m launch preflight 776m+gdn_nope_lh+pretrain_4k data.train=PREFIX")
    return recipe, as_json, wait


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--wait {text}: it must be a number of seconds above 0, e.g. 120")
    return seconds


if __name__ == "__main__":
    main(sys.argv[1:])
