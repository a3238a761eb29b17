"""What preflight makes of facts, made up here: who is to blame, and for what."""

import pytest

from hybrid_megatron import platform
from hybrid_megatron.errors import NodeError, exit_with_code_2
from hybrid_megatron.preflight import gpus
from hybrid_megatron.preflight.exchange import Broken
from hybrid_megatron.preflight.files import Seen, is_shared, judge_files
from hybrid_megatron.preflight.folders import Folder, judge_folders, judge_room, judge_run_folder
from hybrid_megatron.preflight.gpus import Device, judge_gpus, judge_memory
from hybrid_megatron.preflight.job import Job, Member, nodes_of_allocation, nodes_of_silent
from hybrid_megatron.preflight.links import Links, groups_of, judge_links
from hybrid_megatron.preflight.nodes import NODE_FACTS, checkpoints_to_come, judge_clocks
from hybrid_megatron.preflight.recipe import RecipeRead, judge_recipe
from hybrid_megatron.preflight.report import Finding, Level, Report, odd_ones
from hybrid_megatron.preflight.run import _judge_broken, _twice
from hybrid_megatron.preflight.software import Software, judge_software
from hybrid_megatron.preflight.speed import LOW, SAME, SLOW, Speed, gather_speed, judge_speed
from tests.cpu.test_platform import without_cuda
from tests.cpu.tiny import tiny_config

GIB = 2**30
WELL = ("0", "No", "No")
H200 = Device("NVIDIA H200", 8, False, 140 * GIB, 139 * GIB, WELL)
CPU = Device("CPU")


def job(nodes: int, per_node: int) -> Job:
    return Job([Member(rank, rank % per_node, f"node{rank // per_node + 1}") for rank in range(nodes * per_node)])


def check(findings: list[Finding], level: Level, *words: str, nodes: tuple[str, ...] = ()) -> None:
    """There is one finding of this level, none that is worse, and it says so."""
    worst = max(each.level for each in findings)
    [finding] = [each for each in findings if each.level == worst]
    assert (finding.level, finding.nodes) == (level, nodes), findings
    assert all(word in finding.sentence for word in words), finding.sentence


# ---- the report ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "level, code, verdict",
    [
        (Level.FINE, 0, "ok"),
        (Level.UNKNOWN, 0, "ok"),
        (Level.WARNING, 0, "ok"),
        (Level.FAILED, 1, "failed check: found FAILED"),
        (Level.BAD_NODE, 3, "bad_nodes"),
        (Level.REFUSED, 2, "refused check: found REFUSED"),
    ],
)
def test_the_worst_finding_decides(level, code, verdict):
    findings = [Finding("check", each, f"found {each.name}", ("node2",) if each == Level.BAD_NODE else ()) for each in Level]
    report = Report("recipe", findings=[each for each in findings if each.level <= level])
    assert (report.code, report.verdict) == (code, verdict)
    assert report.bad_nodes == (["node2"] if level >= Level.BAD_NODE else [])


def test_report_is_quiet_about_what_is_fine_and_begins_with_the_worst():
    findings = [
        Finding("a", Level.FINE, "seen"),
        Finding("b", Level.WARNING, "odd"),
        Finding("c", Level.BAD_NODE, "broken", ("node2", "node1")),
        Finding("speed", Level.FINE, "GEMM 700"),
    ]
    assert str(Report("recipe", job(2, 1), findings, seconds={"start": 1.0, "nodes": 2.0})).splitlines() == [
        "preflight  recipe, 2 processes on node1, node2",
        "bad node   c: broken",
        "warning    b: odd",
        "measured   speed: GEMM 700",
        "fine       a, speed",
        "took       3.0 s: start 1.0, nodes 2.0",
        "verdict    bad nodes: node1, node2",
    ]


