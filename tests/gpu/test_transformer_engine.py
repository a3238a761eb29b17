"""Transformer Engine's linear layers, norms and attention against ours, where it is installed: losses, gradients, a run that changes
over."""

import shutil
from importlib.util import find_spec

import pytest

from tests.cpu import cells
from tests.cpu.cells import run_folder_metrics
from tests.cpu.test_parity import check_gradients
from tests.cpu.tiny import make_tiny_data, tiny_words
from tests.cpu.zoo import MIXED
from tests.gpu.test_cpu_gpu import BF16 as BF16_LOSSES
from tests.gpu.trainings import train_all

pytestmark = pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
SETTINGS = {
    "linear": ["model.kernels.linear=te"],
    "norm": ["model.kernels.norm=te"],
    "attention": ["model.attention.backend=te"],
    "all": ["model.kernels.linear=te", "model.kernels.norm=te", "model.attention.backend=te"],
}
# Alike but for one more rounding here or there: a quarter of what bf16 may differ from float32 by (test_zoo.py).
BOUND, BOUND_OF_GRADIENTS = 1e-4, 0.125
BF16 = ["model.head_dim=64", "train.precision=bf16"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_tiny_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.parametrize("model", MIXED)
def test_losses_and_gradients(data, model, what):
    words = tiny_words(data, "run_dir=unused", *BF16, *MIXED[model])
    (loss, ours), (with_te, theirs) = (_step([*words, *more]) for more in ([], SETTINGS[what]))
    worst = check_gradients(theirs, ours, 1e9)
    print(f"{model}, {what}: loss {abs(with_te - loss):.1e}, gradients {worst:.1e}")
    assert abs(with_te - loss) <= BOUND
    check_gradients(theirs, ours, BOUND_OF_GRADIENTS)


def _step(words: list[str]) -> tuple[float, dict]:
    loss, _, gradients = cells.loss_and_gradients(words)
    return loss, cells.assemble([gradients])


def test_a_run_that_changes_over(data, tmp_path):
    """Begun with ours and gone on with Transformer Engine's from a checkpoint, and the other way round."""

    def words(name: str, settings: list[str]) -> list[str]:
        return tiny_words(data, f"run_dir={tmp_path / name}", *BF16, *settings)

    whole = train_all([words("ours", []), words("theirs", SETTINGS["all"])])
    for folder in whole:  # as if killed behind step 10
        shutil.copytree(folder, tmp_path / f"{folder.name}_left")
        shutil.rmtree(tmp_path / f"{folder.name}_left" / "checkpoints" / "step_00000020")
    changed = train_all([words("ours_left", SETTINGS["all"]), words("theirs_left", [])])
    of = {folder.name: [line["loss"] for line in run_folder_metrics(folder)] for folder in [*whole, *changed]}
    for name in ("theirs", "ours_left", "theirs_left"):
        difference = max(abs(a - b) for a, b in zip(of[name], of["ours"], strict=True))
        print(f"{name}: {len(of[name])} steps, largest difference of a loss {difference:.1e}")
        assert difference <= BF16_LOSSES
