# shellcheck shell=bash
# Environment of every process of a job, each line with its reason. What is set already stays: set it in cluster.env to have it otherwise.

# The code of this folder and the packages of $PYTHON, nothing from ~/.local or a module.
export PYTHONNOUSERSITE=1
# A line is in the log when it was printed, not when a buffer is full.
export PYTHONUNBUFFERED=1
# A crash in C++ says where Python was.
export PYTHONFAULTHANDLER=1
# Sixteen processes that crash would each write their memory to the shared disk.
ulimit -c 0

# A thread pool in each of eight processes: without it each takes all cores of the node. CPU work here is data loading and checkpoints.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# Tokenizers are not used in training, but transformers warns of forks unless this is said.
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}

# Segments that grow instead of new ones: layers of changing sizes leave no holes, which near the memory's limit look like a lack of it.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# One queue to the device keeps collectives in the order in which megatron-core launched them beside computation (tensor parallelism).
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

# NCCL says what is wrong with a network and no more. How long a collective may take is a setting of the recipe (watchdog.*): long until
# the first step is done, while kernels are tuned, shorter then.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# The flight recorder: the last collectives of every rank, written when one of them times out. Who did not come stands there.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
export TORCH_FR_DUMP_TEMP_FILE=${TORCH_FR_DUMP_TEMP_FILE:-$JOB_DIR/collectives_of_rank_}
# A failed collective ends its process, so that torchrun and with it the job learn of it.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-3}

# Compute nodes have no network; what would look for the Hugging Face hub says so at once instead of after minutes of attempts.
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export HF_DATASETS_OFFLINE=${HF_DATASETS_OFFLINE:-1}
# wandb needs nothing here: README.md, "wandb".
