"""The life of a job as slurm/job.sh and node.sh have it, where that needs no Slurm."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_megatron.training.outcome import VARIABLE
from tests.cpu.job_cells import IDLE, RUNNING, Job, kill_all, wait_for
from tests.cpu.runs import CHECKOUT

SCRIPTS = sorted(path.name for path in (CHECKOUT / "slurm").glob("*.sbatch"))
FOREVER = 'echo "running 0" >$HYBRID_MEGATRON_OUTCOME; trap "" USR1 TERM INT; while true; do sleep 0.1; done'
"""A training in a long step."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="node.sh looks for torchrun's children in /proc")


def started(job: Job) -> subprocess.Popen:
    process = job.start()
    wait_for(lambda: (job.own / "outcome").is_file())
    return process


# ---- what cannot begin: one sentence, exit code 2, and a line in attempts


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "settings, said",
    [
        ("if true; then", "line 4: syntax error: unexpected end of file; mend that"),
        ("foo=(a", "; mend that and submit again"),
        ("exit 0", "it ends the job itself, by exit or set -e; take that out"),
        ("set -e\nfalse", "it ends the job itself, by exit or set -e; take that out"),
    ],
)
def test_settings_that_break(tmp_path, script, settings, said):
    job = Job(tmp_path, settings=settings)
    code, out, err = job.call(script=f"slurm/{script}", SLURM_ARRAY_TASK_COUNT="1", SLURM_CPUS_PER_TASK="1")
    assert code == 2 and not out and len(err) == 1, err
    assert err[0].startswith(f"error: {job.settings}: ") and said in err[0]
    if script.startswith("train"):
        assert job.attempts == [f"from nothing: refused {err[0].removeprefix('error: ')}"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_settings_that_are_not_there(tmp_path, script):
    job = Job(tmp_path, settings=None)
    code, out, err = job.call(script=f"slurm/{script}")
    assert (code, out) == (2, [])
    assert err == [f"error: HYBRID_MEGATRON_CLUSTER={job.settings}: no such file; name one that is there, or unset it"]


def test_settings_may_end_with_what_is_false(tmp_path):
    assert Job(tmp_path, settings="PREFLIGHT=no\n[[ -n ${NOBODY_SETS_THIS:-} ]] && export A=b").call()[0] == 0


@pytest.mark.parametrize("python", ["/nowhere/bin/python", "/bin/false"])
def test_a_python_that_is_not_one(tmp_path, python):
    job = Job(tmp_path, settings=f"PYTHON={python}")
    code, _, err = job.call()
    assert code == 2 and err[-1].startswith(f"error: PYTHON={python}: it cannot be run on node1 or lacks the project's packages")
    assert job.attempts == [f"from nothing: refused {err[-1].removeprefix('error: ')}"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_from_another_folder(tmp_path, script):
    code, out, err = Job(tmp_path).call(script=f"slurm/{script}", cwd=tmp_path)
    assert (code, out, len(err)) == (2, [], 1) and err[0].startswith("error: submit from the project's folder: ")


# ---- attempts


def test_complete(tmp_path):
    job = Job(tmp_path)
    code, out, err = job.call()
    assert (code, err, job.attempts, job.asked) == (0, [], ["from nothing: complete"], [])


def test_a_start_that_runs_says_so_and_one_that_was_lost_too(tmp_path):
    job = Job(tmp_path, FOREVER)
    for start in range(2):  # the second finds what the first left
        process = job.start()
        wait_for(lambda start=start: job.attempts[start:] == ["from nothing: running"])
        kill_all(process)
    assert job.attempts == ["from nothing: lost with its node, or killed", "from nothing: running"]
    job.says(RUNNING, "NodeName=node1 Arch=x86_64 State=DOWN+NOT_RESPONDING ThreadsPerCore=1")
    (tmp_path / "training.sh").write_text("echo complete >$HYBRID_MEGATRON_OUTCOME")
    assert job.call()[0] == 0
    assert job.attempts[1:] == ["from nothing: node node1 was lost", "from nothing: complete"]


ENDING = "JobId=7 JobState=COMPLETING Reason=None Restarts={}"
DOWN = "NodeName=node2 Arch=x86_64 State=DOWN+NOT_RESPONDING ThreadsPerCore=1"


@pytest.mark.parametrize(
    "job_says, nodes_say, how",
    [
        (ENDING.format(0), IDLE, "cancelled by scancel"),
        (ENDING.format(1), IDLE, "ended by Slurm, which requeued it"),
        ("slurm_load_jobs error: Unable to contact slurm controller", IDLE, "ended by Slurm"),
        (ENDING.format(1), f"{IDLE}\n{DOWN}", "ended by Slurm: node node2 was lost"),
        (ENDING.format(1), f"{DOWN.replace('DOWN+NOT_RESPONDING', 'MIXED*')}\n{IDLE}", "ended by Slurm: node node2 was lost"),
    ],
)
def test_ended_by_slurm(tmp_path, job_says, nodes_say, how):
    job = Job(tmp_path, FOREVER)
    process = started(job)
    job.says(job_says, nodes_say)
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: job.attempts == [f"from nothing: {how}"])
    kill_all(process)


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR2"])
def test_the_end_is_asked_for(tmp_path, name):
    """launch cancel and scancel --batch --signal=INT: training stops, and Slurm calls the job cancelled, not failed."""
    stops = 'echo "running 0" >$O; trap "echo stopped SIGTERM >$O; exit" TERM; trap "echo stopped SIGINT >$O; exit" INT'
    job = Job(tmp_path, f"O=$HYBRID_MEGATRON_OUTCOME; {stops}; while true; do sleep 0.1; done")
    (job.bin / "python").write_text((job.bin / "python").read_text().replace('bash "', f'{sys.executable} -c "{_LISTENING}" bash "'))
    process = started(job)
    process.send_signal(signal.Signals[name])
    code, out, err = job.end(process)
    assert code == 1 and not [line for line in err if line.startswith("error")]
    assert out[-1].endswith("cancelled; submit the same again to go on") and job.asked == ["scancel 7"]
    assert job.attempts == [f"from nothing: cancelled, stopped {'SIGINT' if name == 'SIGINT' else 'SIGTERM'}"]


_LISTENING = "import os, signal, sys; [signal.signal(number, signal.SIG_DFL) for number in (2, 15)]; os.execvp(sys.argv[1], sys.argv[1:])"
"""For a shell: it cannot trap what was ignored when it began, and node.sh has torchrun ignore these."""


def test_stopped_by_sigint_without_this_script_knowing(tmp_path):
    """scancel --signal=INT goes to the nodes alone; the job must not be requeued."""
    job = Job(tmp_path, "echo stopped SIGINT >$HYBRID_MEGATRON_OUTCOME; exit 1")
    code, out, _ = job.call()
    assert code == 1 and job.asked == ["scancel 7"] and job.attempts == ["from nothing: cancelled, stopped SIGINT"]


@pytest.mark.parametrize("found, how", [("ok", "before training began"), ("refused no GPU here", "refused no GPU here")])
def test_the_end_is_asked_for_while_the_nodes_are_examined(tmp_path, found, how):
    job = Job(tmp_path, settings="PREFLIGHT=yes")
    script = job.bin / "python"
    examines = f'touch "$FAKE/examines"; sleep 2; echo "{found}" >"$HYBRID_MEGATRON_PREFLIGHT"'
    script.write_text(script.read_text().replace("esac", f'*"launch preflight"*) {examines} ;;\nesac'))
    process = job.start()
    wait_for((tmp_path / "examines").exists)
    os.killpg(process.pid, signal.SIGINT)  # scancel --signal=INT --full
    code, _, _ = job.end(process)
    assert code == 1 and job.asked == ["scancel 7"] and job.attempts == [f"from nothing: cancelled, {how}"]


# ---- node.sh: torchrun itself, around a training that needs longer to stop than torchrun would leave it

SLOW_TO_STOP = """
import os, signal, time
from pathlib import Path
from hybrid_megatron.training.outcome import Outcome, tell_end, tell_running
from hybrid_megatron.training.signals import stop_on_signals
with stop_on_signals() as stop:
    Path("listens_" + os.environ["RANK"]).touch()
    while len(list(Path(".").glob("listens_*"))) < int(os.environ["WORLD_SIZE"]):  # training begins on all ranks together
        time.sleep(0.05)
    tell_running(0)
    while not stop.number:
        time.sleep(0.05)
    end = time.monotonic() + 5
    while time.monotonic() < end:
        time.sleep(0.05)
    tell_end(Outcome(None, 1, False, signal.Signals(stop.number).name))
"""


@pytest.fixture
def slow_to_stop(tmp_path, monkeypatch) -> Path:
    """A folder whose `launch train` takes five seconds to stop; torchrun leaves it one, unless told. How it ended is in `outcome`."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch/__init__.py").touch()
    (tmp_path / "launch/__main__.py").write_text(SLOW_TO_STOP)
    for name, value in {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1",
        "PYTHONPATH": str(CHECKOUT),
        "OMP_NUM_THREADS": "1",
        VARIABLE: str(tmp_path / "outcome"),
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "name, wish, everybody, how",
    [
        ("SIGINT", "", True, "SIGINT"),
        pytest.param("SIGUSR2", "INT", False, "SIGINT", marks=pytest.mark.slow),
        pytest.param("SIGUSR2", "", False, "SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_a_node_leaves_a_long_step_its_time(slow_to_stop, name, wish, everybody, how):
    (slow_to_stop / "cancelled").write_text(wish)
    environment = {
        "SLURM_JOB_UID": "0", "SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "MASTER": "127.0.0.1", "PORT": str(10000 + os.getpid() % 20000),
        "PYTHON": sys.executable, "JOB_DIR": str(slow_to_stop), "LOCAL_TMP": str(slow_to_stop), "PROCESSES_PER_NODE": "2",
    }  # fmt: skip
    process = subprocess.Popen(
        [shutil.which("bash"), CHECKOUT / "slurm/node.sh", "train"],
        cwd=slow_to_stop,
        env={key: value for key, value in os.environ.items() if not key.startswith("SLURM_")} | environment,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    outcome = slow_to_stop / "outcome"
    try:
        wait_for(lambda: outcome.is_file() and outcome.read_text() == "running 0\n")
        (os.killpg if everybody else os.kill)(process.pid, signal.Signals[name])
        process.wait(timeout=60)
        assert outcome.read_text() == f"stopped {how}\n"
        assert (slow_to_stop / "cancelled").read_text() == ("INT\n" if name == "SIGINT" else wish)
    finally:
        kill_all(process)


@pytest.mark.slow
def test_plain_torchrun_as_the_readme_has_it(slow_to_stop):
    """Ctrl-C: torchrun kills what is not done after --shutdown-timeout, which by itself is half a minute."""
    words = [
        line.split()
        for line in (CHECKOUT / "README.md").read_text().splitlines()
        if ".venv/bin/torchrun" in line and "launch train" in line
    ]
    assert words
    for line in words:
        option = line[line.index("--shutdown-timeout") :][:2]
        assert int(option[1]) >= 900
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *option, "-m", "launch", "train"]
        process = subprocess.Popen(run, cwd=slow_to_stop, stderr=subprocess.DEVNULL, start_new_session=True)
        outcome = slow_to_stop / "outcome"
        try:
            wait_for(lambda: outcome.is_file() and outcome.read_text() == "running 0\n")
            os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=60)
            assert outcome.read_text() == "stopped SIGINT\n"
        finally:
            kill_all(process)
