"""python benchmarks/checkpoint_cost.py [RECIPE WORDS ...] [--steps 5] [--saves 3] [--every 500] [--seconds 60]
                                      [--rolling-only] [--keep DIR] [--out DIR]

What checkpoints cost: of `--saves` rolling ones and then, but for `--rolling-only`, one permanent one, the seconds that training waits
(stall) and those until the files are complete, while steps go on as in a run. Alone on one device, or through torchrun on several. Without
words: 776m+rope+pretrain_4k with 65,536 tokens a step, on made-up data; on a CPU name a small recipe, 776m+gdn_nope_lh+pretrain_4k+tiny.

The share of time for a save every `--every` steps is (stall + what the steps beside the writing took longer) / (that many steps + the
same), with the step as it is measured here: with the recipe's own batch of 1M tokens a step is longer and the share smaller. The first save
of a process also allocates, and page-locks, the memory of the copies; the share named at the end is the median of the later rolling ones.
No save begins more than `--seconds` after the first step. The disk holds three checkpoints at most: 34 GB for 776m on one device. Writes
checkpoint_cost.json into `--out` ($OUT, or this folder). The files go to `--keep`, or a folder that is removed at the end.
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
sys.path.insert(0, str(ROOT))

USUAL = [
    "776m+rope+pretrain_4k", "train.batch_tokens=65536", "train.micro_batch=8", "train.tokens=4194304", "schedule.warmup_tokens=65536",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--steps", type=int, default=5, help="measured without a save")
    parser.add_argument("--saves", type=int, default=3, help="rolling ones")
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rolling-only", action="store_true")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "benchmarks")))
    settings = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = settings.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        told = measure(settings, folder)
    if int(os.environ.get("RANK", "0")) == 0:
        print(table(told))
        (settings.out / "checkpoint_cost.json").write_text(json.dumps(told, indent=1) + "\n")


def measure(settings: argparse.Namespace, folder: Path) -> dict:
    """Everything measured, in seconds and bytes."""
    from hybrid_megatron import platform
    from hybrid_megatron.benchmarking.made_up import made_up_dataset
    from hybrid_megatron.checkpoint.choose import check_whole
    from hybrid_megatron.checkpoint.form import PERMANENT, ROLLING
    from hybrid_megatron.checkpoint.saver import Saver
    from hybrid_megatron.checkpoint.sizes import checkpoint_bytes
    from hybrid_megatron.checkpoint.store import CheckpointStore, Progress
    from hybrid_megatron.config import load_recipe
    from hybrid_megatron.config.megatron import parameter_dtype
    from hybrid_megatron.model.accounting import account
    from hybrid_megatron.model.pattern import plan_layers
    from hybrid_megatron.parallel import start
    from hybrid_megatron.training.build import build_trainer
    from hybrid_megatron.training.optimizer import set_hyperparameters
    from hybrid_megatron.training.stability import Stability
    from hybrid_megatron.training.step import train_step

    platform.select_device()
    words = settings.words or USUAL
    with contextlib.ExitStack() as stack:
        given = ["data.train=made_up", "data.valid=null", "data.tokenizer=null", f"run_dir={folder / 'run'}"]
        config = load_recipe([*words, *given, "checkpoint.keep_last=1"])
        state = stack.enter_context(start(config.parallel, config.seed))
        params = account(config, plan_layers(config)).total_params
        needed = checkpoint_bytes(params, parameter_dtype(config).itemsize)
        trainer = build_trainer(config, state, made_up_dataset(config), None)
        events: list[dict] = []
        store = CheckpointStore(folder / "run")
        saver = Saver(
            store, config.checkpoint, trainer.model, trainer.optimizer, state, lambda kind, **facts: events.append({"kind": kind, **facts})
        )
        stack.enter_context(saver)
        judge = Stability(config).judge
        done = 0

        def step() -> float:
            nonlocal done
            began = time.perf_counter()
            set_hyperparameters(trainer.optimizer, 1e-4, config.optimizer.weight_decay)
            train_step(config, trainer.model, trainer.optimizer, trainer.train_stream, done % config.num_steps, state, judge)
            platform.synchronize()
            done += 1
            return time.perf_counter() - began

        def save(form: str) -> dict:
            """Steps beside it until no rank writes, as training/loop.py takes them."""
            path = saver.save(f"step_{done:08d}", Progress(done, done, state.layout, "made-up", form), needed, wait=False)
            beside = []
            while state.highest([saver.writing]) != [0]:
                beside.append(step())
            if saver.under_way:
                saver.finish()
            saved = state.from_rank_0(next((event for event in reversed(events) if event["kind"] == "saved"), None))
            slower = max(sum(beside) - len(beside) * alone, 0.0)
            cost = saved["stall_seconds"] + slower
            return {
                "form": saved["form"],
                "stall_seconds": saved["stall_seconds"],
                "seconds": saved["seconds"],
                "steps_beside": len(beside),
                "slower_steps_seconds": round(slower, 3),
                "share": cost / (settings.every * alone + cost),
                "bytes": sum(file.stat().st_size for file in path.iterdir()),
            }

        step()  # compiles
        began = time.perf_counter()
        alone = statistics.median(step() for _ in range(settings.steps))
        if state.rank == 0:
            print(f"{alone:.3f} s a step", file=sys.stderr, flush=True)
        saves = []
        for form in [ROLLING] * settings.saves + [PERMANENT] * (not settings.rolling_only):
            [late] = state.highest([int(time.perf_counter() - began > settings.seconds)])
            if not late:
                saves.append(save(form))
                if state.rank == 0:
                    print(json.dumps(saves[-1]), file=sys.stderr, flush=True)
                step()
        began = time.perf_counter()
        check_whole(store.newest(), state)
        later = [each["share"] for each in saves[1:] if each["form"] == ROLLING]
        return {
            "words": words,
            "device": platform.device_name(),
            "processes": state.world_size,
            "parameters": params,
            "every_steps": settings.every,
            "step_seconds": alone,
            "saves": saves,
            "rolling_share": statistics.median(later) if later else None,
            "verify_seconds": time.perf_counter() - began,
        }


def table(told: dict) -> str:
    every = told["every_steps"]
    lines = [
        f"{' '.join(told['words'])}; {told['device']} x{told['processes']}; {told['parameters']:,} parameters; "
        f"{told['step_seconds']:.3f} s a step",
        f"{'form':<12}{'stall s':>10}{'until complete s':>18}{'slower steps s':>16}{'GiB':>8}{f'share, every {every}':>18}",
    ]
    for save in told["saves"]:
        lines.append(
            f"{save['form']:<12}{save['stall_seconds']:>10.3f}{save['seconds']:>18.3f}{save['slower_steps_seconds']:>16.3f}"
            f"{save['bytes'] / 2**30:>8.2f}{save['share']:>18.3%}"
        )
    if told["rolling_share"] is not None:
        lines.append(f"a rolling save every {every} steps: {told['rolling_share']:.3%} of the time")
    lines.append(f"checking all hashes of one before it is loaded: {told['verify_seconds']:.3f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
