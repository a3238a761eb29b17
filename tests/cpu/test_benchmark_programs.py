"""Mistakes in the words of benchmarks/*.py that run on rented GPUs: a sentence at once."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "words, sentence",
    [
        (
            ["layout_speed.py", "--gpus", "2", "--only", "foo@128"],
            "error: --only foo@128: it must be MODEL@CONTEXT, e.g. 776m@4096; models are ",
        ),
        (["layout_speed.py", "--gpus", "2", "--only", "tiny"], "error: --only tiny: it must be MODEL@CONTEXT, e.g. 776m@4096; models are "),
        (["layout_speed.py", "--gpus", "1", "--only", "tiny@128"], "error: --gpus 1: layouts need at least two"),
        (["context_parallel.py"], "error: nothing is spread over one process: start it with torchrun "),
        (["multi_gpu_table.py"], "python benchmarks/multi_gpu_table.py FOLDER: "),
    ],
)
def test_mistakes(words, sentence, tmp_path):
    program, *rest = words
    out = [] if program == "multi_gpu_table.py" else ["--out", str(tmp_path)]
    ended = subprocess.run([sys.executable, ROOT / "benchmarks" / program, *rest, *out], capture_output=True, text=True, timeout=120)
    assert ended.returncode and ended.stderr.splitlines()[-1].startswith(sentence), ended.stderr
    assert "Traceback" not in ended.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize("contexts, named", [("abc", "abc"), ("255", "255"), ("256,", "256,")])
def test_contexts_have_two_chunks_for_each_rank(contexts, named):
    from benchmarks.context_parallel import contexts_of

    with pytest.raises(SystemExit, match=f"error: --contexts {named}: multiples of 4 are needed"):
        contexts_of(contexts, 2)
    assert contexts_of("256,64", 2) == [64, 256] and contexts_of("32768", 2) == [32_768, 65_536]
