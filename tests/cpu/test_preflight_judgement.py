"""What preflight makes of facts, made up here: who is to blame, and for what."""

import statistics

import pytest

from hybrid_megatron.planning.memory import GIB
from hybrid_megatron.preflight.agreement import odd_ones
from hybrid_megatron.preflight.clocks import Offset, judge_clocks
from hybrid_megatron.preflight.disk import Space, checkpoint_need, judge_run_space, judge_spaces
from hybrid_megatron.preflight.environment import Surroundings, exported_always, judge_surroundings
from hybrid_megatron.preflight.file_systems import FileSystem, file_system_of
from hybrid_megatron.preflight.finding import EXIT_CODES, Finding, Level, worst
from hybrid_megatron.preflight.gpu_health import NodeHealth, judge_health, read_health, recent_xids
from hybrid_megatron.preflight.gpus import Device, judge_gpus, judge_memory
from hybrid_megatron.preflight.job import Job, Member
from hybrid_megatron.preflight.links import Links, groups_of, judge_links
from hybrid_megatron.preflight.network import Network, gather_network, judge_network, matching
from hybrid_megatron.preflight.report import Report, as_dict, as_text, verdict
from hybrid_megatron.preflight.seen import Seen, judge_seen
from hybrid_megatron.preflight.shared_folder import Looked, Written, judge_looked, judge_written
from hybrid_megatron.preflight.silent import judge_silent
from hybrid_megatron.preflight.speed import LOW, SAME, SLOW, Speed, judge_speed
from hybrid_megatron.preflight.versions import Software, judge_software

LOCAL, NFS = FileSystem("ext4", "/"), FileSystem("nfs4", "/shared")
H200 = Device("NVIDIA H200", True, 8, "u", 140 * GIB, 139 * GIB)


def job(nodes: int, per_node: int) -> Job:
    return Job([Member(rank, rank % per_node, f"node{rank // per_node + 1}") for rank in range(nodes * per_node)])


def only(findings: list[Finding]) -> Finding:
    [finding] = findings
    return finding


def check(findings: list[Finding], level: Level, *words: str, nodes: tuple[str, ...] = ()) -> None:
    finding = only(findings)
    assert (finding.level, finding.nodes) == (level, nodes), finding
    assert all(word in finding.sentence for word in words), finding.sentence


def test_the_worst_finding_decides():
    by_level = {level: Finding("check", level, "found", nodes=("node2",) if level == Level.BAD_NODE else ()) for level in Level}
    expected = {"ok": 0, "failed": 1, "refused": 2, "bad_nodes": 3}
    seen = {}
    for level in Level:
        report = Report("recipe", findings=[each for other, each in by_level.items() if other <= level])
        assert worst(report.findings) == level and report.code == EXIT_CODES[level]
        seen[verdict(report).split()[0]] = report.code
    assert seen == expected
    assert verdict(report) == "refused check: found" and as_dict(report)["bad_nodes"] == ["node2"]


def test_report_is_quiet_about_what_is_fine_and_begins_with_the_worst():
    findings = [
        Finding("a", Level.FINE, "seen"),
        Finding("b", Level.WARNING, "odd", "the rule", "the way out"),
        Finding("c", Level.BAD_NODE, "broken", nodes=("node2", "node1")),
        Finding("d", Level.FINE, "seen"),
    ]
    lines = as_text(Report("recipe", job(2, 1), findings, seconds={"start": 1.0, "in all": 2.0})).splitlines()
    assert lines == [
        "preflight  recipe, 2 processes on node1, node2",
        "bad node   c: broken",
        "warning    b: odd; the rule; the way out",
        "fine       a, d",
        "took       2.0 s: start 1.0",
        "verdict    bad nodes: node1, node2",
    ]


def test_odd_ones():
    assert odd_ones({"a": 1, "b": 2, "c": 2}) == (2, {"a": 1})
    assert odd_ones({"a": 1, "b": 2}) == (1, {"b": 2}), "without a majority the first counts"


# ---- software ------------------------------------------------------------------------------------------------------------------


