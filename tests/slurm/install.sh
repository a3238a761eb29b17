#!/usr/bin/env bash
# Installs what a Slurm cluster on this machine needs (tests/slurm/cluster.py): packages of Debian and Ubuntu, as root, in some ten seconds.
# Starts nothing. Ends with 0 if it is there now; otherwise says why it is not, and the tests in tests/slurm are skipped.
set -uo pipefail

no() {
    echo "slurm: $1; the tests in tests/slurm are skipped" >&2
    exit 1
}

missing=()
for tool in slurmctld slurmd sbatch munged ip; do command -v "$tool" >/dev/null || missing+=("$tool"); done
[[ ${#missing[@]} -gt 0 ]] || exit 0
[[ $(id -u) == 0 ]] || no "${missing[*]} not installed, and only root could install them"
command -v apt-get >/dev/null || no "${missing[*]} not installed, and there is no apt-get"
echo "slurm: installing slurmctld, slurmd, slurm-client, munge and iproute2"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
{ timeout 120 apt-get update && timeout 180 apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge iproute2; } \
    >"$log" 2>&1 </dev/null || { tail -n 5 "$log" >&2; no "apt-get could not install them"; }
