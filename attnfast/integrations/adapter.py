"""An adapter: a class of somebody's attention, and the methods that take the place of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import filter as filter_names
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from attnfast.integrations.cache import PLACE

__all__ = [
    "Adapter",
    "Draw",
    "adapter_of",
    "arguments",
    "dressed",
    "register_adapter",
    "undressed",
    "why_unknown",
]


class Draw:
    """Random input of a probe, the same for the same seed."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
        others: tuple[tuple[int, ...], ...] = (),
        repeats: bool = False,
    ):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device, self.others, self.repeats = dtype, device, others, repeats
        self.leaves: list[Tensor] = []

    def __call__(self, *shape: int, grad: bool = True) -> Tensor:
        """Return normal numbers; their gradients are compared unless ``grad`` is False."""
        x = torch.randn(*shape, generator=self.generator, dtype=torch.float64, device="cpu")
        if self.repeats and grad and x.dim() > 2:  # as padding has them
            rows = torch.rand(x.shape[:-1], generator=self.generator)
            x[rows < 0.25], x[rows > 0.75] = 0, 1
        x = x.to(self.device, self.dtype).requires_grad_(grad)
        if grad:
            self.leaves.append(x)
        return x

    def sources(self, *lengths: Iterable[int]) -> tuple[Iterable[int], ...]:
        """Return the lengths of batches of sources: those given, and once those of others."""
        return (*lengths, *self.others)

    def numbers(self, *values: int) -> Tensor:
        """Return whole numbers, such as lengths."""
        return torch.tensor(values, device=self.device)

    def seen(self, lengths: Iterable[int], Tk: int) -> Tensor:
        """Return a boolean mask ``[B, Tk]``, True up to the lengths."""
        return torch.arange(Tk, device=self.device) < self.numbers(*lengths).unsqueeze(1)


@dataclass(frozen=True, eq=False)
class Adapter:
    """One class of attention of another project.

    Args:
        name: what a report calls it.
        methods: a class whose methods take the place of the module's; ``super()`` in them is the
            module's own class.
        classes: the names of the module's class, ``package.module.Class``, or ``Class`` alone for
            code that people copy into their own.
        parameters: the names of the parameters that it must have; a ``*`` in one stands for the
            numbers of a list of layers.
        optional: the names of those that it may have; any other is a reason to leave it alone.
        example: ``example(module, draw)`` calls a module of this kind, several steps on padded
            input, and yields what it returns; ``draw(*shape)`` makes the input, and
            ``draw.sources(...)`` adds a long source to the lengths (see :class:`Draw`).
        reads: the attributes that the original's code reads and ``methods`` need not, where it is
            one that people copy; a copy that reads any other is left alone.
        larger: the size of parameters drawn for one comparison, times 1/√n for n features, so that
            scores are large; 1 where a note says that large ones differ.
        why_not: says why a module is left alone, or returns None.
        note: what is different, if anything, for the report.
        dtype: what the example is computed with.
    """

    name: str
    methods: type
    classes: tuple[str, ...]
    parameters: frozenset[str]
    example: Callable[[nn.Module, Draw], Iterable[Any]]
    optional: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    larger: float = 16.0
    why_not: Callable[[Any], str | None] = lambda module: None
    note: str = ""
    dtype: torch.dtype = torch.float64

    def is_named(self, module: nn.Module) -> bool:
        """Whether the module is one of these, by the name of its class."""
        full = {f"{c.__module__}.{c.__qualname__}" for c in type(module).__mro__}
        short = {c.__qualname__ for c in type(module).__mro__}
        return any(c in (full if "." in c else short) for c in self.classes)

    def misfits(self, module: nn.Module) -> tuple[list[str], list[str]]:
        """Return the parameters that the module has and these have not, and the reverse."""
        names = {
            name.rpartition("/")[2]  # Keras puts the layers' names before it
            for name, _ in module.named_parameters(remove_duplicate=False)
        }
        known = {n for p in self.parameters | self.optional for n in filter_names(names, p)}
        missing = sorted(p for p in self.parameters if not filter_names(names, p))
        return sorted(names - known), missing

    def fits(self, module: nn.Module) -> bool:
        """Whether the module is one of these, by the names of its class and its parameters."""
        return self.is_named(module) and not any(self.misfits(module))


#: Every adapter that is known, by its name.
ADAPTERS: dict[str, Adapter] = {}


def register_adapter(
    methods: type,
    *,
    name: str,
    classes: Iterable[str],
    parameters: Iterable[str],
    example: Callable[[Any, Draw], Iterable[Any]],
    optional: Iterable[str] = (),
    reads: Iterable[str] = (),
    larger: float = 16.0,
    why_not: Callable[[Any], str | None] = lambda module: None,
    note: str = "",
    dtype: torch.dtype = torch.float64,
) -> Adapter:
    """Make :func:`attnfast.replace` know one more class of attention.

    Args: those of :class:`Adapter`. One of the same name is replaced.

    Raises:
        TypeError: ``methods`` is not a class, or a name is not a string.
    """
    lists = {"classes": classes, "parameters": parameters, "optional": optional, "reads": reads}
    if not isinstance(methods, type):
        raise TypeError(f"methods must be a class, got {methods!r}")
    for argument, names in lists.items():
        if isinstance(names, str) or not all(isinstance(x, str) for x in names):
            raise TypeError(f"{argument} must be a list of names, got {names!r}")
    adapter = Adapter(
        name, methods, tuple(classes), frozenset(parameters), example, frozenset(optional),
        frozenset(reads), larger, why_not, note, dtype,
    )  # fmt: skip
    ADAPTERS[name] = adapter
    return adapter


