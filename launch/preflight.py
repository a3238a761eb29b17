"""python -m launch preflight RECIPE [section.key=value ...]

Examines whether a recipe can begin here, in less than a minute: software, GPUs and their speed, memory, disks, data and checkpoint as every
node sees them, clocks, network. On a login node it says what it did not examine, and why; on N GPUs, or on the nodes of a job, start it as
training: torchrun --nproc-per-node N -m launch preflight RECIPE ... A line for each finding that matters, the verdict last. Nothing is left
in the run folder. A node is bad only if it is found so twice, ten seconds apart.

Exit code 0: go. 2: a mistake in recipe, data or settings. 3: a bad node, named. 1: it could not be found out. Since torchrun makes 1 of all
that are not 0, the environment may name files: HYBRID_MEGATRON_PREFLIGHT, which gets `ok`, `refused SENTENCE`, `bad_nodes` or `failed
SENTENCE`, and HYBRID_MEGATRON_BAD_NODES, which gets the names of bad nodes, one a line.
"""

import os
import sys

from hybrid_megatron.errors import ConfigError, exit_with_code_2
from hybrid_megatron.preflight.report import Finding, Level, Report, forget_verdict, write_verdict
from launch.words import help_if_asked


def main(words: list[str]) -> None:
    help_if_asked(__doc__, words)
    speaks = os.environ.get("RANK", "0") == "0"
    with exit_with_code_2(speaks=speaks):
        if speaks:
            forget_verdict()
        if "=" in words[0] or words[0].startswith("-"):
            problem = f"{words[0]}: the recipe comes first, e.g. python -m launch preflight 776m+gdn_nope_lh+pretrain_4k data.train=PREFIX"
            if speaks:
                write_verdict(Report("", findings=[Finding("recipe", Level.REFUSED, problem)]))
            raise ConfigError(problem)
        from hybrid_megatron.preflight.run import preflight  # after the words are looked at: this imports torch and megatron-core

        try:
            report = preflight(words, _tell)
        except OSError as error:
            print(f"error: preflight cannot be made: {error}", file=sys.stderr, flush=True)
            raise SystemExit(1) from None
    if report.stuck:
        sys.stdout.flush()
        os._exit(report.code)  # a thread waits in a collective for ever
    raise SystemExit(report.code)


def _tell(report: Report) -> None:
    print(report, flush=True)
    write_verdict(report)


if __name__ == "__main__":
    main(sys.argv[1:])