def software(is_cuda: bool = True, unmet: tuple[str, ...] = (), **versions: str) -> Software:
    return Software({"python": "3.12.1", "torch": "2.12.1", "driver": "580.1"} | versions, list(unmet), is_cuda)


def test_software():
    fine = {"node1": software(), "node2": software()}
    check(judge_software(fine, {}), Level.FINE, "torch 2.12.1")
    other = fine | {"node2": software(torch="2.11.0")}
    check(judge_software(other, {}), Level.REFUSED, "torch is 2.12.1 on node1", "2.11.0 on node2", "one environment")
    check(judge_software(fine | {"node2": software(driver="570.2")}, {}), Level.WARNING, "570.2 on node2")
    check(judge_software({"node1": software(unmet=("triton is 3.6.0",))}, {}), Level.REFUSED, "node1: triton is 3.6.0")
    check(judge_software({"node1": software(False, ("triton is 3.6.0",))}, {}), Level.WARNING, "triton")
    check(judge_software(fine, {"node1": "wrong pair", "node2": "wrong pair"}), Level.REFUSED, "wrong pair")


# ---- GPUs ----------------------------------------------------------------------------------------------------------------------


def device(**changes) -> Device:
    return Device(**(vars(H200) | changes))


def test_gpus():
    two = job(2, 8)
    check(judge_gpus(two, [H200] * 16), Level.FINE, "16 x NVIDIA H200")
    blind = [H200] * 8 + [device(is_cuda=False, name="CPU", visible=0)] * 8
    check(judge_gpus(two, blind), Level.BAD_NODE, "no GPU on node2", nodes=("node2",))
    fallen = [H200] * 8 + [device(visible=7)] * 7 + [device(visible=7, name="")]
    check(judge_gpus(two, fallen), Level.BAD_NODE, "node2 sees 7 GPUs for 8 processes", nodes=("node2",))
    check(judge_gpus(two, [device(visible=4)] * 16), Level.REFUSED, "8 processes on node1, which sees 4 GPUs", "--nproc-per-node 4")
    check(judge_gpus(job(1, 2), [H200] * 2), Level.WARNING, "sees 8 GPUs and has 2")
    mixed = [H200] * 15 + [device(name="NVIDIA H100 80GB HBM3")]
    check(judge_gpus(two, mixed), Level.WARNING, "rank 15 (GPU 7 of node2) is NVIDIA H100 80GB HBM3")
    cpus = [device(is_cuda=False, name="CPU", visible=0)] * 2
    check(judge_gpus(job(1, 2), cpus), Level.FINE, "2 processes on CPUs")
    check(judge_gpus(job(1, 2), cpus, promised=True), Level.WARNING, "Slurm gives this job GPUs")


def test_memory():
    one = job(1, 2)
    check(judge_memory(one, [H200] * 2, 50 * GIB), Level.FINE, "50.0 GiB")
    check(judge_memory(one, [H200] * 2, 200 * GIB), Level.REFUSED, "200.0 GiB", "140.0 GiB", "launch plan")
    check(judge_memory(one, [H200] * 2, 135 * GIB), Level.WARNING, "some 8%")
    taken = [H200, device(free=60 * GIB)]
    check(judge_memory(one, taken, 50 * GIB), Level.WARNING, "rank 1 (GPU 1 of node1) has 80.0 GiB in use")
    check(judge_memory(one, taken, 70 * GIB), Level.BAD_NODE, "80.0 GiB in use", "60.0 GiB are free", nodes=("node1",))
    cpu = device(is_cuda=False, name="CPU", visible=0, total=8 * GIB, free=4 * GIB)
    check(judge_memory(one, [cpu] * 2, 6 * GIB), Level.WARNING, "4.0 GiB a process free")
    check(judge_memory(one, [cpu] * 2, 3 * GIB), Level.FINE, "3.0 GiB")