def test_a_node_is_bad_only_in_two_looks(monkeypatch):
    monkeypatch.setattr("hybrid_megatron.preflight.run.AGAIN_SECONDS", 0.0)

    def look(*nodes: str) -> list[Finding]:
        return [Finding("speed", Level.BAD_NODE, f"{node} slow", (node,)) for node in nodes] or [Finding("speed", Level.FINE, "fast")]

    def twice(first: list[Finding], second: list[Finding], stuck: bool = False) -> list[tuple[Level, tuple[str, ...]]]:
        looks = iter([first, second])
        return [(each.level, each.nodes) for each in _twice(Report("", stuck=stuck), lambda: next(looks))]

    assert twice(look(), []) == [(Level.FINE, ())]
    assert twice(look("a"), look("a")) == [(Level.BAD_NODE, ("a",))]
    assert twice(look("a"), look()) == [(Level.FINE, ()), (Level.WARNING, ())]
    assert twice(look("a", "b"), look("a", "c")) == [(Level.BAD_NODE, ("a",)), (Level.WARNING, ()), (Level.WARNING, ())]
    assert twice(look("a"), [], stuck=True) == [(Level.BAD_NODE, ("a",))], "what hangs cannot be asked again"


def test_odd_ones():
    assert odd_ones({"a": 1, "b": 2, "c": 2}) == (2, {"a": 1})
    assert odd_ones({"a": 1, "b": 2}) == (1, {"b": 2}), "without a majority the first counts"


def test_silent_ranks_are_named(tmp_path, monkeypatch):
    """By their own word, their neighbours', or Slurm's list of nodes."""
    members = job(2, 4).members
    assert nodes_of_silent([6], members, []) == ("node2",)
    assert nodes_of_silent([5], members[:5] + members[6:], []) == ("node2",)
    assert nodes_of_silent([4, 5, 6, 7], members[:4], ["node1", "node9"]) == ("node9",)
    assert nodes_of_silent([4, 5, 6, 7], members[:4], []) == ()
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    assert nodes_of_allocation() == []
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames node[1,7]" ] && printf "node1\\nnode7\\n"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1,7]")
    assert nodes_of_allocation() == ["node1", "node7"]


def test_who_is_to_blame_for_what_fails():
    """All that were asked: nobody. Some: their nodes, also where there is one node alone."""

    def judge(topic: str, ranks: tuple[int, ...], nodes: int = 2) -> tuple[Level, tuple[str, ...]]:
        finding = _judge_broken(Broken(topic, dict.fromkeys(ranks, "CUDA error")), job(nodes, 2))
        return finding.level, finding.nodes

    assert judge("GPUs", (3,)) == (Level.BAD_NODE, ("node2",))
    assert judge("GPUs", (0, 1, 2, 3)) == (Level.FAILED, ())
    assert judge("GPUs", (0,), nodes=1) == (Level.BAD_NODE, ("node1",))
    assert judge(NODE_FACTS, (2,)) == (Level.BAD_NODE, ("node2",))
    assert judge(NODE_FACTS, (0, 2)) == (Level.FAILED, ()) == judge(NODE_FACTS, (0,), nodes=1)


# ---- recipe and software -------------------------------------------------------------------------------------------------------


def test_recipe(tiny_data):
    two, config = job(2, 1), tiny_config(tiny_data)
    check(judge_recipe(two, [RecipeRead(config)] * 2), Level.FINE)
    check(
        judge_recipe(two, [RecipeRead(config), RecipeRead(None, ("no file",))]), Level.BAD_NODE, "not on node2: no file", nodes=("node2",)
    )
    check(judge_recipe(two, [RecipeRead(config), RecipeRead(tiny_config(tiny_data, "seed=2"))]), Level.REFUSED, "node2 and node1 read")
    check(judge_recipe(two, [RecipeRead(None, ("mistake",)), RecipeRead(config)]), Level.REFUSED, "mistake")


