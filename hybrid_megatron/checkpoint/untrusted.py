"""Reading a checkpoint runs no code from it.

torch's distributed checkpoints pickle their metadata and every object that is no tensor, and torch reads both with the plain unpickler,
which calls whatever a file names. A checkpoint may come from anyone, so within `no_code_from_files` the metadata may name nothing but the
classes that describe tensors, and objects are read with torch's own restricted loader.
"""

import contextlib
import functools
import pickle
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch.distributed.checkpoint import default_planner, filesystem

# What metadata may name: these, any torch dtype, and any class defined in one of the modules below.
_NAMES = {
    "builtins": {"dict", "list", "tuple", "set", "frozenset", "int", "float", "bool", "str", "bytes", "slice"},
    "collections": {"OrderedDict", "defaultdict"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}
_MODULES = {"torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        found = getattr(sys.modules.get(module), name, None)
        if module == "torch" and isinstance(found, torch.dtype):
            return found
        if module in _MODULES and isinstance(found, type) and found.__module__ == module:
            return found
        raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which describes no tensor")


@contextlib.contextmanager
def no_code_from_files() -> Iterator[None]:
    """Replace, for torch's checkpoint reader alone, `pickle.load` and `torch.load` by their restricted forms."""
    restricted_pickle = SimpleNamespace(**vars(pickle) | {"load": lambda file: _MetadataUnpickler(file).load()})
    restricted_torch = _View(torch, load=functools.partial(_load, torch.load))
    before = filesystem.pickle, default_planner.torch
    filesystem.pickle, default_planner.torch = restricted_pickle, restricted_torch
    try:
        yield
    finally:
        filesystem.pickle, default_planner.torch = before


def _load(load, file, **options):
    return load(file, **options | {"weights_only": True})


class _View:
    """A module seen with some of its names replaced."""

    def __init__(self, module, **names):
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str):
        return getattr(self._module, name)
