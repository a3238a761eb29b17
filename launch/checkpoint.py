"""python -m launch checkpoint COMMAND RUN_DIR ...

  list RUN_DIR [--json]              step, tokens, form, layout, size and age of each, and whether it is complete
  verify RUN_DIR [NAME ...]          compare every file with its hash; exit code 2 and a sentence for each file that is damaged
  prune RUN_DIR RULES [--dry-run]    remove by rule: --keep N (the newest N rolling ones stay), --permanent-every N (permanent ones stay
                                     where N divides the step), --damaged (those that a run set aside go); never the newest whole one

Rolling ones are removed by the run itself (checkpoint.keep_last), permanent ones only here; hybrid_megatron/checkpoint/form.py says what
they are.
"""

import argparse
import json
import sys
from pathlib import Path

from hybrid_megatron.checkpoint.inventory import Entry, Rules, entries, named, problems, prune
from hybrid_megatron.checkpoint.sizes import size
from hybrid_megatron.command_line import pasted
from hybrid_megatron.errors import CheckpointError, ConfigError, exit_with_code_2
from hybrid_megatron.quantities import plural


def main(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(__doc__.strip())
        raise SystemExit(0 if words else 2)
    with exit_with_code_2():
        settings = _parser().parse_args(words)
        settings.command(settings)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(f"{message}; see {pasted('launch', 'checkpoint', '--help')}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m launch checkpoint", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="list | verify | prune")

    def command(name: str, function) -> argparse.ArgumentParser:
        added = commands.add_parser(name, allow_abbrev=False)
        added.add_argument("run_dir", type=Path, metavar="RUN_DIR")
        added.set_defaults(command=function)
        return added

    command("list", _list).add_argument("--json", action="store_true")
    command("verify", _verify).add_argument("names", nargs="*", metavar="NAME", default=[])
    pruning = command("prune", _prune)
    pruning.add_argument("--keep", type=int, metavar="N")
    pruning.add_argument("--permanent-every", type=int, metavar="N")
    pruning.add_argument("--damaged", action="store_true")
    pruning.add_argument("--dry-run", action="store_true")
    return parser


def _list(settings: argparse.Namespace) -> None:
    held = entries(settings.run_dir)
    if settings.json:
        print(json.dumps([entry.as_json() for entry in held], indent=1))
        return
    lines = [("name", "step", "tokens", "form", "layout", "size", "age", "status"), *map(_line, held)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def _line(entry: Entry) -> tuple[str, ...]:
    told = ("-", "-", "-", "-")
    if progress := entry.progress:
        layout = " ".join(f"{name} {size}" for name, size in progress.layout.items() if size > 1) or "one process"
        told = (f"{progress.step:,}", f"{progress.tokens:,}", progress.form, layout)
    return (entry.path.name, *told, size(entry.size), _age(entry.age), entry.status)


def _verify(settings: argparse.Namespace) -> None:
    chosen = [named(settings.run_dir, name) for name in settings.names]
    if not chosen:
        chosen = [entry.path for entry in entries(settings.run_dir) if entry.status not in ("unfinished", "damaged")]
    if not chosen:
        print("there is no checkpoint to verify")
    found = []
    for path in chosen:
        wrong = problems(path)
        print(f"{path.name}: {f'{len(wrong)} of its files damaged' if wrong else 'whole'}", flush=True)
        found += wrong
    if found:
        raise CheckpointError("\n".join(found))


def _prune(settings: argparse.Namespace) -> None:
    rules = Rules(settings.keep, settings.permanent_every, settings.damaged)
    if rules == Rules():
        raise ConfigError("no rule given: say what goes with --keep N, --permanent-every N or --damaged")
    for name, value, least in (("--keep", rules.keep, 0), ("--permanent-every", rules.permanent_every, 1)):
        if value is not None and value < least:
            raise ConfigError(f"{name} {value}: it must be {least} or more")
    leaving = prune(settings.run_dir, rules, settings.dry_run)
    would = "would remove" if settings.dry_run else "removed"
    for entry in leaving:
        print(f"{would} {entry.path.name} ({size(entry.size)})")
    print(f"{would} {plural(len(leaving), 'checkpoint')}, {size(sum(entry.size for entry in leaving))}")


def _age(seconds: float) -> str:
    days, hours, minutes = seconds / 86400, seconds / 3600, seconds / 60
    return f"{days:.1f} d" if days >= 2 else f"{hours:.1f} h" if hours >= 1 else f"{minutes:.0f} min"


if __name__ == "__main__":
    main(sys.argv[1:])
