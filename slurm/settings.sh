# shellcheck shell=bash
# Reads cluster.env, for job.sh and data_prep_array.sbatch. Whoever sources this has a function `refuse SENTENCE`, which ends the job.

# What it may set beside variables of the environment: SRUN_OPTIONS, CONTAINER, PYTHON, PREFLIGHT, PROCESSES_PER_NODE, RETRY_SECONDS.
read_settings() {
    local problem
    # shellcheck disable=SC2034 # for whoever calls this
    SRUN_OPTIONS=() CONTAINER=() settings=${HYBRID_MEGATRON_CLUSTER:-slurm/cluster.env}
    if [[ ! -e $settings ]]; then
        [[ -z ${HYBRID_MEGATRON_CLUSTER:-} ]] || refuse "HYBRID_MEGATRON_CLUSTER=$settings: no such file; name one that is there, or unset it"
        return 0
    fi
    problem=$(bash -n "$settings" 2>&1) || refuse "${problem%%$'\n'*}; mend that and submit again"
    trap 'refuse "$settings: it ends the job itself, by exit or set -e; take that out and submit again"' EXIT
    # shellcheck source=/dev/null
    source "$settings"
    trap - EXIT
}
