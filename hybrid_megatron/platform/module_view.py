"""Give the modules of one package another view of a module they import, as they are imported.

megatron-core says `import torch` and then `torch.zeros(..., device="cuda")`. Replacing `torch.zeros` for the whole process would
change it for everybody. Instead each megatron-core module gets, in place of its global name `torch`, a `ModuleView`: a few
attributes replaced, the rest read through to the real module.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence


class ModuleView(types.ModuleType):
    """A module seen through: attributes set on the view win, all others are those of the original."""

    def __init__(self, original: types.ModuleType):
        super().__init__(original.__name__)
        self._original = original

    def __getattr__(self, name: str):
        return getattr(self._original, name)


class ImportHook(importlib.abc.MetaPathFinder):
    """Calls `after_import(module)` for every Python module of `package`, right after its body has run."""

    def __init__(self, package: str, after_import: Callable[[types.ModuleType], None]):
        self.package = package
        self.after_import = after_import

    def covers(self, name: str) -> bool:
        """Whether `name` is the package or lies inside it."""
        return name == self.package or name.startswith(self.package + ".")

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module where Python itself finds it, with a loader that reports back."""
        if not self.covers(name):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
        run_body = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run_body(module)
            self.after_import(module)

        # The loader object belongs to this one module, so nothing else is affected.
        spec.loader.exec_module = exec_module
        return spec

    def install(self) -> list[str]:
        """Start watching; modules that are loaded already are reported now, and named in the result."""
        sys.meta_path.insert(0, self)
        loaded = [name for name in sys.modules if self.covers(name)]
        for name in loaded:
            self.after_import(sys.modules[name])
        return loaded
