# shellcheck shell=bash
# The life of a training job. The templates source this file and call `run_job RECIPE [a.b=c ...]`. Before every start the nodes are
# examined; what was stopped for the time limit or for another job is requeued; what crashed is started again here; what cannot end well
# ends with one message. Needs bash and Slurm alone: everything else runs through srun, in the container if cluster.env names one.
#
#   RUN_DIR/logs/job_ID/   outcome     training's last word: running STEP, complete, stopped SIGNAL, refused SENTENCE
#                          attempts    a line a start: when, the checkpoint that was there, how it ended, or running
#                          nodes       of the latest start
#                          preflight   the examination's last word: ok, refused SENTENCE, bad_nodes, failed SENTENCE
#                          bad_nodes   nodes that it found bad
#                          cancelled   is there once somebody asked for the end: the signal that training gets, empty for TERM

MOST_ATTEMPTS=3 # that begin from the same checkpoint, requeues included: the next would end alike

say() { echo "slurm      $(date +%FT%T) $*"; }
end() { # end CODE SENTENCE
    echo "error: $2" >&2
    exit "$1"
}

run_job() {
    asked="" step=""
    trap 'asked=USR1' USR1
    trap end_cancelled USR2 INT
    prepare "$@"
    trap 'ask USR1' USR1                                # --signal in the template: the time limit is near
    trap 'touch "$JOB_DIR/cancelled"; ask USR2' USR2    # launch cancel
    trap 'echo INT >"$JOB_DIR/cancelled"; ask USR2' INT # scancel --batch --signal=INT; to srun INT means something else
    trap ask_for_slurm TERM                             # preemption, scancel, the time limit itself
    while true; do
        begin_attempt
        if examined; then on_every_node train; fi
        what_now
        sleep "${RETRY_SECONDS:-10}" # what crashed is cleared away, and a network may be back
    done
}