SMI = """<?xml version="1.0" ?><nvidia_smi_log><driver_version>580.1</driver_version>
<gpu id="00000000:19:00.0"><uuid>GPU-one</uuid><gpu_recovery_action>{action}</gpu_recovery_action>
<clocks_event_reasons><clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
<clocks_event_reason_hw_thermal_slowdown>{slowed}</clocks_event_reason_hw_thermal_slowdown></clocks_event_reasons>
<ecc_errors><volatile><sram_correctable>7</sram_correctable><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
<dram_correctable>3</dram_correctable><dram_uncorrectable>{errors}</dram_uncorrectable></volatile>
<aggregate><dram_uncorrectable>5</dram_uncorrectable></aggregate></ecc_errors>
<remapped_rows><remapped_row_pending>{pending}</remapped_row_pending><remapped_row_failure>{failure}</remapped_row_failure></remapped_rows>
</gpu><gpu id="00000000:3B:00.0"><uuid>GPU-two</uuid><ecc_errors><volatile><dram_uncorrectable>9</dram_uncorrectable></volatile></ecc_errors>
</gpu></nvidia_smi_log>"""
WELL = {"action": "None", "slowed": "Not Active", "errors": "0", "pending": "No", "failure": "No"}


@pytest.mark.parametrize(
    "changes, level, words",
    [
        ({}, Level.FINE, "nothing remarkable in 1 GPUs"),
        ({"errors": "N/A"}, Level.FINE, "nothing remarkable"),
        ({"errors": "2"}, Level.BAD_NODE, "GPU 0 of node1 has had 2 uncorrectable ECC errors"),
        ({"failure": "Yes"}, Level.BAD_NODE, "cannot be remapped"),
        ({"pending": "Yes"}, Level.WARNING, "waits for a reset: remapped_row_pending"),
        ({"action": "Reset"}, Level.WARNING, "waits for a reset: Reset"),
        ({"slowed": "Active"}, Level.WARNING, "hw_thermal_slowdown"),
    ],
)
def test_gpu_health(changes, level, words):
    """Of the job's own GPU; the errors of the other one are nobody's business."""
    health = {"node1": NodeHealth(read_health(SMI.format(**WELL | changes)), [])}
    check(judge_health(health, {"node1": {"one"}}), level, words, nodes=("node1",) if level == Level.BAD_NODE else ())


def test_gpu_health_without_an_answer():
    assert read_health("no xml") == []
    check(judge_health({"node1": NodeHealth([], [])}, {"node1": set()}), Level.FINE, "no nvidia-smi")
    check(judge_health({"node1": NodeHealth([], [], "it did not answer")}, {"node1": {"one"}}), Level.WARNING, "node1: it did not answer")
    log = "[  100.5] NVRM: Xid (PCI:0000:19:00): 79, pid=1\n[ 9000.1] NVRM: Xid (PCI:0000:3b:00): 48, pid=2\n[ 9000.2] other"
    assert recent_xids(log, uptime=9100) == ["48 of PCI 0000:3b:00"]
    check(judge_health({"node1": NodeHealth([], recent_xids(log, 9100))}, {"node1": set()}), Level.WARNING, "Xid 48 of PCI 0000:3b:00")


# ---- disks ---------------------------------------------------------------------------------------------------------------------


def spaces(free: int = 100 * GIB, writable: bool = True, cache: FileSystem = LOCAL) -> dict[str, Space]:
    places = {"/tmp": LOCAL, "/dev/shm": LOCAL, "Triton cache": cache}
    return {what: Space(what, free, writable, file_system) for what, file_system in places.items()}


def test_spaces():
    check(judge_spaces({"node1": spaces(), "node2": spaces()}, True), Level.FINE, "100.0 GiB")
    check(judge_spaces({"node1": spaces(cache=NFS)}, True), Level.WARNING, "nfs4", "TRITON_CACHE_DIR")
    check(judge_spaces({"node1": spaces(cache=NFS)}, False), Level.FINE)
    short = judge_spaces({"node1": spaces(), "node2": spaces(free=2**20)}, True)
    assert [each.level for each in short] == [Level.WARNING] * 3 and all("1.0 MiB free on node2" in each.found for each in short)
    closed = spaces() | {"/tmp": Space("/tmp", 100 * GIB, False, LOCAL)}
    check(judge_spaces({"node1": spaces(), "node2": closed}, True), Level.BAD_NODE, "/tmp cannot be written on node2", nodes=("node2",))
    check(judge_spaces({"node1": closed}, True), Level.REFUSED, "TMPDIR")


