"""megatron-core 0.19.2 on a machine without CUDA.

megatron-core takes CUDA for granted: it allocates on `torch.cuda.current_device()`, compares tensor type names with
'torch.cuda.FloatTensor', waits for streams, and keeps the random state of a GPU. `install()` gives the modules of megatron.core,
and only them, a view of torch in which these few things mean the CPU. Each replacement below is named, says which lines of
megatron-core need it, and is proved necessary by leaving it out (`tests/cpu/test_platform.py`), where an inventory also reports
every new CUDA assumption of another megatron-core release. Where there is CUDA, nothing is changed at all.

Files and lines in the docstrings are those of megatron/core in the 0.19.2 wheel.
"""

import functools
import logging
import sys
import types
from collections.abc import Callable, Collection

import torch

from hybrid_megatron.platform.module_view import ImportHook, ModuleView

CPU = torch.device("cpu")
PACKAGE = "megatron.core"

logger = logging.getLogger(__name__)


class MegatronView:
    """What the modules of megatron.core get to see: `torch` and `torch.cuda` as they shall be, and edits to single modules."""

    def __init__(self) -> None:
        self.torch = ModuleView(torch)
        self.cuda = ModuleView(torch.cuda)
        self.torch.cuda = self.cuda
        self.edits: dict[str, Callable[[types.ModuleType], None]] = {}

    def show_to(self, module: types.ModuleType) -> None:
        """Swap the global name `torch` of a module of megatron.core, and make the edit that is kept for it."""
        if module.__dict__.get("torch") is torch:
            module.torch = self.torch
        if edit := self.edits.get(module.__name__):
            edit(module)


Replacement = Callable[[MegatronView], None]
REPLACEMENTS: dict[str, Replacement] = {}


def _replacement(function: Replacement) -> Replacement:
    REPLACEMENTS[function.__name__] = function
    return function


@_replacement
def current_device(view: MegatronView) -> None:
    """`torch.cuda.current_device()` is the CPU.

    It raises without a driver, and is the device of every weight (tensor_parallel/layers.py:305, 1000, 1041, 1363, 1403), of the
    buffers of tensor-parallel collectives (tensor_parallel/mappings.py:95, 145, 185; utils.py:715), of the parameter and gradient
    buffers (distributed/param_and_grad_buffer.py:1162-1186) and of pipeline messages (pipeline_parallel/p2p_communication.py:334).
    """
    view.cuda.current_device = lambda: CPU


class _ProgramOrder:
    """Stands for a CUDA stream. On a CPU everything happens in program order, so there is nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """Return at once."""

    def wait_stream(self, stream: object) -> None:
        """Return at once."""


@_replacement
def current_stream(view: MegatronView) -> None:
    """`torch.cuda.current_stream()` is a stream on which waiting returns at once.

    The reduction of gradients asks for it every time (distributed/param_and_grad_buffer.py:632).
    """
    order = _ProgramOrder()
    view.cuda.current_stream = lambda device=None: order


@_replacement
def synchronize(view: MegatronView) -> None:
    """`torch.cuda.synchronize()` returns at once.

    Called after batched pipeline messages (pipeline_parallel/p2p_communication.py:263, 419), before an asynchronous checkpoint
    forks its writer (dist_checkpointing/strategies/async_utils.py:273) and when loading one in parallel
    (dist_checkpointing/strategies/fully_parallel.py:287, 296).
    """
    view.cuda.synchronize = lambda device=None: None


_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "ones_like", "empty_like")


def _names_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).split(":")[0] == "cuda"


def _on_cpu(factory: Callable) -> Callable:
    """The factory function, with device "cuda" read as "cpu" and `pin_memory` (which needs a driver) left out."""

    @functools.wraps(factory)
    def make(*args, **kwargs):
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


@_replacement
def factories(view: MegatronView) -> None:
    """`torch.zeros(..., device="cuda")` and its like make CPU tensors.

    The literal stands in optimizer/optimizer.py:315, 690, 698, 702, 1249; optimizer/clip_grads.py:96, 108, 112, 180, 231;
    optimizer/grad_scaler.py; pipeline_parallel/schedules.py:749, 1121, 2292; tensor_parallel/data.py:37;
    dist_checkpointing/exchange_utils.py:103, 109, 329; `pin_memory=True` in models/common/embeddings/rope_utils.py:63.
    """
    for name in _FACTORIES:
        setattr(view.torch, name, _on_cpu(getattr(torch, name)))


class _TypeName(str):
    """The name of a CPU tensor type that equals the name of its CUDA twin as well: torch.FloatTensor, torch.cuda.FloatTensor."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str(other) in (str(self), str(self).replace("torch.", "torch.cuda.", 1))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


