"""Adapters: another project's attention class and the methods that replace its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from fnmatch import filter as filter_names
from typing import Any

import torch
from torch import Tensor, nn

from attnfast.ops.arguments import length_mask

__all__ = ["Adapter", "ProbeInputs", "UnsupportedCall", "arguments"]

LATE = 40  # steps of a long target


class UnsupportedCall(Exception):
    """Raised by an adapter's method to leave a call to the module's own code.

    Example:
        >>> class FusedAttention:
        ...     def forward(self, state, source, temperature=1.0):
        ...         if state.dim() != 2:
        ...             raise attnfast.integrations.UnsupportedCall("the state is not [B, D]")
    """


class ProbeInputs:
    """Random input of a probe, determined by its seed.

    Args:
        dtype, device: of the tensors.
        seed: of the random numbers.
        others: further batches of lengths, which :meth:`sources` adds.
        repeats: set rows of inputs to 0 or 1, as in padding.
        late: make the words of targets that may end late, and one long target.
        known: word ids that occur in the module's own code, used in late targets.
        first: use only the first batch of lengths that the example gives.

    Example:
        >>> draw = attnfast.integrations.ProbeInputs(torch.float64, torch.device("cpu"))
        >>> for lengths in draw.sources([5, 2], [3, 1]):
        ...     source = draw(len(lengths), max(lengths), 8)
        ...     print(source.shape, draw.seen(lengths, max(lengths)).sum(-1))
        torch.Size([2, 5, 8]) tensor([5, 2])
        torch.Size([2, 3, 8]) tensor([3, 1])
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        seed: int = 0,
        others: tuple[tuple[int, ...], ...] = (),
        repeats: bool = False,
        late: bool = False,
        known: Iterable[int] = (),
        first: bool = False,
    ):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device, self.others, self.repeats = dtype, device, others, repeats
        self.late, self.known, self.most = late, tuple(known), LATE if late else 0
        self.first = first
        self.marked = self.marks = 0  # words used in all rows so far, words to use
        self.leaves: list[Tensor] = []

    def __call__(self, *shape: int, grad: bool = True) -> Tensor:
        """Return normally distributed values; with ``grad`` their gradients are compared."""
        x = torch.randn(*shape, generator=self.generator, dtype=torch.float32, device="cpu")
        if self.repeats and grad and x.dim() > 2:  # as in padding
            rows = torch.rand(x.shape[:-1], generator=self.generator)
            x[rows < 0.25], x[rows > 0.75] = 0, 1
        x = x.to(self.device, self.dtype).requires_grad_(grad)
        if grad:
            self.leaves.append(x)
        return x

    def sources(self, *lengths: Iterable[int]) -> tuple[Iterable[int], ...]:
        """Return the lengths of batches of sources: the given ones, or the first, and others."""
        return (*lengths[: 1 if self.first else None], *self.others)

    def numbers(self, *values: int) -> Tensor:
        """Return integers, such as lengths."""
        return torch.tensor(values, device=self.device)

    def steps(self, *counts: int) -> tuple[int, ...]:
        """Return the lengths of targets: the given ones, and at the first call a long one."""
        most, self.most = self.most, 0
        return (*counts, most) if most else counts

    def words(self, most: int, B: int, T: int, *shape: int) -> Tensor:
        """Return random words ``[B, T, ...]`` below ``most``, half of them the first few.

        The first few ids are usually padding and other special words. In a late target every
        second word is equal in all rows, so that all rows can end there: the first few ids, the
        last, and the integers in the module's own code. If a target is too short for all of them,
        the next target continues; they are never the last word of a target, because some decoders
        do not read it.
        """
        x = torch.randint(most, (B, T, *shape), generator=self.generator, device="cpu")
        x = torch.where(torch.rand(x.shape, generator=self.generator) < 0.5, x % 4, x)
        marks = dict.fromkeys([*range(4), most - 1, *self.known])
        words = [word for word in marks if 0 <= word < most]
        for t in range(0, T - 1 if self.late else 0, 2):
            x[:, t] = words[self.marked % len(words)]
            self.marked, self.marks = self.marked + 1, len(words)
        return x.to(self.device)

    def seen(self, lengths: Iterable[int], Tk: int) -> Tensor:
        """Return a boolean mask ``[B, Tk]``, True up to the lengths."""
        return length_mask(self.numbers(*lengths), Tk)


