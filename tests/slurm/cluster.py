"""A real Slurm cluster on one machine, to submit real jobs to: a controller, and nodes with addresses, names, ports, processes and
/dev/shm of their own (Linux namespaces). Files, /tmp included, are shared, as on a cluster's file system.

Needs root and Debian's packages slurmctld, slurmd, slurm-client, munge and iproute2; `why_not` says what is missing. Writes into its own
folder alone. All processes end with the one that started them, however that ends, and the network with them.

What a production cluster has and this has not: GPUs (they are scheduled, and CUDA_VISIBLE_DEVICES is set, but there is no hardware), limits
of memory, accounts, container plugins, timeouts of minutes (here they are seconds).
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

TOOLS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setpriv")
SUBNET = "10.77.0"  # in a network of the cluster's own: several clusters do not meet

CONFIG = """
ClusterName={name}
SlurmctldHost=controller({subnet}.1)
SlurmUser=root
SlurmdUser=root
# A requeued job waits cred_expire seconds before it may start again; usual are 120.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/state/%n
SlurmctldPidFile={folder}/state/slurmctld.pid
SlurmdPidFile={folder}/state/%n.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/%n
MailProg=/bin/true
ProctrackType={proctrack}
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
# The sizes below instead of the hardware's.
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MinJobAge=3600
# Quick reactions.
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
JobRequeue=1
KillWait={kill_wait}
SlurmdTimeout=10
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=DEFAULT CPUs=128 RealMemory=2000000 Gres=gpu:h200:{gpus}
{nodes}
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP PreemptMode=OFF
"""

NODE = """
until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
ip link set lo up && ip address add "$2/24" dev eth0 && ip link set eth0 up &&
hostname "$1" && mount -t tmpfs tmpfs /dev/shm && mount --bind "$3/etc" /etc/slurm && slurmd -D -N "$1"
exit
"""  # the shell stays as the namespace's first process: it reaps orphans, and the node ends with it

NETWORK = """
hostname controller && mount --make-rprivate / && mount --bind "$1/etc/hosts" /etc/hosts && mount -t tmpfs -o size=24m tmpfs "$1/small" &&
ip link set lo up && ip link add nodes type bridge && ip address add "$2.1/24" dev nodes && ip link set nodes up &&
touch "$1/log/network_is_up"
exec sleep infinity
"""


def why_not() -> str | None:
    """Why there can be no cluster here, or None."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"no Slurm cluster can be started here: {', '.join(missing)} not installed (tests/slurm/install.sh installs what is needed)"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"no Slurm cluster can be started here: no namespaces ({tried.stderr.strip()})" if tried.returncode else None