@_replacement
def tensor_type(view: MegatronView) -> None:
    """`tensor.type()` compares equal to the CUDA name of its type; it still prints, hashes and equals its own.

    The optimizers sort parameters by these strings (optimizer/optimizer.py:1009, 1028; optimizer/distrib_optimizer.py:401, 466,
    758) and clipping asserts one (optimizer/clip_grads.py:174). A method of tensors has no per-module view, hence this form.
    """
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args, **kwargs):
        result = original(self, *args, **kwargs)
        return _TypeName(result) if isinstance(result, str) else result

    torch.Tensor.type = type_


@_replacement
def tensor_cuda(view: MegatronView) -> None:
    """`tensor.cuda()`, called from megatron.core, is the tensor itself; called from elsewhere it raises as before.

    Gathering the optimizer's state for a checkpoint calls it (optimizer/distrib_optimizer.py:1374), and so do loading one in
    parallel (dist_checkpointing/exchange_utils.py:339, 506), the loss scaler (optimizer/grad_scaler.py:163), the broadcast of
    batches (tensor_parallel/data.py:84), the comparison of replicas (utils.py:946) and the table of rotary angles under context
    parallelism (models/common/embeddings/rope_utils.py:64).
    """
    original = torch.Tensor.cuda

    @functools.wraps(original)
    def cuda(self: torch.Tensor, *args, **kwargs):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return self if caller.startswith(PACKAGE) else original(self, *args, **kwargs)

    torch.Tensor.cuda = cuda


def _silence(logger_name: str, message: str) -> None:
    logging.getLogger(logger_name).addFilter(lambda record: message not in record.getMessage())


@_replacement
def rng(view: MegatronView) -> None:
    """The random state of the GPU is that of the CPU, so that `CudaRNGStatesTracker` forks and restores the CPU's generator.

    Seeding goes through `torch.cuda.manual_seed` (tensor_parallel/random.py:305, 490), which without a GPU is only put on a list
    for later, as is `_set_cuda_rng_state` (random.py:172); reading the state raises (random.py:118, 303). The warning that the CPU's
    state changed inside `fork` (random.py:339) is about exactly what is wanted here, and is silenced.
    """

    def edit(module: types.ModuleType) -> None:
        module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
        module._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
        _silence(module.__name__, "CPU RNG state changed")

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    view.edits["megatron.core.tensor_parallel.random"] = edit
    view.cuda.manual_seed = manual_seed
    view.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    view.cuda.set_rng_state = lambda new_state, device="cuda": torch.set_rng_state(new_state)


@_replacement
def jit_off(view: MegatronView) -> None:
    """megatron-core's small fused functions are not compiled; `torch.compile` itself stays as it is.

    `jit_fuser` is `torch.compile` (jit.py:20-27), applied where a function is defined: fusions/fused_bias_dropout.py:69,
    transformer/attention.py:1623 and so on. Compiling one takes 10 to 20 s on a CPU and gains nothing there. It is switched off
    as soon as jit.py has run, before any module has used it.
    """
    view.edits["megatron.core.jit"] = lambda module: module.disable_jit_fuser()


_installed = False


def install(leave_out: Collection[str] = ()) -> bool:
    """Activate the CPU backend where there is no CUDA; True if it is active. A second call changes nothing.

    `leave_out` names replacements not to make, to show that each is needed. Call this before the first import of megatron.core:
    what is imported already is mended too, but has compiled its helpers by then.
    """
    global _installed
    unknown = set(leave_out) - set(REPLACEMENTS)
    assert not unknown, f"no such replacement: {sorted(unknown)}"
    if torch.cuda.is_available():
        return False
    if _installed:
        return True
    # megatron-core imports it, and a machine with the CUDA toolkit but no GPU (a login node) is told so by every process.
    _silence("torch.utils.cpp_extension", "No CUDA runtime is found")
    view = MegatronView()
    for name, replace in REPLACEMENTS.items():
        if name not in leave_out:
            replace(view)
    if ImportHook(PACKAGE, view.show_to).install():
        logger.warning("megatron.core was imported before hybrid_megatron.platform: its helpers stay compiled, which is slow on a CPU")
    _installed = True
    return True