def why_unknown(module: nn.Module) -> str:
    """Say what of a module that no adapter fits is not known."""
    named = [adapter for adapter in ADAPTERS.values() if adapter.is_named(module)]
    if not named:
        cls = type(module)
        return (
            f"its class {cls.__module__}.{cls.__qualname__} is not known; attnfast.register_adapter"
        )
    adapter = min(named, key=lambda adapter: sum(map(len, adapter.misfits(module))))
    more, missing = (
        ", ".join(names[:3]) + ", …" * (len(names) > 3) for names in adapter.misfits(module)
    )
    said = [f"it has {more}"] * bool(more) + [f"it lacks {missing}"] * bool(missing)
    what = f"its parameters are not known: unlike {adapter.name} {' and '.join(said)}"
    return f"{what}; attnfast.register_adapter"


def adapter_of(module: nn.Module) -> Adapter | None:
    """Return the adapter whose class and parameters the module has, the last registered first."""
    return next((a for a in reversed(ADAPTERS.values()) if a.fits(module)), None)


_set_class = object.__dict__["__class__"].__set__  # whatever a class makes of its attributes


class _Dressed:
    """What the classes of replaced modules have besides their adapter's methods."""

    def train(self, mode=True):
        self.__dict__.pop(PLACE, None)  # parameters may be others now, written through ``.data``
        return super().train(mode)  # type: ignore[misc]

    def __reduce_ex__(self, protocol):
        dressed_as = type(self)
        _set_class(self, dressed_as._attnfast_own)
        try:
            made, args, *rest = self.__reduce_ex__(max(protocol, 2))
        finally:
            _set_class(self, dressed_as)
        if rest and isinstance(rest[0], dict):
            rest[0] = {k: v for k, v in rest[0].items() if k != PLACE}
        return (_remade, (dressed_as._attnfast_adapter.name, made, *args), *rest)


def _remade(name: str, made: Callable[..., Any], *args: Any) -> Any:
    """Make a replaced module again, from a pickle or as a copy."""
    if name not in ADAPTERS:
        raise RuntimeError(f"a pickled module was replaced as {name}: register that adapter first")
    module = made(*args)
    dressed(module, ADAPTERS[name])
    return module


def _falling_back(own: type, methods: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield methods that leave a call to the own class where an argument is new to ours."""
    for name, ours in inspect.getmembers(methods, inspect.isfunction):
        theirs, taken = getattr(own, name, None), inspect.signature(ours).parameters
        if not inspect.isfunction(theirs) or any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            continue
        order = list(inspect.signature(theirs).parameters.values())[1:]
        new = {p.name: p.default for p in order if p.name not in taken}
        if new:
            yield name, _either(theirs, ours, [p.name for p in order], new)


def _either(
    theirs: Callable[..., Any], ours: Callable[..., Any], order: list[str], new: dict[str, Any]
) -> Callable[..., Any]:
    @wraps(theirs)
    def method(self, *args, **kwargs):
        given = {**dict(zip(order, args)), **kwargs}
        for name, default in new.items():
            if given.pop(name, default) is not default:
                return theirs(self, *args, **kwargs)
        return ours(self, **given)

    return method


@cache
def _dress(own: type, adapter: Adapter) -> type:
    """Return a subclass of the module's own class with the adapter's methods."""
    names = {
        "__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__,
        "_attnfast_own": own, "_attnfast_adapter": adapter,
        **dict(_falling_back(own, adapter.methods)),
    }  # fmt: skip
    return type(own.__name__, (_Dressed, adapter.methods, own), names)


def dressed(module: nn.Module, adapter: Adapter | None = None) -> Adapter | None:
    """Give the module an adapter's methods; without one, return that whose methods it has."""
    if adapter is not None:
        _set_class(module, _dress(type(module), adapter))  # type: ignore[arg-type]
    return getattr(type(module), "_attnfast_adapter", None)


def undressed(module: nn.Module) -> None:
    """Give the module its own class back."""
    own = getattr(type(module), "_attnfast_own", None)
    if own is not None:
        _set_class(module, own)
        module.__dict__.pop(PLACE, None)


def arguments(module: nn.Module, name: str = "forward") -> dict[str, inspect.Parameter]:
    """Return what a method of the module's own class takes, by name."""
    own = getattr(type(module), "_attnfast_own", type(module))
    return dict(list(inspect.signature(getattr(own, name)).parameters.items())[1:])
