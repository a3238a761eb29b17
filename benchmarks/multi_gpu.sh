#!/bin/bash
# What several GPUs of one host have to show, and one table of it last:
#
#   bash benchmarks/multi_gpu.sh [FOLDER] [PART ...]
#
# PARTs, all unless some are named: parity, context, speed, checkpoint, failures. Results and logs go to FOLDER (runs/multi_gpu unless
# said); parts run later add to the same table. SECONDS_EACH bounds every part (600).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
out=${1:-runs/multi_gpu}
parts=("${@:2}")
all=(parity context speed checkpoint failures)
[[ " ${all[*]} " != *" $out "* ]] || { echo "error: $out: the folder comes first, then the parts: multi_gpu.sh FOLDER $*" >&2; exit 2; }
[ ${#parts[@]} -gt 0 ] || parts=("${all[@]}")
export SECONDS_EACH=${SECONDS_EACH:-600} PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
gpus=$($python -c 'import torch; print(torch.cuda.device_count())')
[ "$gpus" -ge 2 ] || { echo "error: torch sees $gpus GPUs here; at least two are needed" >&2; exit 2; }
mkdir -p "$out"

# run NAME COMMAND ...: its output goes to a log
run() {
    local name=$1 began=$SECONDS code
    shift
    timeout -s INT -k 10 "$SECONDS_EACH" "$@" >"$out/$name.log" 2>&1
    code=$?
    echo "$name: code $code after $((SECONDS - began)) s"
}
torchrun() { echo "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus"; }

for part in "${parts[@]}"; do
    case $part in
        parity) # every model compiles kernels for minutes: as many at once as there are cores for
            export NCCL_CELLS=$out/parity.jsonl
            rm -f "$NCCL_CELLS" "$out"/parity_*.log
            for model in LH "HH and mixers" options; do
                for precision in fp32 bf16; do
                    for mask in whole documents; do
                        while [ "$(jobs -rp | wc -l)" -ge $(($(nproc) / (gpus + 1) + 1)) ]; do wait -n; done
                        run "parity_${model%% *}_${precision}_$mask" \
                            $python -m pytest -q -rs tests/gpu/test_nccl.py -k "$model and $precision and $mask" &
                    done
                done
            done
            wait
            ;;
        context) run context $(torchrun) benchmarks/context_parallel.py --add "$out/context_parallel.json" --out "$out" ;;
        speed) run speed $python benchmarks/layout_speed.py --add "$out/layout_speed.json" --out "$out" --seconds $((SECONDS_EACH - 60)) ;;
        checkpoint)
            run reshard $python -m pytest -q -rs -s tests/gpu/test_reshard.py
            run checkpoint $(torchrun) benchmarks/checkpoint_cost.py 3b+rope+pretrain_4k train.batch_tokens=$((8192 * gpus)) train.micro_batch=2 \
                train.tokens=4194304 schedule.warmup_tokens=65536 --saves 2 --steps 3 --rolling-only --out "$out"
            ;;
        failures) run failures $python -m pytest -q -rs tests/gpu/test_failures.py ;;
        *) echo "error: $part: the parts are ${all[*]}" >&2; exit 2 ;;
    esac
done
$python benchmarks/multi_gpu_table.py "$out"