def test_run_space():
    """keep_last 2: two that stay and the one being written, less what lies there already."""
    assert checkpoint_need(GIB, keep_last=2, existing=0, permanent=5) == checkpoint_need(GIB, 2, 0, 5)
    assert [checkpoint_need(GIB, 2, existing, 0).rolling // GIB for existing in range(5)] == [3, 2, 1, 1, 1]
    free = Space("runs/x", 10 * GIB, True, LOCAL)
    check(judge_run_space(free, checkpoint_need(3 * GIB, 2, 0, 0)), Level.FINE, "9.0 GiB needed")
    check(judge_run_space(free, checkpoint_need(4 * GIB, 2, 0, 0)), Level.REFUSED, "12.0 GiB are needed for 3", "keep_last")
    check(judge_run_space(free, checkpoint_need(4 * GIB, 2, 1, 0)), Level.FINE)
    check(judge_run_space(free, checkpoint_need(2 * GIB, 2, 0, 10)), Level.WARNING, "20.0 GiB by the end")


def test_file_systems():
    mounts = "\n".join(
        f"{number} 1 0:1 / {mount} rw - {kind} source rw"
        for number, (mount, kind) in enumerate({"/": "overlay", "/tmp": "tmpfs", "/tmp/a\\040b": "nfs4", "/proc": "fuse.sshfs"}.items())
    )
    assert file_system_of("/tmp/nowhere/at/all", mounts) == FileSystem("tmpfs", "/tmp")
    assert file_system_of("/usr", mounts) == FileSystem("overlay", "/") and not file_system_of("/usr", mounts).network
    assert file_system_of("/proc/self", mounts).network and NFS.network and FileSystem("lustre", "/").network
    assert file_system_of("/").kind, "of this machine, by its own word"


# ---- what nodes see ------------------------------------------------------------------------------------------------------------


def seen(problem: str = "", size: int = 10, file_system: FileSystem = NFS, identity: str = "a", remarks: tuple[str, ...] = ()) -> Seen:
    return Seen(problem, (("train.bin", size),), file_system, identity, remarks)


def test_files_seen_by_nodes():
    whole = {"node1": seen(), "node2": seen(), "node3": seen()}
    check(judge_seen("data.train", whole), Level.FINE, "on all 3 nodes")
    check(judge_seen("data.train", {node: seen("train.bin does not exist") for node in whole}), Level.REFUSED, "train.bin does not exist")
    check(judge_seen("c", {"node1": seen("broken")}, Level.WARNING), Level.WARNING, "broken")
    lost = whole | {"node2": seen("train.bin does not exist", file_system=LOCAL)}
    check(judge_seen("data.train", lost), Level.BAD_NODE, "node1, node3 can use it, node2 cannot", nodes=("node2",))
    mine = {"node1": seen(file_system=LOCAL), "node2": seen("train.bin does not exist", file_system=LOCAL)}
    check(judge_seen("data.train", mine), Level.REFUSED, "ext4", "put it on a shared file system")
    other = whole | {"node3": seen(size=9)}
    check(judge_seen("data.train", other), Level.BAD_NODE, "10 bytes on most nodes and 9 on node3", nodes=("node3",))
    check(judge_seen("data.train", {"node1": seen(), "node2": seen(size=9)}), Level.REFUSED, "9 on node2")
    check(judge_seen("data.train", whole | {"node3": seen(identity="b")}), Level.BAD_NODE, "contents differ", nodes=("node3",))
    check(judge_seen("data.train", {"node1": seen(remarks=("no manifest",))}), Level.WARNING, "no manifest")


def written(problem: str = "", folder: str = "/shared/run", file_system: FileSystem = NFS) -> Written:
    return Written(folder, "" if problem else f"{folder}/.preflight-x", problem, file_system)


def test_run_folder_written():
    fine = {"node1": written(), "node2": written()}
    check(judge_written("run", fine), Level.FINE, "on all 2 nodes")
    check(judge_written("run", {"node1": written("Read-only file system")}), Level.REFUSED, "Read-only file system", "run_dir=PATH")
    check(judge_written("run", fine | {"node2": written("Stale file handle")}), Level.BAD_NODE, "on node2", nodes=("node2",))
    elsewhere = {"node1": written(), "node2": written(), "node3": written(folder="/")}
    check(judge_written("run", elsewhere), Level.BAD_NODE, "/ on node3", nodes=("node3",))
    local = {node: written(folder=f"/{node}", file_system=LOCAL) for node in ("node1", "node2")}
    check(judge_written("run", local), Level.REFUSED, "shared file system")


def looked(lock: str = "held", **seconds: float | None) -> Looked:
    return Looked({node: 0.01 for node in ("node1", "node2", "node3")} | seconds, lock)


def test_run_folder_looked_at():
    folder = {node: written() for node in ("node1", "node2", "node3")}
    fine = {node: looked() for node in folder}
    check(judge_looked("run", folder, fine), Level.FINE, "on all 3 nodes")
    late = judge_looked("run", folder, fine | {"node2": looked(node1=3.5)})
    assert [each.level for each in late] == [Level.WARNING, Level.FINE] and "after 3.5 s" in late[0].found
    apart = {"node1": looked(node3=None), "node2": looked(node3=None), "node3": looked(node1=None, node2=None)}
    check(judge_looked("run", folder, apart), Level.BAD_NODE, "node1 does not see node3's file", nodes=("node3",))
    two = {node: written(file_system=LOCAL) for node in ("node1", "node2")}
    blind = {"node1": Looked({"node1": 0.0, "node2": None}, "held"), "node2": Looked({"node1": None, "node2": 0.0}, "unknown")}
    check(judge_looked("run", two, blind), Level.REFUSED, "shared file system")
    check(judge_looked("run", folder, fine | {"node3": looked("not seen")}), Level.WARNING, "not seen on node3", "lease")
    check(judge_looked("run", folder, {node: looked("none") for node in folder}), Level.WARNING, "nfs4 has no locks")


def test_clocks():
    assert judge_clocks({"node1": Offset(0, 0)}) == []
    check(judge_clocks({"node1": Offset(0, 0), "node2": Offset(-1.9, 0.01)}), Level.FINE, "within 1.910 s")
    check(judge_clocks({"node1": Offset(0, 0), "node2": Offset(-2.1, 0.01)}), Level.WARNING, "node2 by -2.1 s", "chrony")
    check(judge_clocks({"node1": Offset(0, 0), "node2": Offset(2.5, 1.0)}), Level.FINE)  # as far as can be told


# ---- surroundings --------------------------------------------------------------------------------------------------------------


def surroundings(**changes) -> Surroundings:
    usual = {"slurm": True, "missing": [], "omp_threads": 8, "cores": 96, "processes": 8, "open_files": 65536, "memlock_bytes": None}
    return Surroundings(**usual | {"infiniband": True} | changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"missing": ["NCCL_DEBUG"]}, "node2: NCCL_DEBUG not set"),
        ({"omp_threads": None}, "OMP_NUM_THREADS is not set"),
        ({"omp_threads": 16}, "8 processes of 16 threads on 96 cores"),
        ({"open_files": 1024}, "ulimit -n is 1024"),
        ({"memlock_bytes": 65536}, "ulimit -l"),
    ],
)
def test_surroundings(changes, words):
    check(judge_surroundings({"node1": surroundings(), "node2": surroundings(**changes)}), Level.WARNING, words)