prepare() {
    (($#)) || end 2 "no recipe given: sbatch slurm/TEMPLATE.sbatch RECIPE [a.b=c ...]"
    recipe=("$@")
    source slurm/settings.sh
    read_settings
    export PYTHON=${PYTHON:-$PWD/.venv/bin/python} PYTHONPATH=$PWD
    RUN_DIR=$(on_one_node "$PYTHON" -m launch run-dir "${recipe[@]}") || why_no_run_dir
    mkdir -p "$RUN_DIR/logs/job_$SLURM_JOB_ID" || end 2 "run_dir=$RUN_DIR: cannot write there; give another with run_dir=PATH"
    JOB_DIR=$(realpath "$RUN_DIR/logs/job_$SLURM_JOB_ID")
    export JOB_DIR HYBRID_MEGATRON_OUTCOME=$JOB_DIR/outcome
    export HYBRID_MEGATRON_PREFLIGHT=$JOB_DIR/preflight HYBRID_MEGATRON_BAD_NODES=$JOB_DIR/bad_nodes
    source slurm/env.sh
    # For launch status: a job that launch submit did not submit stands nowhere yet.
    grep -qs "\"id\": \"$SLURM_JOB_ID\"" "$RUN_DIR/jobs.jsonl" ||
        echo "{\"id\": \"$SLURM_JOB_ID\", \"time\": \"$(date +%FT%T%z)\"}" >>"$RUN_DIR/jobs.jsonl"
    end_attempt "$(how_it_was_lost)"
    say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST: ${recipe[*]}, in $RUN_DIR"
}

# Python says itself what is wrong with a recipe.
why_no_run_dir() {
    on_one_node "$PYTHON" -c 'import hybrid_megatron.config' >/dev/null 2>&1 ||
        refuse "PYTHON=$PYTHON: it cannot be run on $SLURMD_NODENAME or lacks the project's packages, for the reason above; set it right in \
cluster.env, or run make setup"
    refuse "job $SLURM_JOB_ID does not start, for the reason above"
}

# Before anything began. The folder is known then if launch submit wrote the recipe into it.
refuse() { # refuse SENTENCE
    trap - EXIT
    set +e
    JOB_DIR=${recipe[0]%/submitted.yaml}/logs/job_$SLURM_JOB_ID RUN_DIR=${recipe[0]%/submitted.yaml}
    if [[ ${recipe[0]} == */submitted.yaml ]] && mkdir -p "$JOB_DIR"; then
        end_attempt "$(how_it_was_lost)"
        begin_attempt
        end_attempt "refused $1"
    fi
    end 2 "$1"
}

# ---- one start --------------------------------------------------------------------------------------------------------------------

begin_attempt() {
    [[ ! -e $JOB_DIR/cancelled ]] || end_cancelled
    rm -f "$JOB_DIR/outcome" "$JOB_DIR/preflight" "$JOB_DIR/bad_nodes"
    local newest
    newest=$(cd "$RUN_DIR/checkpoints" 2>/dev/null && printf '%s\n' step_* | grep -E '^step_[0-9]+$' | tail -n 1)
    printf '%s from %s: running' "$(date +%FT%T)" "${newest:-nothing}" >>"$JOB_DIR/attempts"
    echo "$SLURM_JOB_NODELIST" >"$JOB_DIR/nodes"
}

# The last line of attempts has no end as long as it runs, or when this script was killed with it. In place: the disk may be full.
end_attempt() { # end_attempt HOW
    local file=$JOB_DIR/attempts
    [[ -n $(tail -c 1 "$file" 2>/dev/null) ]] || return 0
    [[ $(tail -c 7 "$file") != running ]] || truncate -s -7 "$file"
    echo "$1" >>"$file"
}

how_it_was_lost() {
    local nodes
    nodes=$(dead_nodes "$(cat "$JOB_DIR/nodes" 2>/dev/null)")
    if [[ -n $nodes ]]; then echo "node $nodes was lost"; else echo "lost with its node, or killed"; fi
}

examined() {
    [[ ${PREFLIGHT:-yes} == no ]] || on_every_node preflight
}

# --cpus-per-task: from Slurm 22.05 on srun does not take it from the job, and would leave one CPU to all processes of a node.
on_one_node() { # on_one_node COMMAND WORD...
    srun --export=ALL --cpus-per-task="$SLURM_CPUS_ON_NODE" "${SRUN_OPTIONS[@]}" --nodes=1 --ntasks=1 "${CONTAINER[@]}" "$@"
}

on_every_node() { # on_every_node train|preflight
    [[ -z $asked && ! -e $JOB_DIR/cancelled ]] || return 0
    MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    # Of its own for every job and start, and below the range from which the system gives ports to connections.
    PORT=$((10000 + (SLURM_JOB_ID + $(wc -l <"$JOB_DIR/attempts")) % 20000))
    export MASTER PORT
    srun --export=ALL --cpus-per-task="$SLURM_CPUS_ON_NODE" "${SRUN_OPTIONS[@]}" --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" \
        --kill-on-bad-exit=1 "${CONTAINER[@]}" bash slurm/node.sh "$1" "${recipe[@]}" &
    step=$!
    local code=1
    while kill -0 "$step" 2>/dev/null; do # in the background and again, since a signal ends `wait`, and bash acts on it only then
        wait "$step"
        code=$?
    done
    step=""
    return "$code"
}

# ---- asked to stop ----------------------------------------------------------------------------------------------------------------

ask() { # ask USR1|USR2, which srun passes on to every node
    asked=$1
    [[ -z $step ]] || kill -s "$1" "$step"
}

# Slurm tells the nodes too, and leaves them KillWait seconds. Not TERM: srun would kill everything at once.
ask_for_slurm() {
    ask USR2
    local state
    state=$(this_job JobState)
    if [[ $state == RUNNING ]]; then # preemption that leaves a time of grace
        return
    elif [[ $(this_job Reason) == TimeLimit && ! -e $JOB_DIR/cancelled ]]; then # a step takes longer than the time since the signal
        end_attempt "reached its time limit"
        if in_vain; then
            echo "error: $(in_vain_because)" >&2
        else
            scontrol requeue "$SLURM_JOB_ID" && say "requeued at its time limit"
        fi
    else
        end_attempt "$(how_slurm_ended_it)"
    fi
}

# Its state is COMPLETING, whatever the reason; a job that Slurm requeues itself, for a dead node or for others' sake, counts one more start.
how_slurm_ended_it() {
    local nodes restarts
    nodes=$(dead_nodes "$SLURM_JOB_NODELIST") restarts=$(this_job Restarts)
    if [[ -e $JOB_DIR/cancelled ]]; then
        echo "cancelled"
    elif [[ -n $nodes ]]; then
        echo "ended by Slurm: node $nodes was lost"
    elif [[ -z $restarts ]]; then # Slurm does not answer
        echo "ended by Slurm"
    elif ((restarts > ${SLURM_RESTART_COUNT:-0})); then
        echo "ended by Slurm, which requeued it"
    else
        echo "cancelled by scancel"
    fi
}

# Those that Slurm has given up, or that do not answer (*).
dead_nodes() { # dead_nodes NODES
    [[ -z $1 ]] || scontrol --oneliner show node "$1" 2>/dev/null |
        sed -nE 's/^NodeName=([^ ]+) .* State=(DOWN|[^ ]*NOT_RESPONDING|[^ ]*\*).*/\1/p' | paste -sd,
}

this_job() { # this_job FIELD of scontrol show job
    scontrol --oneliner show job "$SLURM_JOB_ID" | tr ' ' '\n' | sed -n "s/^$1=//p"
}

# ---- what comes after a start -----------------------------------------------------------------------------------------------------

what_now() {
    local last examination
    last=$(head -n 1 "$JOB_DIR/outcome" 2>/dev/null)
    examination=$(head -n 1 "$JOB_DIR/preflight" 2>/dev/null)
    case $last in
        complete*)
            end_attempt complete
            say "complete"
            exit 0
            ;;
        refused*)
            end_attempt "$last"
            end 2 "${last#refused }"
            ;;
    esac
    if [[ -e $JOB_DIR/cancelled || $last == "stopped SIGINT" ]]; then
        [[ $last != running* ]] || last="but it crashed"
        [[ -n $last || $examination != @(refused|failed)* ]] || last=$examination
        end_attempt "cancelled, ${last:-before training began}"
        end_cancelled
    elif [[ $(this_job JobState) != RUNNING ]]; then
        end_attempt "$(how_slurm_ended_it)"
        exit 1
    elif [[ -s $JOB_DIR/bad_nodes ]]; then
        end_attempt "bad nodes: $(paste -sd, "$JOB_DIR/bad_nodes")"
        requeue "$(paste -sd, "$JOB_DIR/bad_nodes")"
    elif [[ $examination == refused* ]]; then
        end_attempt "$examination"
        end 2 "${examination#refused }"
    elif [[ $last == stopped* || -n $asked ]]; then
        end_attempt "${last:-stopped before training began}"
        requeue
    else
        if [[ $examination == failed* ]]; then end_attempt "$examination"; else end_attempt "crashed"; fi
        unless_in_vain
        say "crashed; started again from the newest checkpoint"
    fi
}

