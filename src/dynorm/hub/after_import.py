"""Wait for another library to be imported, without importing it."""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class AfterImport(MetaPathFinder):
    """A finder that finds nothing itself: it lets the module ``name`` be imported by the others, then acts, once."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self.action = action
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders have for the module, made to act after the module has run."""
        # Another library's finder may ask this one in turn.
        if fullname != self.name or self._searching:
            return None
        self._searching = True
        try:
            found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
            spec = next(filter(None, found), None)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_then_act(module: ModuleType) -> None:
            run(module)
            # Only an import that succeeded ends the wait; a second attempt gets a loader of its own.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.action()

        spec.loader.exec_module = run_then_act  # type: ignore[method-assign]
        return spec


def after_import(name: str, action: Callable[[], None]) -> None:
    """Call ``action`` once the module ``name`` is imported: now, if it is.

    It is called in the thread that imports the module. Waiting anew for the same module, as after a reload, ends the
    wait before.
    """
    if name in sys.modules:
        # Another thread may be in the middle of it: this waits for the end.
        importlib.import_module(name)
        action()
        return
    # By name: after a reload the class is another one.
    waiting = [f for f in sys.meta_path if type(f).__qualname__ == "AfterImport" and getattr(f, "name", None) == name]
    for finder in waiting:
        sys.meta_path.remove(finder)
    sys.meta_path.insert(0, AfterImport(name, action))
