"""What surrounds the processes of a node: variables, limits of the operating system, threads."""

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.preflight.agreement import named
from hybrid_megatron.preflight.finding import Finding, Level, fine
from hybrid_megatron.preflight.versions import CHECKOUT

LEAST_OPEN_FILES = 4096
"""A rank holds index maps, shards of a checkpoint and sockets to the others open at once."""
_ALWAYS_EXPORTED = re.compile(r"^export ([A-Z][A-Z0-9_]*)=", re.MULTILINE)


@dataclass(frozen=True)
class Surroundings:
    """Of one node."""

    slurm: bool
    missing: list[str]
    """Variables that slurm/env.sh sets for every job and that are not there."""
    omp_threads: int | None
    """OMP_NUM_THREADS."""
    cores: int
    """That the processes of this node may use."""
    processes: int
    open_files: int
    memlock_bytes: int | None
    """None: without limit."""
    infiniband: bool


def gather_surroundings(processes: int, infiniband: bool) -> Surroundings:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Surroundings(
        slurm="SLURM_JOB_ID" in os.environ,
        missing=[name for name in exported_always() if name not in os.environ],
        omp_threads=int(threads) if threads.isdigit() else None,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        processes=processes,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        infiniband=infiniband,
    )


def exported_always(file: Path = CHECKOUT / "slurm" / "env.sh") -> list[str]:
    """Variables that the file sets whatever the circumstances: those of unindented lines `export NAME=...`."""
    return _ALWAYS_EXPORTED.findall(file.read_text()) if file.is_file() else []


def judge_surroundings(surroundings: dict[str, Surroundings]) -> list[Finding]:
    findings = []

    def warn(nodes: list[str], found: str, rule: str, way_out: str) -> None:
        if nodes:
            findings.append(Finding("environment", Level.WARNING, f"{named(nodes)}: {found}", rule, way_out))

    def those(condition) -> list[str]:
        return [node for node, each in surroundings.items() if condition(each)]

    any_ = next(iter(surroundings.values()))
    missing = those(lambda each: each.slurm and each.missing)
    if missing:
        names = ", ".join(surroundings[missing[0]].missing)
        warn(missing, f"{names} not set", "slurm/env.sh says why each matters", "source slurm/env.sh in the batch script")
    several = those(lambda each: each.processes > 1 and each.omp_threads is None)
    warn(several, "OMP_NUM_THREADS is not set", "each process would take every core", "set it to cores / processes")
    crowded = those(lambda each: (each.omp_threads or 1) * each.processes > each.cores > 0 and each.processes > 1)
    if crowded:
        each = surroundings[crowded[0]]
        found = f"{each.processes} processes of {each.omp_threads or 1} threads on {each.cores} cores"
        warn(crowded, found, "they wait for each other", "lower OMP_NUM_THREADS, or ask Slurm for more with --cpus-per-task")
    few = those(lambda each: each.open_files < LEAST_OPEN_FILES)
    if few:
        found = f"ulimit -n is {surroundings[few[0]].open_files}"
        warn(few, found, f"{LEAST_OPEN_FILES} open files are wanted", f"ulimit -n {LEAST_OPEN_FILES} in the batch script")
    locked = those(lambda each: each.infiniband and each.memlock_bytes is not None and each.memlock_bytes < 2**30)
    rule = "InfiniBand pins memory, and NCCL fails or falls back to TCP without"
    warn(locked, "ulimit -l is too small", rule, "ulimit -l unlimited, or PropagateResourceLimitsExcept=MEMLOCK in slurm.conf")
    return findings or [fine("environment", f"{any_.cores} cores, {any_.open_files} open files a process")]
