"""python -m launch COMMAND ...: hands the words to the command's module."""

import contextlib
import importlib
import os
import select
import signal
import sys
from collections.abc import Iterator

COMMANDS = {
    "train": "train a recipe, from the newest checkpoint in its run folder if there is one",
    "plan": "say what a recipe will be and take on so many GPUs, without a GPU",
    "bench": "measure how fast recipes train here, beside what one would use instead",
    "preflight": "examine whether a recipe can begin here: nodes, GPUs, disks, data, network",
    "submit": "submit a recipe to Slurm, planned, checked and with a copy of the code",
    "status": "say how the jobs and the training of a run folder go",
    "cancel": "end the jobs of a run folder, with a checkpoint",
    "run-dir": "print the run folder of a recipe",
    "evaluate": "measure loss by position and perplexity of a trained run, at its training length and beyond",
    "choose-logit-base": "choose the base of HypeNet's logit scale for a trained run, by the loss on held-out tokens",
    "checkpoint": "list, verify and prune the checkpoints of a run",
    "quickstart": "prepare a small real corpus and train recipes/quickstart.yaml on it",
}


def main(words: list[str]) -> None:
    if not words or words[0] not in COMMANDS:
        asked = words and words[0] not in ("-h", "--help")
        text = "usage: python -m launch COMMAND ...\n\n" + "\n".join(f"  {name:<19}{what}" for name, what in COMMANDS.items())
        print(
            f"error: launch has no command {words[0]!r}\n\n{text}" if asked else text, file=sys.stderr if asked or not words else sys.stdout
        )
        raise SystemExit(2 if asked or not words else 0)
    with _reader_may_leave():
        importlib.import_module(f"launch.{words[0].replace('-', '_')}").main(words[1:])


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Whoever reads what is printed may have enough of it, as `head` does: the end then, without a word, as of other programs."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise  # of a socket or of another process
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left at its end
        raise SystemExit(128 + signal.SIGPIPE) from None


def _reader_is_gone() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":  # saving a checkpoint starts helper processes, which import this module anew
    main(sys.argv[1:])
