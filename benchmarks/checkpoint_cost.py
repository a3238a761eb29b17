"""python benchmarks/checkpoint_cost.py [RECIPE WORDS ...] [--steps 4] [--saves 3] [--every 500] [--keep DIR] [--out DIR]

What checkpoints cost: for rolling and permanent ones, the seconds that training waits (stall) and those until the files are complete, while
steps go on as in a run. Alone on one device, or through torchrun on several. Without words: 776m+gdn_nope_lh+pretrain_4k with 65,536
tokens a step, on made-up data; on a CPU name a small recipe, e.g. 776m+gdn_nope_lh+pretrain_4k+tiny.

The share of time for a save every `--every` steps is (stall + what the steps beside the writing took longer) / (that many steps + the
same), with the step as it is measured here: with the recipe's own batch of 1M tokens a step is longer and the share smaller. The first save
of a process is shown apart: it also allocates, and page-locks, the memory of the copies. Writes checkpoint_cost.json into `--out`
($OUT, or this folder). The files go to `--keep`, or a folder that is removed at the end.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

USUAL = ["776m+gdn_nope_lh+pretrain_4k", "train.batch_tokens=65536", "train.micro_batch=8"]


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--steps", type=int, default=4, help="steps measured without a save")
    parser.add_argument("--saves", type=int, default=3, help="of each form")
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "benchmarks")))
    settings = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = settings.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        told = measure(settings.words or USUAL, settings.steps, settings.saves, settings.every, folder)
    if int(os.environ.get("RANK", "0")) == 0:
        print(table(told))
        (settings.out / "checkpoint_cost.json").write_text(json.dumps(told, indent=1) + "\n")


def measure(words: list[str], steps: int, saves: int, every: int, folder: Path) -> dict:
    """Everything measured, in seconds and bytes."""
    from h200_start_line import make_dataset

    from hybrid_megatron import platform
    from hybrid_megatron.checkpoint.form import PERMANENT, ROLLING
    from hybrid_megatron.checkpoint.saver import Saver
    from hybrid_megatron.checkpoint.store import CheckpointStore, Progress
    from hybrid_megatron.config import load_recipe
    from hybrid_megatron.data import build_index_caches, open_dataset
    from hybrid_megatron.parallel import start
    from hybrid_megatron.training.build import build_trainer
    from hybrid_megatron.training.optimizer import set_hyperparameters
    from hybrid_megatron.training.step import train_step

    platform.select_device()
    with contextlib.ExitStack() as stack:
        config = load_recipe([*words, f"data.train={folder / 'train'}", "data.valid=null", f"run_dir={folder / 'run'}"])
        state = stack.enter_context(start(config.parallel, config.seed))
        if state.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            make_dataset(folder, config.model.vocab_size, 64 * config.train.batch_tokens)
            build_index_caches(config)
        state.from_rank_0(None)
        trainer = build_trainer(config, state, open_dataset(config, "train"), None)
        events: list[dict] = []
        saver = Saver(
            CheckpointStore(folder / "run"), config.checkpoint, trainer.model, trainer.optimizer, state,
            lambda kind, **facts: events.append({"kind": kind, **facts}),
        )  # fmt: skip
        stack.enter_context(saver)
        done = 0

        def step() -> float:
            nonlocal done
            began = time.perf_counter()
            set_hyperparameters(trainer.optimizer, 1e-4, config.optimizer.weight_decay)
            train_step(config, trainer.model, trainer.optimizer, trainer.train_stream, done % 64, state)
            platform.synchronize()
            done += 1
            return time.perf_counter() - began

        step()  # compiles
        alone = statistics.median(step() for _ in range(steps))
        told = []
        for form in (ROLLING, PERMANENT):
            for _ in range(saves):
                saver.save(f"step_{done:08d}", Progress(done, done, state.layout, "made-up", form), 0, wait=False)
                beside = []
                while state.highest([saver.writing]) != [0]:
                    beside.append(step())
                saver.finish()
                saved = events[-1]
                slower = max(sum(beside) - len(beside) * alone, 0.0)
                cost = saved["stall_seconds"] + slower
                files = list((saver.store.path / saved["checkpoint"]).iterdir())
                told.append(
                    {
                        "form": form,
                        "stall_seconds": saved["stall_seconds"],
                        "seconds": saved["seconds"],
                        "slower_steps_seconds": round(slower, 3),
                        "share": cost / (every * alone + cost),
                        "bytes": sum(file.stat().st_size for file in files),
                    }
                )
                step()
        return {
            "words": words,
            "device": platform.device_name(),
            "processes": state.world_size,
            "parameters": sum(p.numel() for chunk in trainer.model for p in chunk.parameters()),
            "every_steps": every,
            "step_seconds": alone,
            "saves": told,
        }


def table(told: dict) -> str:
    lines = [
        f"{' '.join(told['words'])}; {told['device']} x{told['processes']}; {told['parameters']:,} parameters a device; "
        f"{told['step_seconds']:.3f} s a step",
        f"{'form':<12}{'stall s':>10}{'until complete s':>18}{'slower steps s':>16}{'GiB':>8}{f'share, every {told["every_steps"]}':>18}",
    ]
    for save in told["saves"]:
        lines.append(
            f"{save['form']:<12}{save['stall_seconds']:>10.3f}{save['seconds']:>18.3f}{save['slower_steps_seconds']:>16.3f}"
            f"{save['bytes'] / 2**30:>8.2f}{save['share']:>18.3%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