class Cluster:
    """`with Cluster(folder, nodes=2) as cluster`: nodes node1, node2, ..., partitions `usual` and `urgent`, whose jobs preempt the others.

    The folder's path must be short: the paths of sockets have 107 characters at most.
    """

    def __init__(self, folder: Path, nodes: int = 2, gpus: int = 8, kill_wait: int = 15, proctrack: str = "proctrack/linuxproc"):
        self.folder, self.gpus, self.kill_wait, self.proctrack = folder, gpus, kill_wait, proctrack
        self.nodes = [f"node{i + 1}" for i in range(nodes)]
        self.small_disk = folder / "small"
        """A file system of 24 MB on all nodes, and there alone; `seen` finds its files."""
        self._running: dict[str, subprocess.Popen] = {}
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        self.environment |= {"SLURM_CONF": str(folder / "etc/slurm.conf")}

    def __enter__(self) -> "Cluster":
        try:
            self._configure()
            munge = self.folder / "munge"
            files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "seed", "log")]
            self._start("munged", ["munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files])
            network = ["unshare", "--net", "--uts", "--mount", "sh", "-c", NETWORK, "sh", str(self.folder), SUBNET]
            self._start("network", network)
            wait_until((munge / "socket").exists, "munged listens")
            wait_until((self.folder / "log/network_is_up").exists, "the network is up")
            self.start_controller()
            for node in self.nodes:
                self.power_on(node)
            wait_until(self._all_idle, "all nodes are idle", 60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for name in reversed(list(self._running)):
            self._stop(name, signal.SIGKILL)

    # ---- its machines

    def power_off(self, node: str) -> None:
        """Everything on it ends at once, and nobody is told."""
        self._stop(node, signal.SIGKILL)

    def power_on(self, node: str) -> None:
        address = f"{SUBNET}.{10 + int(node.removeprefix('node'))}"
        (self.folder / "state" / node).mkdir(exist_ok=True)
        own = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        process = self._start(node, self._inside("--mount", *own, "sh", "-c", NODE, "sh", node, address, str(self.folder)))
        net = Path(f"/proc/{process.pid}/ns/net")
        others = [os.readlink(path) for path in (Path("/proc/self/ns/net"), Path(f"/proc/{self._running['network'].pid}/ns/net"))]
        wait_until(lambda: os.readlink(net) not in others, f"{node} has a network of its own")
        self._run_inside("ip", "link", "delete", f"to_{node}", check=False)
        self._run_inside("ip", "link", "add", f"to_{node}", "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
        self._run_inside("ip", "link", "set", f"to_{node}", "master", "nodes", "up")

    def tidy(self) -> None:
        """No jobs, all nodes up and idle."""
        self.run("scancel", "--full", "--user=root")
        for node in self.nodes:
            if node not in self._running:
                self.power_on(node)
            self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)  # refused where there is nothing to resume
        wait_until(self._all_idle, "all nodes are idle", 90, lambda: self.run("sinfo", "--Node", "--long").stdout)

    def start_controller(self) -> None:
        self._start("slurmctld", self._inside("--mount", "slurmctld", "-D"))
        wait_until(lambda: not self.run("scontrol", "ping", check=False).returncode, "the controller answers")

    def stop_controller(self) -> None:
        self._stop("slurmctld", signal.SIGTERM)

    def seen(self, path: Path) -> Path:
        """The way from here to a path on a node."""
        return Path(f"/proc/{self._running['network'].pid}/root{path}")

    # ---- its users

    def run(self, *words: str, check: bool = True, cwd: Path | None = None, environment: dict[str, str] | None = None):
        """A command on the login node; its output is text."""
        environment = self.environment | (environment or {})
        ended = subprocess.run(self._inside(*words), env=environment, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert not check or ended.returncode == 0, f"{words}: {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
        return ended

    def sbatch(self, *words: str, **how) -> str:
        """The job's id."""
        return self.run("sbatch", "--parsable", *words, **how).stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What scontrol knows of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]

    def wait_for_state(self, job: str, *states: str, seconds: float = 240) -> str:
        wait_until(lambda: self.state(job) in states, f"job {job} is {' or '.join(states)}", seconds, lambda: str(self.job(job)))
        return self.state(job)

    def processes(self, job: str, *, rank: int | None = None, node: str | None = None) -> list[int]:
        """Living processes of torchrun's making that belong to a job, and not to their children: those of a rank, of a node, or all."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "environ").read_bytes().decode(errors="replace").split("\0")
                command = (path / "cmdline").read_bytes()
                state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            known = dict(word.split("=", 1) for word in words if "=" in word)
            if known.get("SLURM_CLUSTER_NAME") != self.folder.name:
                continue
            if known.get("SLURM_JOB_ID") == job and "RANK" in known and b"launch" in command and state != "Z":
                if rank in (None, int(known["RANK"])) and node in (None, known.get("SLURMD_NODENAME")):
                    found[int(path.name)] = int(parent)
        return [pid for pid, parent in found.items() if parent not in found]

    # ---- how

    def _configure(self) -> None:
        for name in ("etc", "log", "state", "munge", "dev", "small"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "munge/key").write_bytes(os.urandom(1024))
        (self.folder / "munge/key").chmod(0o600)
        addresses = {node: f"{SUBNET}.{11 + i}" for i, node in enumerate(self.nodes)}
        hosts = ["127.0.0.1 localhost", f"{SUBNET}.1 controller", *(f"{address} {node}" for node, address in addresses.items())]
        (self.folder / "etc/hosts").write_text("\n".join(hosts) + "\n")
        for i in range(self.gpus):  # slurmd wants device files
            if not (device := self.folder / f"dev/gpu{i}").exists():
                os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
        gpus = f"Name=gpu Type=h200 File={self.folder}/dev/gpu[0-{self.gpus - 1}] Flags=nvidia_gpu_env"
        (self.folder / "etc/gres.conf").write_text(f"AutoDetect=off\n{gpus}\n")
        (self.folder / "etc/cgroup.conf").write_text("CgroupMountpoint=/sys/fs/cgroup\nCgroupPlugin=cgroup/v1\n")
        nodes = "\n".join(f"NodeName={node} NodeAddr={address}" for node, address in addresses.items())
        values = {
            "name": self.folder.name,
            "folder": self.folder,
            "subnet": SUBNET,
            "gpus": self.gpus,
            "kill_wait": self.kill_wait,
            "proctrack": self.proctrack,
        }
        (self.folder / "etc/slurm.conf").write_text(CONFIG.format(nodes=nodes, **values))

    def _all_idle(self) -> bool:
        said = self.run("sinfo", "--noheader", "--Node", "--responding", "--format=%N %t", check=False).stdout
        return sorted(set(said.splitlines())) == [f"{node} idle" for node in self.nodes]

    def _inside(self, *words: str) -> list[str]:
        """A command in the cluster's network; `--mount` first: with the cluster's /etc/hosts too."""
        return ["nsenter", f"--target={self._running['network'].pid}", "--net", "--uts", *words]

    def _run_inside(self, *words: str, check: bool = True) -> None:
        subprocess.run(self._inside(*words), check=check, capture_output=True)

    def _start(self, name: str, words: list[str]) -> subprocess.Popen:
        with open(self.folder / "log" / f"{name}.out", "a") as log:
            words = ["setpriv", "--pdeathsig", "KILL", *words]
            self._running[name] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )
        return self._running[name]

    def _stop(self, name: str, number: int) -> None:
        process = self._running.pop(name)
        process.send_signal(number)
        process.wait()


def wait_until(happened: Callable[[], bool], what: str, seconds: float = 30, told: Callable[[], str] = str) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what} {told()}"
        time.sleep(0.05)
