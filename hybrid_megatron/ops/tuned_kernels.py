"""Configurations of flash-linear-attention's kernels that were found fastest beforehand, so that no run has to look for them.

FLA's kernels try dozens of configurations for every new shape, which takes minutes. For the GPUs of which a table lies in tuned/ (made by
benchmarks/tune_kernels.py), Triton's autotuners know the fastest before they begin; what is not in the table they tune as ever. A table is
made with one number of heads and samples: these only say how often a kernel runs beside itself, so its entries serve for every number.
HYBRID_MEGATRON_AUTOTUNE=1 leaves the table aside.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

TABLES = Path(__file__).parent / "tuned"
VARIABLE = "HYBRID_MEGATRON_AUTOTUNE"
_NUMBERS = ("B", "H", "HV")
"""Of samples, heads, value heads, by their names in the keys of FLA's kernels."""
_given: set[Path] = set()
"""Tables that this process's autotuners have."""


def table_of(device: str) -> Path:
    """Where the table of a GPU lies, by the name that the driver reports."""
    return TABLES / (re.sub(r"[^0-9a-z]+", "_", device.lower()).strip("_") + ".json")


def use_tuned_kernels(device: str) -> bool:
    """Give FLA's autotuners the table of this GPU, once a process; False if there is none, or if it is to be left aside."""
    path = table_of(device)
    if os.environ.get(VARIABLE) == "1" or not path.exists():
        return False
    if path not in _given:
        give_to_autotuners(json.loads(path.read_text()))
        _given.add(path)
    return True


def give_to_autotuners(entries: list[dict]) -> None:
    """Let FLA's autotuners know the entries of a table, in place of those they were given before."""
    known: dict[str, dict[tuple, dict]] = {}
    for entry in entries:
        known.setdefault(entry["kernel"], {})[_plain(entry["key"], entry["dtypes"])] = entry["config"]
    for tuner in tuners_of_fla():
        if name_of(tuner) in known:
            tuner.cache = _Known(dict(tuner.cache), tuner, known[name_of(tuner)])


def tuners_of_fla() -> Iterator:
    """The autotuners of all kernels of FLA."""
    import fla.ops  # noqa: F401
    from triton.runtime.autotuner import Autotuner

    seen = set()
    for module in [module for name, module in sys.modules.items() if name.startswith("fla.")]:
        for thing in list(vars(module).values()):
            while thing is not None and not isinstance(thing, Autotuner):
                thing = getattr(thing, "fn", None) if type(thing).__module__.startswith("triton.") else None
            if thing is not None and id(thing) not in seen:
                seen.add(id(thing))
                yield thing


def name_of(tuner) -> str:
    return f"{tuner.base_fn.__module__}.{tuner.base_fn.__name__}"


class _Known(dict):
    """The results of one of Triton's autotuners, by its keys: those it found itself, and those of a table for any number of heads."""

    def __init__(self, found: dict, tuner, known: dict[tuple, dict]):
        super().__init__(found)
        self.tuner, self.known = tuner, known

    def __contains__(self, key: tuple) -> bool:
        if super().__contains__(key):
            return True
        try:
            return _plain(*parts_of(self.tuner, key)) in self.known
        except ValueError:  # keys of another version have another form: such a kernel is tuned as ever
            return False

    def __missing__(self, key: tuple):
        from triton import Config

        self[key] = Config(**self.known[_plain(*parts_of(self.tuner, key))])
        return self[key]


def parts_of(tuner, key: tuple) -> tuple[list[tuple], list[str]]:
    """A tuning key of Triton's as (named values, types of the kernel's tensors)."""
    values = [part for part in key if not (isinstance(part, str) and part.startswith("torch."))]
    names = [name for name in tuner.keys if name in tuner.arg_names and name not in tuner.configs[0].kwargs]  # what it chooses is in no key
    if len(names) != len(values):
        raise ValueError(f"{name_of(tuner)}: the key {key} does not have the parts {names}")
    return list(zip(names, values)), list(key[len(values) :])


def _plain(values: list, dtypes: list[str]) -> tuple:
    """Without the numbers that do not matter."""
    return tuple((name, value) for name, value in values if name not in _NUMBERS), tuple(dtypes)


def entry_of(tuner, key: tuple, config) -> dict:
    """A table's entry: what an autotuner chose for a key."""
    values, dtypes = parts_of(tuner, key)
    chosen = {"kwargs": config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages, "num_ctas": config.num_ctas}
    return {"kernel": name_of(tuner), "key": values, "dtypes": dtypes, "config": chosen}