# Slurm's word for the job is then cancelled too, not failed.
end_cancelled() {
    trap '' TERM
    say "cancelled; submit the same again to go on"
    scancel "$SLURM_JOB_ID"
    exit 1
}

# Whether too many starts in a row from the same checkpoint led to no newer one. Those that Slurm ended for others' sake count for nothing.
in_vain() { (($(starts_in_a_row) >= MOST_ATTEMPTS)); }
starts_in_a_row() { awk '{ if ($3 != from) n = 0; from = $3; if (!/ended by Slurm/) n++ } END { print n + 0 }' "$JOB_DIR/attempts"; }
in_vain_because() {
    echo "given up: $(starts_in_a_row) starts in a row led to no newer checkpoint ($(tail -n 1 "$JOB_DIR/attempts")); what each process" \
        "said stands above"
}
unless_in_vain() { ! in_vain || end 1 "$(in_vain_because)"; }

requeue() { # requeue [NODES to keep away from]
    unless_in_vain
    trap '' TERM # Slurm ends this script in the course of it
    say "requeued${1:+, without $1}"
    scontrol requeue "$SLURM_JOB_ID" || end 1 "cannot be requeued, for the reason above; submit the same again to go on"
    [[ -z ${1:-} ]] || exclude "$1"
    exit 0
}

# Slurm changes this of waiting jobs alone, so it comes after the request to requeue, and is tried until this job waits.
exclude() { # exclude NODES
    local before
    before=$(this_job ExcNodeList)
    [[ $before != "(null)" ]] || before=""
    for _ in {1..20}; do
        scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=${before:+$before,}$1" 2>/dev/null && return
        sleep 0.5
    done
    say "these nodes cannot be excluded, so they may come again: $1"
}