def software(unmet: dict[str, str] | None = None, pair: str | None = None, engine: str | None = None, **versions: str) -> Software:
    return Software({"python": "3.12.1", "torch": "2.12.1", "driver": "580.1"} | versions, unmet or {}, pair, engine)


def test_software():
    fine = {"node1": software(), "node2": software()}
    check(judge_software(fine, True), Level.FINE, "torch 2.12.1")
    other = fine | {"node2": software(torch="2.11.0")}
    check(judge_software(other, True), Level.REFUSED, "torch is 2.12.1 on node1, 2.11.0 on node2", "one environment")
    check(judge_software(fine | {"node2": software(driver="570.2")}, True), Level.WARNING, "570.2 on node2")
    old = dict.fromkeys(fine, software({"triton": "triton is 3.6.0"}))
    check(judge_software(old, True), Level.REFUSED, "triton is 3.6.0 on node1, node2")
    check(judge_software(old, False), Level.WARNING, "triton is 3.6.0")
    check(judge_software({"node1": software({"wandb": "wandb is not installed"})}, True), Level.WARNING, "wandb is not installed")
    check(judge_software(dict.fromkeys(fine, software(pair="wrong pair")), True), Level.REFUSED, "wrong pair")
    check(judge_software(fine | {"node2": software(engine="no engine")}, True), Level.REFUSED, "no engine")


# ---- GPUs ----------------------------------------------------------------------------------------------------------------------


def device(**changes) -> Device:
    return Device(**(vars(H200) | changes))


def test_gpus():
    two = job(2, 8)
    check(judge_gpus(two, [H200] * 16), Level.FINE, "16 x NVIDIA H200")
    check(judge_gpus(two, [H200] * 8 + [CPU] * 8), Level.BAD_NODE, "node2 sees 0 GPUs for 8 processes", nodes=("node2",))
    fallen = [H200] * 8 + [device(visible=7)] * 7 + [Device("", 7)]
    check(judge_gpus(two, fallen), Level.BAD_NODE, "node2 sees 7 GPUs for 8 processes", nodes=("node2",))
    check(judge_gpus(two, [device(visible=4)] * 16), Level.REFUSED, "node1 sees 4 GPUs for 8 processes", "--nproc-per-node 4")
    check(judge_gpus(job(1, 2), [H200] * 2), Level.UNKNOWN, "8 on node1, and 2 of them examined")
    mixed = [H200] * 15 + [device(name="NVIDIA H100 80GB HBM3")]
    check(judge_gpus(two, mixed), Level.WARNING, "rank 15 (GPU 7 of node2) is NVIDIA H100 80GB HBM3")
    check(judge_gpus(job(1, 2), [CPU] * 2), Level.UNKNOWN, "torch sees none")
    lost = [Device("CPU", lost=True)] * 2
    check(judge_gpus(job(1, 2), lost), Level.BAD_NODE, "torch sees none of the GPUs of node1", nodes=("node1",))
    hidden = [Device("CPU", given="SLURM_GPUS_ON_NODE=8")] * 4
    check(judge_gpus(job(2, 2), hidden), Level.REFUSED, "node1, node2: Slurm gave", "SLURM_GPUS_ON_NODE=8", "HYBRID_MEGATRON_ALLOW_CPU=yes")


