"""Stands in, at import time, for packages that an engine imports but never uses on a CPU.

``build_venv.sh`` puts this module and a ``.pth`` file that imports it into the environment, so that
it runs at interpreter start. The stand-ins only have to survive imports, decorators, subclassing
and annotations at module level. A package that is really installed is never replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGES = frozenset({"torchvision", "triton", "sgl_kernel"})


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _StandInMeta(type):
    """Any attribute of a stand-in class is its own dotted name (enough for enum-like members)."""

    def __getattr__(cls, name: str) -> str:
        if _is_dunder(name):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _StandInBase(metaclass=_StandInMeta):
    def __init__(self, *args: object, **kwargs: object) -> None:
        pass


class _StandInModule(ModuleType):
    """A module and, at once, a function, a decorator and a base class."""

    __version__ = "0.0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = _spec(name)

    def __getattr__(self, name: str) -> object:
        if _is_dunder(name):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        value: object
        if name[0].isupper():
            value = _StandInMeta(name, (_StandInBase,), {"__module__": self.__name__})
        else:
            value = sys.modules.setdefault(full_name, _StandInModule(full_name))
        setattr(self, name, value)
        return value

    def __call__(self, *args: object, **kwargs: object) -> object:
        if len(args) == 1 and callable(args[0]) and not kwargs:  # used as a bare decorator
            return args[0]
        return lambda decorated: decorated

    def __getitem__(self, key: object) -> _StandInModule:
        return self

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (_StandInBase,)


class _StandInLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules.get(spec.name) or _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _spec(name: str) -> ModuleSpec:
    return ModuleSpec(name, _StandInLoader(), is_package=True)


class _StandInFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return _spec(fullname) if fullname.partition(".")[0] in PACKAGES else None


# Last in the list: every real installation is found before.
sys.meta_path.append(_StandInFinder())