def test_surroundings_that_are_fine(tmp_path):
    check(judge_surroundings({"node1": surroundings()}), Level.FINE)
    check(judge_surroundings({"node1": surroundings(slurm=False, missing=["NCCL_DEBUG"])}), Level.FINE)
    check(judge_surroundings({"node1": surroundings(infiniband=False, memlock_bytes=65536)}), Level.FINE)
    script = tmp_path / "env.sh"
    script.write_text('# why\nexport ONE=${ONE:-1}\nif true; then\n  export TWO=2\nfi\nexport THREE="x"\nFOUR=4\n')
    assert exported_always(script) == ["ONE", "THREE"] and exported_always(tmp_path / "none") == []


def test_network(tmp_path):
    for interface, state in {"lo": "unknown", "eth0": "up", "eth1": "down", "ib0": "up"}.items():
        (tmp_path / "net" / interface).mkdir(parents=True)
        (tmp_path / "net" / interface / "operstate").write_text(state + "\n")
    for port, state in {"1": "4: ACTIVE", "2": "1: DOWN"}.items():
        (tmp_path / "infiniband" / "mlx5_0" / "ports" / port).mkdir(parents=True)
        (tmp_path / "infiniband" / "mlx5_0" / "ports" / port / "state").write_text(state + "\n")
    found = gather_network(tmp_path)
    assert (found.interfaces, found.active_ports) == (("eth0", "ib0"), 1)
    assert matching("ib", found.interfaces) == ["ib0"] and matching("=ib", found.interfaces) == []
    assert matching("^ib", found.interfaces) == ["eth0"] and matching("eth,ib", found.interfaces) == ["eth0", "ib0"]
    wanted = Network(("eth0",), "ib", 8)
    check(judge_network({"node1": wanted, "node2": wanted}), Level.REFUSED, "NCCL_SOCKET_IFNAME=ib", "eth0")
    good = Network(("eth0", "ib0"), "ib", 8)
    check(judge_network({"node1": good, "node2": wanted}), Level.BAD_NODE, "on node2", nodes=("node2",))
    check(judge_network({"node1": good, "node2": Network(("ib0",), "ib", 7)}), Level.WARNING, "node2 has 7 InfiniBand ports")
    check(judge_network({"node1": good, "node2": good}), Level.FINE, "8 InfiniBand ports")
    assert judge_network({"node1": wanted}) == [], "one node alone needs no network"


