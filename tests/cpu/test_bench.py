"""`python -m launch bench`: one cell from the command to its files, and each part against answers known beforehand."""

import csv
import io
import json
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from hybrid_megatron import platform
from hybrid_megatron.benchmarking import run_cell as run_cell_module
from hybrid_megatron.benchmarking.cell_process import main as measure_in_this_process
from hybrid_megatron.benchmarking.cells import CONTEXTS, RECIPES, Cell, make_cells
from hybrid_megatron.benchmarking.kernel_kinds import KINDS, OTHER, kind_of
from hybrid_megatron.benchmarking.peers import _PEERS, build_peer
from hybrid_megatron.benchmarking.plots import plot_results
from hybrid_megatron.benchmarking.profile import _STEP, analyse, profile_steps
from hybrid_megatron.benchmarking.results import summarise, write_results
from hybrid_megatron.benchmarking.run_cell import Processes, run_cell, run_side_by_side
from hybrid_megatron.benchmarking.sizing import config_of
from hybrid_megatron.benchmarking.table import table
from hybrid_megatron.model.accounting import account
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.planning.choices import USABLE
from hybrid_megatron.planning.layout import Layout
from hybrid_megatron.planning.memory import GIB, peak_memory
from launch import bench
from tests.cpu.runs import Ended

TINY = "776m+gdn_nope_lh+tiny"


def command(*words: str) -> Ended:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            bench.main(list(words))
        except SystemExit as end:
            code = end.code
    return Ended(code, out.getvalue(), err.getvalue())


# --- the whole ----------------------------------------------------------------------------------------------------------------------


def test_one_cell(tmp_path):
    """A process of its own measures a recipe at another context than its own; screen, CSV, JSON and pictures tell the same."""
    ended = command(TINY, "seed=3", "--contexts", "64", "--out", str(tmp_path))
    assert (ended.code, ended.err) == (0, ""), (ended, [log.read_text()[-2000:] for log in (tmp_path / "logs").iterdir()])
    told = json.loads((tmp_path / "bench.json").read_text())
    [row], [line] = told["rows"], told["lines"]
    assert (row["name"], row["context"], row["gpus"], row["micro_batch"], row["tokens"]) == (TINY, 64, 1, 2, 128)
    assert row["fastest_step_seconds"] <= row["step_seconds"] <= row["slowest_step_seconds"] <= row["start_to_first_step_seconds"]
    assert row["tokens_per_second_per_gpu"] == row["tokens"] / row["step_seconds"]
    assert row["first_loss"] == pytest.approx(5.55, abs=0.1), "random tokens of 256 words, before anything is learnt: log 256"
    assert row["mfu"] is None, "a CPU's peak is not known"
    [in_csv] = csv.DictReader((tmp_path / "bench.csv").open())
    rate = line["tokens_per_second_per_gpu"]
    assert float(in_csv["tokens_per_second_per_gpu"]) == rate and f"{rate:,.0f}" in ended.out
    assert {path.name for path in tmp_path.glob("*.png")} == {"tokens_per_second.png", "memory.png"}


def test_what_fails_is_a_row_and_the_rest_goes_on(tmp_path, monkeypatch):
    """A process that dies without a word; then one cell of two."""
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(run_cell_module, "_MODULE", "no_such_module")
    died = run_cell(Cell(TINY, 64), 1, tmp_path / "logs")
    assert died["failed"].startswith("its process ended with code 1; ")
    assert "no_such_module" in Path(died["failed"].split("; ")[1].split(" has ")[0]).read_text()

    monkeypatch.setattr(bench, "run_cell", lambda cell, gpus, logs: died if cell.context == 64 else row(recipe=TINY, context=128))
    ended = command(TINY, "--contexts", "64,128", "--out", str(tmp_path / "one"))
    assert ended.code == 0 and f"{TINY} at 64: its process ended with code 1" in ended.out
    assert [line["failed"] is None for line in json.loads((tmp_path / "one/bench.json").read_text())["lines"]] == [False, True]
    ended = command(TINY, "--contexts", "64", "--out", str(tmp_path / "none"))
    assert (ended.code, ended.errors) == (2, ["nothing could be measured; the table says why"])