@dataclass(frozen=True, eq=False, kw_only=True)
class Adapter:
    """Describes one attention class of another project and its replacement.

    Args:
        name: the name in reports.
        implementation: a class whose methods replace the module's; ``super()`` in them is the
            module's own class.
        classes: the names of the module's class: ``package.module.Class``, one for each place where
            a release has it, or ``Class`` alone for code that is usually copied. A class of the
            same name in another place is a copy, whose code is inspected.
        parameters: the names of the required parameters; a ``*`` in a name stands for the indices
            of a list of layers.
        optional: the names of optional parameters; a module with any other parameter is skipped.
        example: ``example(module, draw)`` calls a module of this class, several steps on padded
            input, and yields its results; ``draw(*shape)`` makes the input,
            ``draw.sources(...)`` adds a long source and large batches to the lengths, and
            ``draw.steps(...)`` a long target (see :class:`ProbeInputs`).
        known_attributes: the attributes and globals that the original reads or writes and
            ``implementation`` does not need; a copy that uses any other is skipped.
        attention: for a whole decoder, the name of its attention, which must be replaced too.
        weight_scale: the size of parameters drawn for one comparison, times 1/√n for n features, so
            that scores are large; 1 if a note says that results for large scores differ.
        skip_reason: returns the reason for skipping a module, or None.
        note: a difference from the original, if any, for the report.
        dtype: the dtype of the example.
        search: for a whole decoder that searches can use, the argument ``encode`` of a
            :class:`SearchModel`.

    Raises:
        TypeError: ``implementation`` is not a class, or a name is not a string.

    Example:
        >>> from attnfast.integrations import Adapter, attend_to_source
        >>> class FusedAttention:  # replaces the methods of ``my_project.Attention``
        ...     def forward(self, state, source):
        ...         return attend_to_source(self, self.W(state), source, source)
        >>> def example(module, draw):
        ...     for lengths in draw.sources([5], [3]):
        ...         source = draw(len(lengths), max(lengths), module.W.out_features)
        ...         yield module(draw(len(lengths), module.W.in_features), source)
        >>> adapter = Adapter(
        ...     name="my_project", implementation=FusedAttention, classes=["my_project.Attention"],
        ...     parameters=["W.weight", "W.bias"], example=example,
        ... )
        >>> adapter.fits(torch.nn.Linear(8, 8))  # another class
        False
    """

    name: str
    implementation: type
    classes: Collection[str]
    parameters: Collection[str]
    example: Callable[[Any, ProbeInputs], Iterable[Any]]
    optional: Collection[str] = ()
    known_attributes: Collection[str] = ()
    attention: str = ""
    weight_scale: float = 16.0
    skip_reason: Callable[[Any], str | None] = lambda module: None
    note: str = ""
    dtype: torch.dtype = torch.float64
    search: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        """Raise unless ``implementation`` is a class and the names are lists of strings."""
        if not isinstance(self.implementation, type):
            raise TypeError(f"implementation must be a class, got {self.implementation!r}")
        for field in ("classes", "parameters", "optional", "known_attributes"):
            names = getattr(self, field)
            listed = isinstance(names, Collection) and not isinstance(names, str)
            if not listed or not all(isinstance(x, str) for x in names):
                raise TypeError(f"{field} must be a list of names, got {names!r}")

    def named_class(self, module: nn.Module) -> type | None:
        """Return the first of the module's classes that has one of the adapter's names, or None.

        A copy is known by its parameters too; a class without any only where its project has it.
        """
        named = [name for name in self.classes if self.parameters or "." not in name]
        names = {name.rpartition(".")[2] for name in named}
        classes = type(module).__mro__
        return next((c for c in classes if c.__qualname__ in names or self._has_place(c)), None)

    def is_original(self, module: nn.Module) -> bool:
        """Return whether the class is one of the project's own, not a copy."""
        cls = self.named_class(module)
        return cls is not None and self._has_place(cls)

    def _has_place(self, cls: type) -> bool:
        return f"{cls.__module__}.{cls.__qualname__}" in self.classes

    def mismatches(self, module: nn.Module) -> tuple[list[str], list[str]]:
        """Return the module's parameters unknown to the adapter, and the missing ones."""
        names = {
            name.rpartition("/")[2]  # Keras prefixes the layers' names
            for name, _ in module.named_parameters(remove_duplicate=False)
        }
        known = {n for p in (*self.parameters, *self.optional) for n in filter_names(names, p)}
        missing = sorted(p for p in self.parameters if not filter_names(names, p))
        return sorted(names - known), missing

    def fits(self, module: nn.Module) -> bool:
        """Return whether the module's class and parameter names match the adapter's."""
        return self.named_class(module) is not None and not any(self.mismatches(module))


def adapter_serving(module: nn.Module) -> Adapter | None:
    """Return the adapter whose methods the module has, or None."""
    return getattr(type(module), "_attnfast_adapter", None)


def is_as_it_was(module: nn.Module, kinds: frozenset[type]) -> bool:
    """Return whether the inner layers have the classes that were compared, and no hooks."""
    for part in module._modules.values():
        if part is None:
            continue
        own = vars(part)
        if (
            type(part) not in kinds
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
            or (own["_modules"] and not is_as_it_was(part, kinds))
        ):
            return False
    return True


def was_exchanged(module: nn.Module) -> bool:
    """Return whether a replaced module has inner layers of other classes than were compared."""
    kinds = getattr(type(module), "_attnfast_kinds", None)
    return kinds is not None and not is_as_it_was(module, kinds)


def arguments(module: nn.Module, name: str = "forward") -> dict[str, inspect.Parameter]:
    """Return the parameters of a method of the module's own class, by name."""
    own = getattr(type(module), "_attnfast_own", type(module))
    return dict(list(inspect.signature(getattr(own, name)).parameters.items())[1:])
