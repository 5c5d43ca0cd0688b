"""Call a function when a module is imported, or at once if it has been."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pkgutil import resolve_name
from types import ModuleType


def call_after_import(module: str, function: str) -> None:
    """Call a function, such as ``"package.module:name"``, with a module once that is imported.

    The function's own module is imported only then.
    """
    if module in sys.modules:
        resolve_name(function)(sys.modules[module])
    else:
        _FINDER.waiting[module] = function


class _Finder(MetaPathFinder):
    """Lets the other finders find a module that is waited for, and adds a call to its loading."""

    def __init__(self) -> None:
        self.waiting: dict[str, str] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that is waited for, and None for any other module."""
        if name not in self.waiting:
            return None
        spec = None
        # Those before it did not find the module.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = spec or finder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_call(module: ModuleType) -> None:
            load(module)
            # Another thread may have been faster.
            function = self.waiting.pop(name, None)
            if function is not None:
                resolve_name(function)(module)

        spec.loader.exec_module = load_and_call  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()
sys.meta_path.insert(0, _FINDER)