# ---- sniff ---------------------------------------------------------------------------------------------------------------------


def speeds(tflops: list[float], gbytes: float = 4200.0, checksum: float = 1e9) -> list[Speed]:
    return [Speed(value, gbytes, checksum) for value in tflops]


def test_a_slow_gpu_is_named():
    two, usual = job(2, 8), [720.0 + rank for rank in range(16)]
    check(judge_speed(two, [H200] * 16, speeds(usual)), Level.FINE, "720 to 735 TFLOP/s")
    median = statistics.median_high(usual)
    slow = usual[:11] + [SLOW * median - 1] + usual[12:]
    check(judge_speed(two, [H200] * 16, speeds(slow)), Level.BAD_NODE, "rank 11 (GPU 3 of node2)", "85%", nodes=("node2",))
    check(judge_speed(two, [H200] * 16, speeds(usual[:11] + [SLOW * median + 1] + usual[12:])), Level.FINE)
    check(judge_speed(job(1, 2), [H200] * 2, speeds([700, 350])), Level.BAD_NODE, "rank 1 (GPU 1 of node1) reaches 350", nodes=("node1",))
    check(judge_speed(job(1, 1), [H200], speeds([LOW * 989 - 1])), Level.WARNING, "NVIDIA H200")
    copies = speeds([700, 700, 700])
    copies[2] = Speed(700, 3000, 1e9)
    check(judge_speed(job(3, 1), [H200] * 3, copies), Level.BAD_NODE, "rank 2 (GPU 0 of node3) reaches 3000 GB/s", nodes=("node3",))
    wrong = speeds([700, 700, 700])
    wrong[1] = Speed(700, 4200, 1e9 * (1 + 2 * SAME))
    check(judge_speed(job(3, 1), [H200] * 3, wrong), Level.BAD_NODE, "rank 1", "another product", nodes=("node2",))
    wrong[1] = Speed(700, 4200, float("nan"))
    check(judge_speed(job(3, 1), [H200] * 3, wrong), Level.BAD_NODE, "rank 1", nodes=("node2",))
    cpu = device(is_cuda=False, name="CPU")
    check(judge_speed(job(1, 2), [cpu] * 2, speeds([0.05, 0.001])), Level.FINE, "not judged on CPUs")