@without_cuda
@pytest.mark.parametrize(
    "environment, given",
    [
        ({}, None),
        ({"SLURM_GPUS_ON_NODE": "8"}, "SLURM_GPUS_ON_NODE=8"),
        ({"SLURM_GPUS_ON_NODE": "0", "SLURM_JOB_GPUS": "0,1"}, None),
        ({"SLURM_JOB_GPUS": "0,1"}, "SLURM_JOB_GPUS=0,1"),
        ({"SLURM_GPUS_ON_NODE": "8", "HYBRID_MEGATRON_ALLOW_CPU": "yes"}, None),
        ({"SLURM_GPUS_ON_NODE": "8", "HYBRID_MEGATRON_ALLOW_CPU": "no"}, "SLURM_GPUS_ON_NODE=8"),
    ],
)
def test_gpus_that_slurm_gave_and_torch_does_not_see(monkeypatch, capsys, environment, given):
    """Preflight is told, and training, with PREFLIGHT=no, ends; the first process of the node says it, whatever its rank."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "HYBRID_MEGATRON_ALLOW_CPU"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"SLURMD_NODENAME": "node7", "LOCAL_RANK": "0"} | environment).items():
        monkeypatch.setenv(name, value)
    assert gpus.gather_device(0).given == given
    if given is None:
        platform.select_device()
        return
    with pytest.raises(SystemExit) as end, exit_with_code_2(speaks=False):
        platform.select_device()
    said = capsys.readouterr().err
    assert (
        end.value.code == 2 and said.startswith(f"error: node7: Slurm gave it GPUs ({given}) and torch sees none") and said.count("\n") == 1
    )
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit), exit_with_code_2(speaks=False):
        platform.select_device()
    assert capsys.readouterr().err == ""


def test_fewer_gpus_than_processes(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(NodeError, match="torch sees 4 GPUs for 8 processes; start 4 "):
        platform.select_device()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    platform.select_device()


def test_cards_that_torch_does_not_see(tmp_path):
    """By the vendor of what is on the PCI bus."""
    for slot, vendor in (("0000:00:01.0", "0x8086"), ("0000:19:00.0", "0x10de")):
        assert not gpus._nvidia_cards(tmp_path)
        (tmp_path / slot).mkdir()
        (tmp_path / slot / "vendor").write_text(f"{vendor}\n")
    assert gpus._nvidia_cards(tmp_path)


def test_memory():
    one = job(1, 2)
    check(judge_memory(one, [H200] * 2, 50 * GIB), Level.FINE, "50.0 GiB")
    check(judge_memory(one, [H200] * 2, 200 * GIB), Level.REFUSED, "200.0 GiB", "140.0 GiB", "launch plan")
    check(judge_memory(one, [H200] * 2, 135 * GIB), Level.WARNING, "some 8%")
    taken = [H200, device(free=60 * GIB)]
    check(judge_memory(one, taken, 50 * GIB), Level.WARNING, "rank 1 (GPU 1 of node1) has 80.0 GiB in use")
    check(judge_memory(one, taken, 70 * GIB), Level.BAD_NODE, "80.0 GiB in use", "60.0 GiB are free", nodes=("node1",))


@pytest.mark.parametrize(
    "health, level, words",
    [
        (WELL, Level.FINE, "8 x"),
        (("[N/A]", "[N/A]", "[N/A]"), Level.FINE, "8 x"),
        (("2", "No", "No"), Level.WARNING, "rank 3 (GPU 3 of node1) has had 2 uncorrectable"),
        (("0", "Yes", "No"), Level.WARNING, "waits for a reset"),
        (("0", "No", "Yes"), Level.BAD_NODE, "no spare one left"),
        (None, Level.UNKNOWN, "nvidia-smi does not tell"),
    ],
)
def test_gpu_health(health, level, words):
    devices = [H200] * 3 + [device(health=health)] + [H200] * 4
    check(judge_gpus(job(1, 8), devices), level, words, nodes=("node1",) if level == Level.BAD_NODE else ())


def test_what_nvidia_smi_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus._health("one") is None, "there is none"
    smi = tmp_path / "nvidia-smi"
    for script, said in (('echo "0, No, Yes"', ("0", "No", "Yes")), ("echo 'Field is not valid'; exit 2", None), ("exit 9", None)):
        smi.write_text(f"#!/bin/sh\n{script}\n")
        smi.chmod(0o755)
        assert gpus._health("one") == said


# ---- disks and files -----------------------------------------------------------------------------------------------------------


def folders(free: int = 100 * GIB, problem: str = "", shared: bool = False) -> dict[str, Folder]:
    return {
        what: Folder(what, free, shared and what == "Triton cache", problem * (what == "/tmp"))
        for what in ("/tmp", "/dev/shm", "Triton cache")
    }


def test_folders_of_a_node():
    check(judge_folders({"node1": folders(), "node2": folders()}, True), Level.FINE, "100.0 GiB")
    check(judge_folders({"node1": folders(shared=True)}, True), Level.WARNING, "nodes share", "TRITON_CACHE_DIR")
    check(judge_folders({"node1": folders(shared=True)}, False), Level.FINE)
    short = judge_folders({"node1": folders(), "node2": folders(free=2**20)}, True)
    assert [each.level for each in short] == [Level.WARNING] * 3 and all("1.0 MiB free on node2" in each.found for each in short)
    closed = folders(problem="read-only")
    check(judge_folders({"node1": folders(), "node2": closed}, True), Level.BAD_NODE, "/tmp cannot be written on node2", nodes=("node2",))
    check(judge_folders({"node1": closed}, True), Level.REFUSED, "TMPDIR")


def test_room_for_checkpoints(tiny_data):
    """keep_last 2: two that stay and the one being written, less what lies there already."""
    config = tiny_config(tiny_data)
    assert [checkpoints_to_come(config, list(range(count))) for count in range(5)] == [(3, 0), (2, 0), (1, 0), (1, 0), (1, 0)]
    run = Folder("runs/x", 10 * GIB, True, "")
    check(judge_room(run, 3 * GIB, 3, 0), Level.FINE, "10.0 GiB free", "takes 3.0 GiB")
    check(judge_room(run, 4 * GIB, 3, 0), Level.REFUSED, "the 3 that must fit do not", "keep_last")
    check(judge_room(run, 2 * GIB, 3, 10), Level.WARNING, "not the 10 permanent ones")


def test_file_systems():
    mounts = "\n".join(
        f"{number} 1 0:1 / {mount} rw - {kind} source rw"
        for number, (mount, kind) in enumerate({"/": "overlay", "/tmp": "lustre", "/proc": "fuse.sshfs", "/usr": "ext4"}.items())
    )
    assert is_shared("/tmp/nowhere/at/all", mounts) and is_shared("/proc/self", mounts)
    assert not is_shared("/usr/bin", mounts) and not is_shared("/", mounts) and not is_shared("/", "")


def seen(problem: str = "", size: int = 10, shared: bool = True) -> Seen:
    return Seen(problem, (("train.bin", size),) if not problem else (), shared)


def test_files_seen_by_nodes():
    whole = {"node1": seen(), "node2": seen(), "node3": seen()}
    missing = "data.train=x: train.bin does not exist"
    check(judge_files("data.train", whole), Level.FINE, "on 3 nodes")
    check(judge_files("data.train", dict.fromkeys(whole, seen(missing))), Level.REFUSED, missing)
    lost = whole | {"node2": seen(missing, shared=False)}
    check(judge_files("data.train", lost), Level.BAD_NODE, "node1, node3 can use it, node2 cannot", nodes=("node2",))
    mine = {"node1": seen(shared=False), "node2": seen(missing, shared=False)}
    check(judge_files("data.train", mine), Level.REFUSED, "put it on a file system that all nodes share")
    check(judge_files("data.train", whole | {"node3": seen(size=9)}), Level.BAD_NODE, "train.bin is of another size", nodes=("node3",))
    check(judge_files("data.train", {"node1": seen(), "node2": seen(size=9)}), Level.REFUSED, "node2 and the others")


def test_run_folder():
    fine = Folder("runs", GIB, True, "")
    local, closed = Folder("/", GIB, False, ""), Folder("runs", GIB, True, "Stale file handle")
    three = dict.fromkeys(("node1", "node2", "node3"), fine)
    check(judge_run_folder("run", three, dict.fromkeys(three, [])), Level.FINE, "3 in all")
    check(judge_run_folder("run", three | {"node2": closed}, {}), Level.BAD_NODE, "on node2 (Stale file handle)", nodes=("node2",))
    check(judge_run_folder("run", dict.fromkeys(three, closed), {}), Level.REFUSED, "cannot be written on node1, node2, node3")
    apart = {"node1": ["node3"], "node2": ["node3"], "node3": ["node1", "node2"]}
    check(judge_run_folder("run", three, apart), Level.BAD_NODE, "node1 does not see what node3 writes", nodes=("node3",))
    check(judge_run_folder("run", three | {"node3": local}, apart), Level.BAD_NODE, "mount on node3", nodes=("node3",))
    two = {"node1": ["node2"], "node2": ["node1"]}
    check(judge_run_folder("run", {"node1": fine, "node2": local}, two), Level.BAD_NODE, nodes=("node2",))
    check(judge_run_folder("run", {"node1": local, "node2": local}, two), Level.REFUSED, "a file system that all nodes share")


def test_clocks():
    check(judge_clocks({"node1": 100.0}), Level.FINE)
    check(judge_clocks({"node1": 100.0, "node2": 101.9}), Level.FINE, "within 1.9 s")
    check(judge_clocks({"node1": 100.0, "node2": 97.9, "node3": 100.1}), Level.WARNING, "node2's is off by -2.1 s")


# ---- sniff ---------------------------------------------------------------------------------------------------------------------


def speeds(tflops: list[float], gbytes: float = 4200.0, checksum: float = 1e9) -> list[Speed]:
    return [Speed(value, gbytes, checksum) for value in tflops]


def test_a_slow_gpu_is_named():
    two, fast = job(2, 8), [720.0 + rank for rank in range(16)]
    check(judge_speed(two, [H200] * 16, speeds(fast)), Level.FINE, "node1 720 721", "node2 728 729")
    slow = fast[:11] + [SLOW * 730 - 1] + fast[12:]  # two thirds reach 730 or less
    check(judge_speed(two, [H200] * 16, speeds(slow)), Level.BAD_NODE, "rank 11 (GPU 3 of node2)", "85%", nodes=("node2",))
    check(judge_speed(two, [H200] * 16, speeds(fast[:11] + [SLOW * 731 + 1] + fast[12:])), Level.FINE)
    check(judge_speed(job(1, 2), [H200] * 2, speeds([700, 350])), Level.BAD_NODE, "rank 1 (GPU 1 of node1) reaches 350", nodes=("node1",))
    half = judge_speed(two, [H200] * 16, speeds([700.0] * 8 + [500.0] * 8))
    assert sum(each.level == Level.BAD_NODE and each.nodes == ("node2",) for each in half) == 8, "a whole slow node"
    check(judge_speed(job(1, 1), [H200], speeds([LOW * 989 - 1])), Level.WARNING, "NVIDIA H200")
    copies = speeds([700, 700]) + [Speed(700, 3000, 1e9)]
    check(judge_speed(job(3, 1), [H200] * 3, copies), Level.BAD_NODE, "rank 2 (GPU 0 of node3) reaches 3000 GB/s", nodes=("node3",))
    for wrong in (1e9 * (1 + 2 * SAME), float("nan")):
        spoilt = [Speed(700, 4200, 1e9), Speed(700, 4200, wrong), Speed(700, 4200, 1e9)]
        check(judge_speed(job(3, 1), [H200] * 3, spoilt), Level.BAD_NODE, "rank 1", "another product", nodes=("node2",))
    check(judge_speed(job(1, 2), [CPU] * 2, speeds([0.05, 0.001])), Level.UNKNOWN, "not judged on CPUs")


def test_the_product_is_the_same_everywhere():
    first, second = gather_speed(), gather_speed()
    assert first.checksum == second.checksum > 0 and first.tflops > 0 and first.gbytes > 0


def measured(where: Job, speed: float = 300.0, slow: dict[str, float] | None = None) -> list[Links]:
    """Every rank's links; `slow`: what some groups reach instead."""
    of_group = {group.name: (slow or {}).get(group.name, speed) for group in groups_of(where)}
    return [Links({group.name: of_group[group.name] for group in groups_of(where) if rank in group.ranks}) for rank in range(where.size)]


