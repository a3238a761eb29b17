"""python -m launch preflight on two GPUs: sound ones, and one that is busy, full, or does not answer. -s shows the reports."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.cpu.preflight_cells import Said, command
from tests.cpu.ranks import Ranks
from tests.cpu.runs import CHECKOUT
from tests.cpu.tiny import make_tiny_data, tiny_words

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

MULTIPLY = """
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
b = torch.empty_like(a)
torch.mm(a, a, out=b)
print("begun", flush=True)
while True:
    for _ in range(20):
        torch.mm(a, a, out=b)
    torch.cuda.synchronize()
"""
HOLD_HALF = """
held = torch.empty(torch.cuda.mem_get_info()[1] // 2, device="cuda", dtype=torch.uint8)
print("begun", flush=True)
time.sleep(600)
"""
STAYS_AWAY = """
import os, sys, time
from hybrid_megatron.preflight import links, run
from launch import preflight
run.LINK_SECONDS = 20.0
if os.environ["RANK"] == "1":
    links._bus_bandwidth = lambda *_: time.sleep(600)
preflight.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    data = make_tiny_data(tmp_path_factory.mktemp("preflight"))
    return tiny_words(data, f"run_dir={data / 'run'}")


def preflight(gpus: Ranks, words: list[str], per_node: int) -> Said:
    """Of the first rank: each GPU has the number of its rank, whatever node the rank says it is on."""
    said = gpus.run(2, command_on_gpu, words, per_node)
    print(f"\n{said[0].out}{said[0].err}")
    assert len({each.code for each in said}) == 1, said
    return said[0]


def command_on_gpu(words: list[str], per_node: int) -> Said:
    return command(words, per_node, {"LOCAL_RANK": os.environ["RANK"]})


@contextlib.contextmanager
def another_process(what: str) -> Iterator[None]:
    """On the second GPU, at its work."""
    code = f"import time, torch\ntorch.cuda.set_device(1)\n{what}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "begun\n"
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("per_node", [2, 1])
def test_sound_gpus(gpus, words, per_node):
    """On one node, and as if on two."""
    said = preflight(gpus, words, per_node)
    assert said.code == 0, said
    assert [line.split(":")[0] for line in said.lines("measured")] == ["speed", "all-reduce"]
    assert ("within node1" if per_node == 2 else "over all nodes") in said.lines("measured")[1]


def test_a_busy_gpu_is_named(gpus, words):
    with another_process(MULTIPLY):
        said = preflight(gpus, words, per_node=1)
    assert (said.code, said.verdict) == (3, "bad nodes: node2")
    assert any("speed: rank 1 (GPU 1 of node2) reaches" in line for line in said.lines("bad node")), said


def test_a_gpu_that_is_taken_is_named(gpus, words):
    with another_process(HOLD_HALF):
        said = preflight(gpus, words, per_node=2)
    assert said.code == 0 and any("memory: rank 1 (GPU 1 of node1) has" in line for line in said.lines("warning")), said


def test_too_few_gpus(words):
    """Of three processes the last has none: a mistake in the command, and nobody waits for it."""
    more = Ranks(3)
    try:
        said = more.run(3, command, [*words, "train.micro_batch=1", "train.batch_tokens=384"])
    finally:
        more.close()
    assert {each.code for each in said} == {2} and "node1 sees 2 GPUs for 3 processes" in said[0].out, said


def test_an_all_reduce_that_does_not_end(words, tmp_path):
    environment = os.environ | {"PYTHONPATH": f"{CHECKOUT}:{os.environ.get('PYTHONPATH', '')}"}
    environment |= {"HYBRID_MEGATRON_BAD_NODES": str(tmp_path / "bad"), "SLURMD_NODENAME": socket.gethostname()}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run(
        [*torchrun, sys.executable, "-c", STAYS_AWAY, *words], cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=180
    )
    print(f"\n{done.stdout}")
    assert done.returncode == 1 and "all-reduce: it does not end within" in done.stdout, done
    assert (tmp_path / "bad").read_text() == socket.gethostname() + "\n"