def test_side_by_side(tmp_path, monkeypatch):
    """Two at once, each with GPUs of its own; the table is in the order of the words whatever ended first."""
    monkeypatch.setattr(platform, "visible_devices", lambda: ["4", "5", "GPU-6", "7"])
    began, saw = threading.Barrier(2, timeout=30), {}

    def measured(cell: Cell, gpus: int, logs: Path, devices: str, beside: Processes) -> dict:
        saw[cell.context] = devices
        began.wait()  # both are there
        time.sleep(0.3 if cell.context == 64 else 0.0)
        return row(recipe=TINY, context=cell.context)

    monkeypatch.setattr(run_cell_module, "run_cell", measured)
    ended = command(TINY, "--contexts", "64,128", "--gpus", "2", "--at-once", "2", "--out", str(tmp_path))
    assert ended.code == 0 and sorted(saw.values()) == ["4,5", "GPU-6,7"]
    assert ended.out.index("2 of 2") < ended.out.index("1 of 2")
    assert [each["context"] for each in json.loads((tmp_path / "bench.json").read_text())["rows"]] == [64, 128]


def test_processes_see_the_gpus_given_to_them_and_end_with_the_command(tmp_path, monkeypatch):
    """Of three cells on two GPUs one is done, one sleeps, and one waits: when no more rows are asked for, none goes on or begins."""
    environments, processes = [], Processes()

    def popen(command, env, **more):
        environments.append(env["CUDA_VISIBLE_DEVICES"])
        return subprocess.Popen(["sleep", "60" if len(environments) > 1 else "0"], env=env, **more)

    monkeypatch.setattr(run_cell_module, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": popen}))
    found = run_side_by_side([Cell(TINY, context) for context in (64, 128, 256)], 1, tmp_path, ["0", "1"], processes)
    _, first = next(found)
    assert first["failed"].startswith("its process ended with code 0")
    found.close()
    assert all(process.poll() is not None for process in processes.running) and set(environments) <= {"0", "1"}
    with pytest.raises(RuntimeError, match="the measurements have ended"):
        processes.start(["true"], None, {})


def test_no_rank_outlives_its_torchrun():
    """Each has a session of its own, which no signal to torchrun's group reaches."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", "sleep", "300"]
    torchrun = subprocess.Popen([sys.executable, *ranks], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def started() -> list[psutil.Process]:
        return [each for each in psutil.Process(torchrun.pid).children(recursive=True) if each.name() == "sleep"]

    for _ in range(600):
        if len(ranks := started()) == 2:
            break
        time.sleep(0.1)
    run_cell_module.kill(torchrun)
    gone, alive = psutil.wait_procs(ranks, timeout=10)
    assert (len(gone), alive) == (2, []) and torchrun.poll() is not None


def test_ctrl_c_leaves_what_was_measured(tmp_path, monkeypatch):
    def stopped_at_128(cell: Cell, gpus: int, logs: Path) -> dict:
        if cell.context == 128:
            raise KeyboardInterrupt
        return row(recipe=TINY, context=64)

    monkeypatch.setattr(bench, "run_cell", stopped_at_128)
    ended = command(TINY, "--contexts", "64,128", "--out", str(tmp_path))
    assert (ended.code, ended.err) == (130, "stopped    by SIGINT, nothing lost\n")
    assert [line["context"] for line in json.loads((tmp_path / "bench.json").read_text())["lines"]] == [64]


def test_a_cell_tells_why_it_gave_nothing(tmp_path, capsys):
    for name, cell, reason in (
        ("rule", Cell(TINY, 64, overrides=("parallel.tensor=3",)), "parallel.tensor=3"),
        ("peer", Cell(TINY, 64, peer="fla_gdn"), "FLA Gated DeltaNet is made of Triton kernels and needs a CUDA device"),
    ):
        with pytest.raises(SystemExit):
            measure_in_this_process(cell, tmp_path / name, 0.0)
        assert reason in json.loads((tmp_path / name).read_text())["failed"]


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["776m+gdn_nope_hl"], "recipe fragment 'gdn_nope_hl' is not known; did you mean gdn_nope_lh?"),
        ([TINY, "train.micro_batches=2"], "train.micro_batches"),
        ([TINY, "--contexts", "4k"], "--contexts 4k: whole numbers above 0 are needed, e.g. --contexts 4096,32768"),
        ([TINY, "--rounds", "1,2"], "--rounds 1,2: it must be one whole number above 0"),
        ([TINY, "--contexts"], "--contexts: a value must follow"),
        ([TINY, "--peer"], "bench has no option --peer; options are "),
        ([TINY, "--at-once", "2"], "--at-once 2: it needs 2 GPUs, and torch sees none here; leave it out or name a smaller number"),
        ([TINY, "--peers", "--gpus", "2"], "--peers: they run on one GPU; leave out --gpus"),
        ([], "torch sees no GPU here"),
    ],
)
def test_mistakes(words, sentence, monkeypatch):
    monkeypatch.setattr(platform, "is_cuda", lambda: False)
    ended = command(*words)
    assert ended.code == 2 and not ended.out
    [error] = ended.errors
    assert sentence in error


def test_results_are_not_overwritten(tmp_path):
    write_results([row()], [], tmp_path)
    [error] = command(TINY, "--out", str(tmp_path)).errors
    assert error == f"--out {tmp_path}: it holds results already; name another folder"


# --- what is measured ---------------------------------------------------------------------------------------------------------------


def test_cells():
    assert [cell.name for cell in make_cells(["776m+rope", "376m+gla_nope_hh", "776m+gdn_nope_lh"], [4096], peers=True)] == [
        "776m+rope", "llama like 776m+rope", "fla_gdn like 776m+rope", "376m+gla_nope_hh", "llama like 376m+gla_nope_hh",
        "fla_gla like 376m+gla_nope_hh", "776m+gdn_nope_lh",
    ]  # fmt: skip
    rounds = make_cells(list(RECIPES), list(CONTEXTS), rounds=3)
    assert len(rounds) == 3 * len(RECIPES) * len(CONTEXTS)
    first, second, third = ([(cell.recipe, cell.context) for cell in rounds if cell.round == n] for n in (1, 2, 3))
    assert first == second[::-1] == third
    own = make_cells(["776m+rope", "776m+rope+extend_32k"], None)
    assert [(cell.recipe, cell.context) for cell in own] == [("776m+rope", 4096), ("776m+rope+extend_32k", 32_768)]


def test_sizes():
    """The recipe's tokens at once, over any context and number of GPUs; less where memory is short; what is said stays."""
    config = config_of(Cell("776m+rope", 4096), 1, None)
    assert (config.train.micro_batch, config.train.batch_tokens, config.num_steps) == (8, 32_768, 14)
    config = config_of(Cell("776m+rope", 32_768, profile=True), 1, None)
    assert (config.train.micro_batch, config.train.batch_tokens, config.num_steps) == (1, 32_768, 19)
    config = config_of(Cell("776m+rope", 4096, overrides=("parallel.tensor=2", "parallel.pipeline=2")), 8, None)
    assert Layout(config, plan_layers(config), 8).micro_batches == 8 and config.train.batch_tokens == 2 * 8 * 32_768

    for gib, overrides, expected in (
        (139, (), (8, "none")),
        (24, (), (2, "none")),
        (12, (), (1, "full")),  # the least there is
        (12, ("train.micro_batch=4",), (4, "none")),
    ):
        config = config_of(Cell("776m+rope", 4096, overrides=overrides), 1, gib * GIB)
        assert (config.train.micro_batch, config.train.recompute) == expected, gib
        fits = peak_memory(Layout(config, plan_layers(config), 1)) <= USABLE * gib * GIB
        assert fits == (gib > 12)


def test_peer_is_of_the_same_size():
    config = config_of(Cell("776m+rope+tiny", 128), 1, None)
    peer = build_peer(_PEERS["llama"], config)
    assert sum(parameter.numel() for parameter in peer.parameters()) == account(config, plan_layers(config)).total_params


# --- where a step's time goes -------------------------------------------------------------------------------------------------------


def event(name: str, begin: float, end: float, cat: str = "kernel") -> dict:
    return {"ph": "X", "name": name, "ts": begin, "dur": end - begin, "cat": cat, "tid": 1}


def test_trace_of_a_gpu():
    """Two equal steps a millisecond apart; what overlaps counts once, communication where nothing hides it."""
    one = [
        event(_STEP, 0, 700, "user_annotation"),
        event("cudaStreamSynchronize", 650, 660, "cuda_runtime"),
        event("nvjet_sm90_tst_128x256", 0, 100),
        event("flash_fwd", 90, 190),  # 10 beside the product
        event("ncclDevKernel_AllReduce", 150, 300),  # 40 hidden
        event("ncclDevKernel_AllGather", 250, 320),  # 50 beside the other
        event("chunk_bwd_kernel_dqkwg", 330, 400),  # after a gap of 10
        event("multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata>", 500, 600),  # the host is behind by 100
    ]
    two = [each | {"ts": each["ts"] + 1000} for each in one]
    found = analyse([*one, *two, event("cudaStreamSynchronize", 5000, 5001, "cuda_runtime"), {"ph": "M", "name": "process_name"}])
    expected = dict.fromkeys((*KINDS, OTHER), 0.0) | {
        "matrix products": 100, "attention": 90, "communication": 130, "linear mixers": 70, "optimizer": 100, "gaps": 10,
        "host": (2 * 100 + 400) / 2,
    }  # fmt: skip
    assert {kind: seconds * 1e6 for kind, seconds in found["split_seconds"].items()} == pytest.approx(expected)
    assert found["step_seconds"] * 1e6 == pytest.approx((1600 - 0) / 2)
    assert (found["steps"], found["kernels"], found["synchronisations"]) == (2, 6, {"cudaStreamSynchronize": 1})
    assert [(top["name"][:4], round(top["seconds"] * 1e6), top["calls"]) for top in found["top"][:2]] == [
        ("nccl", 150, 1),
        ("nvje", 100, 1),
    ]


def test_trace_of_a_cpu():
    """An operator has the time in which none that it called ran."""
    found = analyse(
        [
            event(_STEP, 0, 120, "user_annotation"),
            event("aten::linear", 0, 100, "cpu_op"),
            event("aten::mm", 10, 90, "cpu_op"),
            event("aten::resolve_conj", 20, 21, "cpu_op"),
            event("aten::softmax", 105, 115, "cpu_op"),
            event("aten::mm", 200, 300, "cpu_op"),
        ]
    )
    split = {kind: round(seconds * 1e6) for kind, seconds in found["split_seconds"].items() if seconds}
    assert split == {"matrix products": 79, "norms and elementwise": 21, "gaps": 5, "loss": 10}
    assert {top["name"]: top["calls"] for top in found["top"]} == {
        name: 1 for name in ("aten::mm", "aten::linear", "aten::resolve_conj", "aten::softmax")
    }


def test_profile_of_real_work():
    matrix = torch.randn(256, 256)
    found = profile_steps(lambda: matrix @ matrix, 3)
    assert found["steps"] == 3 and sum(found["split_seconds"].values()) == pytest.approx(found["step_seconds"])
    assert found["split_seconds"]["matrix products"] > 0 and found["split_seconds"]["attention"] == 0
    assert next(top["calls"] for top in found["top"] if top["name"] == "aten::mm") == 1
    assert found["waits"] == {}


@pytest.mark.parametrize(
    "name, kind",
    [
        ("_gradient", "loss"),
        ("_row_sums", "loss"),
        ("_rotate", "norms and elementwise"),
        ("_silu_gradient", "norms and elementwise"),
        ("_swiglu_gradient", "norms and elementwise"),
        ("_rms_norm_gradients", "norms and elementwise"),
        ("_norm_gated_gradients", "norms and elementwise"),
        ("_gates_gradients", "linear mixers"),
        ("_gla_scores_gradients", "linear mixers"),
        ("_adamw_update", "optimizer"),
        ("_rwkv7_inputs_gradients", "norms and elementwise"),
        ("_rwkv7_output", "norms and elementwise"),
        ("_token_shift_gradients", "norms and elementwise"),
        ("triton_poi_fused_add_cat_mul_rsub_sigmoid_silu_split_0", "norms and elementwise"),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x128x128_4x1x1_kernel0_0", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("triton_tem_fused_mm_0", "matrix products"),
        ("chunk_bwd_kernel_dqkwg", "linear mixers"),
        ("chunk_local_cumsum_scalar_kernel", "linear mixers"),
        ("l2norm_fwd_kernel", "norms and elementwise"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
            "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4> >",
            "optimizer",
        ),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("Memcpy DtoD (Device -> Device)", "norms and elementwise"),
        ("a kernel nobody knows", OTHER),
    ],
)
def test_kinds_of_kernels(name, kind):
    assert kind_of(name) == kind


# --- results ------------------------------------------------------------------------------------------------------------------------


def row(recipe: str = "776m+rope", peer: str | None = None, rate: float = 100.0, context: int = 4096, turn: int = 1, **more) -> dict:
    return {
        "name": recipe if peer is None else f"{peer} like {recipe}", "recipe": recipe, "peer": peer, "peers_like": "776m+rope",
        "context": context, "round": turn, "failed": None, "device": "made up", "gpus": 1, "parameters": 1, "micro_batch": 8,
        "micro_batches": 1, "recompute": "none", "precision": "bf16", "tokens": 32_768, "tokens_per_second_per_gpu": rate, "mfu": 0.4,
        "model_tflops_per_gpu": 1.0, "peak_memory_gib": 10.0, "step_seconds": 32_768 / rate, "first_step_seconds": 1.0,
        "start_to_first_step_seconds": 2.0, "profile": None,
    } | more  # fmt: skip


def failed(**which) -> dict:
    return {key: row(**which)[key] for key in ("name", "recipe", "peer", "peers_like", "context", "round")} | {"failed": "no memory"}


def test_ratios_are_of_one_round_and_context():
    """The machine is twice as fast in the second round and slower in the third, which the ratios do not see."""
    rows = [row(peer="llama", context=32_768, rate=1.0), row(context=32_768, rate=3.0)]
    for turn, (peer, ours) in enumerate([(100, 130), (200, 250), (50, 60)], start=1):
        rows += [row(peer="llama", rate=peer, turn=turn), row(recipe="776m+gdn_nope_lh", rate=ours, turn=turn)]
    lines = {(line["name"], line["context"]): line for line in summarise(rows)}
    gdn = lines["776m+gdn_nope_lh", 4096]
    assert gdn["ratios"] == {"llama": 1.25} and gdn["tokens_per_second_per_gpu"] == 130
    assert (gdn["lowest"], gdn["highest"]) == (60, 250)
    assert lines["776m+rope", 32_768]["ratios"] == {"llama": 3.0}
    assert lines["llama like 776m+rope", 4096]["ratios"] == {"llama": 1.0}


def test_one_failed_round_leaves_the_others(tmp_path):
    profile = {
        "split_seconds": dict.fromkeys((*KINDS, OTHER), 0.0) | {"attention": 0.3, "host": 0.1},
        "step_seconds": 0.4,
        "synchronisations": {},
    }
    rows = [row(profile=profile), failed(turn=2), failed(recipe="776m+gla_nope_lh"), row(context=32_768), failed(peer="llama")]
    lines = summarise(rows)
    assert [(line["tokens_per_second_per_gpu"], line["failed"]) for line in lines] == [
        (100.0, "no memory"), (None, "no memory"), (100.0, None), (None, "no memory"),
    ]  # fmt: skip
    screen = table(lines)
    assert "776m+gla_nope_lh at 4,096: no memory" in screen and "75.0" in screen and "/ llama" not in screen
    write_results(rows, ["776m+rope"], tmp_path)
    assert [line["attention seconds"] for line in csv.DictReader((tmp_path / "bench.csv").open())] == ["0.3", "", "", ""]
    pictures = plot_results(lines, tmp_path)
    assert [path.stem for path in pictures] == ["tokens_per_second", "memory", "mfu", "parts_of_a_step"]
    assert all(path.stat().st_size > 5000 for path in pictures)