def test_slow_links_are_named():
    two, three, four = job(2, 8), job(3, 8), job(4, 8)
    check(judge_links(two, measured(two), H200.name), Level.FINE, "within node1 300", "over all nodes 300")
    check(judge_links(two, measured(two, slow={"within node2": 200}), H200.name), Level.BAD_NODE, "within node2 200", nodes=("node2",))
    check(judge_links(two, measured(two, slow={"over all nodes": 2}), H200.name), Level.WARNING, "over all nodes 2", "InfiniBand")
    pcie = measured(two, slow={"within node1": 20, "within node2": 20})
    check(judge_links(two, pcie, H200.name), Level.WARNING, "NVLink")
    check(judge_links(two, pcie, "NVIDIA A10"), Level.FINE)
    edges = [group.nodes for group in groups_of(four)[4:-1]]
    assert edges == [("node1", "node2"), ("node3", "node4"), ("node2", "node3"), ("node4", "node1")]
    both = {"between node2 and node3": 100, "between node3 and node4": 90}
    check(judge_links(four, measured(four, slow=both), H200.name), Level.BAD_NODE, "node3 and either of its neighbours", nodes=("node3",))
    both = {"between node2 and node3": 100, "between node1 and node2": 90}
    check(judge_links(three, measured(three, slow=both), H200.name), Level.BAD_NODE, "node2 and either", nodes=("node2",))
    one = {"between node2 and node3": 100}
    check(judge_links(four, measured(four, slow=one), H200.name), Level.WARNING, "node2 and node3 reach 100")
    check(judge_links(two, measured(two, 0.01), "CPU"), Level.UNKNOWN, "not judged on CPUs")


