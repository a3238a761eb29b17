"""Fifty kills, and nothing is lost but the steps since the last checkpoint. `make soak` runs this alone and shows each kill."""

import pytest

from tests.slurm.jobs import undisturbed_metrics
from tests.slurm.soak import INTERVAL, Soak

KILLS, STEPS = 50, 1600


@pytest.mark.slow
def test_soak(training, tiny_data, tmp_path, capsys):
    def say(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    words = (f"train.tokens={STEPS * 512}", f"checkpoint.interval_steps={INTERVAL}", "validation.interval_steps=400")
    run = training(*words, "tracking.wandb=disabled")
    soak = Soak(run, seed=6, say=say)
    soak.run(KILLS)
    resumed = [event["step"] for event in run.events("start")]
    lost = [kill.lost for kill in soak.kills]
    mean = sum(lost) / len(lost)
    say(f"{len(lost)} kills, {len(resumed)} starts, {len(soak.jobs)} jobs; steps lost a kill: {mean:.1f}, at most {max(lost)}")
    assert resumed == sorted(resumed), "no start goes back behind an earlier one"
    assert set(resumed) <= {0, *(kill.kept for kill in soak.kills)}, "each from the newest whole checkpoint"
    assert max(lost) <= 2 * INTERVAL, "one interval, and one more while its checkpoint is still being written"
    run.check_computed(undisturbed_metrics(tiny_data, tmp_path / "undisturbed", 1, *words))
    say(f"losses of all {STEPS} steps equal those of a run that nobody killed, bit for bit")
