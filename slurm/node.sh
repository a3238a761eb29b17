#!/usr/bin/env bash
# What srun runs once on each node: torchrun, which starts one process a GPU. Signals are passed on to these processes, which stop at the
# end of their step. torchrun itself ignores them: it would kill the processes 30 s later, and Slurm may signal only the one it started.
#
#   node.sh train|preflight RECIPE [a.b=c ...]
set -u

# On the node's own disk: Triton's kernels written to a shared file system by many processes fail with stale file handles. Not the job's own:
# compiling and tuning takes minutes, and the next job on this node need not do it again.
export TRITON_CACHE_DIR=${LOCAL_TMP:-/tmp}/triton-$SLURM_JOB_UID
export TORCHINDUCTOR_CACHE_DIR=${LOCAL_TMP:-/tmp}/inductor-$SLURM_JOB_UID

# What each process prints goes through a file there too: on a full shared disk it must still reach the job's log.
logs=$(mktemp -d "${LOCAL_TMP:-/tmp}/torchrun-$SLURM_JOB_ID-XXXXXX") || exit
trap 'rm -rf "$logs"' EXIT

command=$1
shift
processes=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
run=("$PYTHON" -m torch.distributed.run --nnodes="$SLURM_NNODES" --nproc-per-node="$processes" --max-restarts=0
    --rdzv-backend=c10d --rdzv-endpoint="$MASTER:$PORT" --rdzv-id="$SLURM_JOB_ID-$PORT"
    --signals-to-handle=SIGHUP --log-dir="$logs" --tee=3) # which nobody sends; without one named it handles INT and TERM

if [[ $command == preflight ]]; then
    trap '' USR1 USR2 TERM # it takes less than a minute
    trap 'echo INT >"$JOB_DIR/cancelled"' INT
    (trap '' INT; exec "${run[@]}" -m launch preflight "$@")
    exit
fi

(
    trap '' USR1 USR2 TERM INT
    exec "${run[@]}" -m launch train "$@"
) &
torchrun=$!

# torchrun's children, without ps or pgrep, which a container may lack.
workers() {
    local file line
    for file in /proc/[0-9]*/stat; do
        read -r line 2>/dev/null <"$file" || continue
        read -r _ parent _ <<<"${line##*) }"
        if [[ $parent == "$torchrun" ]]; then basename "${file%/stat}"; fi
    done
}

pass_on() { # pass_on SIGNAL: more than once, since a process that is just starting does not listen yet; one wish it remains
    local worker
    while kill -0 "$torchrun" 2>/dev/null; do
        for worker in $(workers); do kill -s "$1" "$worker" 2>/dev/null; done
        [[ ! -s $HYBRID_MEGATRON_OUTCOME ]] || break # training has begun
        sleep 1
    done
}
wish() { # the signal that job.sh wants passed on
    local signal=""
    read -r signal 2>/dev/null <"$JOB_DIR/cancelled"
    echo "${signal:-TERM}"
}
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM
trap 'pass_on "$(wish)"' USR2
trap 'echo INT >"$JOB_DIR/cancelled"; pass_on INT' INT # scancel --signal=INT, which this script alone is told of

code=1
while kill -0 "$torchrun" 2>/dev/null; do
    wait "$torchrun"
    code=$?
done
exit "$code"