def test_hanging_links_are_named():
    two, three = job(2, 2), job(3, 2)

    def at(group: str, problem: str = "") -> Links:
        return Links({}, group, problem, stuck=not problem)

    inside = [at("over all nodes")] * 2 + [at("within node2")] * 2
    check(judge_links(two, inside, H200.name), Level.BAD_NODE, "does not end within node2", nodes=("node2",))
    check(judge_links(two, [at("over all nodes")] * 4, H200.name), Level.FAILED, "rank 0", "4 of 4 ranks", "NCCL_SOCKET_IFNAME")
    check(judge_links(two, [at("")] * 4, H200.name), Level.FAILED, "while the process groups start")
    fails = [at("within node1")] * 3 + [at("within node2", "CUDA error")]
    check(judge_links(two, fails, H200.name), Level.BAD_NODE, "rank 3 (GPU 1 of node2) fails", "CUDA error", nodes=("node2",))
    check(judge_links(two, [at("", "no socket")] * 4, H200.name), Level.FAILED, "no socket")
    one = job(1, 4)
    check(judge_links(one, [at("within node1")] * 4, H200.name), Level.BAD_NODE, "does not end within node1", nodes=("node1",))
    fails = [at("within node1")] * 3 + [at("within node1", "CUDA error")]
    check(judge_links(one, fails, H200.name), Level.BAD_NODE, "rank 3 (GPU 3 of node1) fails", nodes=("node1",))
    check(judge_links(one, [at("", "no socket")] * 4, H200.name), Level.FAILED, "no socket")
    pair = [at("between node1 and node2")] * 4 + [at("between node3 and node1")] * 2
    check(judge_links(three, pair, H200.name), Level.BAD_NODE, "does not end between node1 and node2", nodes=("node1", "node2"))
