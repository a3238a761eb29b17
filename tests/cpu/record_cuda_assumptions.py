"""The inventory of CUDA assumptions in the megatron-core modules that a run loads.

    python -m tests.cpu.record_cuda_assumptions

writes `megatron_cuda_assumptions.json` anew. Do that after changing the pinned megatron-core, or importing more of it, once each
line that `test_platform.py` names has been read: either a run does not reach it on a CPU, or `hybrid_megatron/platform/cpu_backend.py`
answers it (add a replacement where it does not).
"""

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("megatron_cuda_assumptions.json")

# What counts: the CUDA module, device and type literals, moves to the device, pinned memory, NCCL by name, compiled functions.
ASSUMPTION = re.compile(
    r"torch\.cuda\b|['\"]cuda\b|['\"]torch\.cuda\.|\.cuda\(|\.is_cuda\b|pin_memory|['\"]nccl['\"]|torch\.compile\b|torch\._C\._cuda"
)

# What a training run imports, beside what the project's own files name.
ENTRY_MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.process_groups_config",
    "megatron.core.tensor_parallel",
    "megatron.core.transformer.transformer_block",
    "megatron.core.transformer.transformer_layer",
    "megatron.core.transformer.attention",
    "megatron.core.transformer.mlp",
    "megatron.core.models.common.embeddings.language_model_embedding",
    "megatron.core.models.common.embeddings.rotary_pos_embedding",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.indexed_dataset",
)

_LIST_LOADED = """
import importlib, json, sys
import hybrid_megatron.platform
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
files = {getattr(module, "__file__", None) for name, module in sys.modules.items() if name.startswith("megatron.core")}
print(json.dumps(sorted(file for file in files if file and file.endswith(".py"))))
"""


def imported_by_project() -> set[str]:
    """The megatron.core modules that the project's files import. `from a import b` names a.b as well: b may be a module."""
    names: set[str] = set()
    for path in [*(ROOT / "hybrid_megatron").rglob("*.py"), *(ROOT / "launch").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith("megatron.core")}


def loaded_files() -> list[Path]:
    """The source files of megatron-core that a fresh process holds after importing all of the above."""
    names = json.dumps([*ENTRY_MODULES, *sorted(imported_by_project())])
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", _LIST_LOADED, names], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [Path(line) for line in json.loads(result.stdout.splitlines()[-1])]


def assumptions_in(source: str) -> Counter[str]:
    """The lines of code that assume CUDA, whitespace normalised, with their counts; comments and docstrings do not count."""
    prose: set[int] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # "\\-" in a docstring of megatron-core
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, node.end_lineno + 1))
    return Counter(
        " ".join(line.split())
        for number, line in enumerate(source.splitlines(), start=1)
        if number not in prose and not line.lstrip().startswith("#") and ASSUMPTION.search(line)
    )


def inventory() -> dict[str, Counter[str]]:
    """For each loaded file, by its path from `megatron/core`, its CUDA assumptions; files without any are present but empty."""
    found = {}
    for path in loaded_files():
        name = path.as_posix().rpartition("/megatron/core/")[2]
        found[name] = assumptions_in(path.read_text())
    return found


def recorded() -> dict[str, Counter[str]]:
    """The inventory as it was last written down."""
    return {name: Counter(lines) for name, lines in json.loads(RECORD.read_text())["files"].items()}


def compare(found: dict[str, Counter[str]], known: dict[str, Counter[str]]) -> list[str]:
    """One sentence for each line that is not recorded, or recorded but gone from a loaded file."""
    problems = []
    for name, lines in found.items():
        before = known.get(name, Counter())
        problems += [f"{name}: not recorded: {line}" for line in sorted((lines - before).elements())]
        problems += [f"{name}: recorded, but gone: {line}" for line in sorted((before - lines).elements())]
    return problems


def main() -> None:
    """Write the record."""
    found = inventory()
    files = {name: sorted(lines.elements()) for name, lines in sorted(found.items()) if lines}
    record = {"megatron-core": importlib.metadata.version("megatron-core"), "files": files}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{sum(map(len, files.values()))} lines in {len(files)} of {len(found)} files -> {RECORD.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