def measured(where: Job, speed: float = 300.0, slow: dict[str, float] | None = None) -> list[Links]:
    """Every rank's links; `slow`: what some groups reach instead."""
    of_group = {group.name: (slow or {}).get(group.name, speed) for group in groups_of(where)}
    return [
        Links({group.name: of_group[group.name] for group in groups_of(where) if rank in group.ranks}, "", "", True)
        for rank in range(where.size)
    ]


def test_slow_links_are_named():
    two, four = job(2, 8), job(4, 8)
    check(judge_links(two, measured(two), H200.name), Level.FINE, "within a node 300", "over all nodes 300")
    check(judge_links(two, measured(two, slow={"within node2": 200}), H200.name), Level.BAD_NODE, "within node2 200", nodes=("node2",))
    check(judge_links(two, measured(two, slow={"over all nodes": 2}), H200.name), Level.WARNING, "over all nodes 2", "InfiniBand")
    pcie = measured(two, slow={"within node1": 20, "within node2": 20})
    check(judge_links(two, pcie, H200.name), Level.WARNING, "NVLink")
    check(judge_links(two, pcie, "NVIDIA A10"), Level.FINE)
    names = [group.name for group in groups_of(four)]
    assert names[4:] == [
        "between node1 and node2",
        "between node3 and node4",
        "between node2 and node3",
        "between node4 and node1",
        "over all nodes",
    ]
    both = {"between node2 and node3": 100, "between node3 and node4": 90}
    check(judge_links(four, measured(four, slow=both), H200.name), Level.BAD_NODE, "node3 and either of its neighbours", nodes=("node3",))
    one = {"between node2 and node3": 100}
    check(judge_links(four, measured(four, slow=one), H200.name), Level.WARNING, "node2 and node3 reach 100")
    check(judge_links(two, measured(two, 0.01), "CPU"), Level.FINE, "not judged on CPUs")


def test_hanging_links_are_named():
    two, three = job(2, 2), job(3, 2)
    inside = [Links(at="over all nodes")] * 2 + [Links(at="within node2")] * 2
    check(judge_links(two, inside, H200.name), Level.BAD_NODE, "within node2 does not end", nodes=("node2",))
    check(judge_links(two, [Links(at="over all nodes")] * 4, H200.name), Level.FAILED, "rank 0", "4 of 4 ranks", "NCCL_SOCKET_IFNAME")
    check(judge_links(two, [Links()] * 4, H200.name), Level.FAILED, "while the process groups start")
    fails = [Links(at="within node1")] * 3 + [Links(at="within node2", problem="CUDA error")]
    check(judge_links(two, fails, H200.name), Level.BAD_NODE, "rank 3 (process 1 of node2) fails", "CUDA error", nodes=("node2",))
    check(judge_links(two, [Links(problem="no socket")] * 4, H200.name), Level.FAILED, "no socket")
    pair = [Links(at="between node1 and node2")] * 4 + [Links(at="between node3 and node1")] * 2
    check(judge_links(three, pair, H200.name), Level.BAD_NODE, "between node1 and node2 does not end", nodes=("node1", "node2"))


def test_silent_ranks_are_named():
    """By their own word, their neighbours', or Slurm's list of nodes."""
    members = job(2, 4).members
    check([judge_silent([6], members, [], "facts", 60)], Level.BAD_NODE, "rank 6 of node2", "within 60 s", nodes=("node2",))
    check([judge_silent([5], members[:5] + members[6:], [], "hello", 60)], Level.BAD_NODE, "rank 5 of node2", nodes=("node2",))
    check([judge_silent([4, 5, 6, 7], members[:4], ["node1", "node9"], "hello", 60)], Level.BAD_NODE, "node9", nodes=("node9",))
    check([judge_silent([4, 5, 6, 7], members[:4], [], "hello", 60)], Level.FAILED, "ranks 4, 5, 6, 7 did not answer")
