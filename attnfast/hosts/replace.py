"""``attnfast.replace(model)``: finds the attention that is known in a model and serves it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnfast.backends import choose
from attnfast.hosts.host import Draw, Host, arguments, dressed, host_of, undressed
from attnfast.hosts.recall import PLACE

__all__ = ["Report", "replace"]


@dataclass
class Found:
    """One module of a report: where it is, what it is, what serves it or why it was left alone."""

    path: str
    module: nn.Module
    host: Host | None
    backend: str = ""
    left: str = ""

    def __str__(self) -> str:
        what = f"{self.path or '(the model)'}: {type(self.module).__name__}"
        if self.left:
            return f"{what} left alone: {self.left}"
        assert self.host is not None
        note = f"; {self.host.note}" if self.host.note else ""
        return f"{what} served by {self.backend}, as {self.host.name}{note}"


@dataclass
class Report:
    """What :func:`replace` found; one line a module when printed."""

    found: list[Found] = field(default_factory=list)

    @property
    def replaced(self) -> list[Found]:
        """The modules that attnfast serves now."""
        return [x for x in self.found if not x.left]

    @property
    def left(self) -> list[Found]:
        """The modules that were left alone, and why."""
        return [x for x in self.found if x.left]

    def undo(self) -> None:
        """Give every module its own methods back."""
        for x in self.replaced:
            undressed(x.module)
            x.left = "its replacement was undone"

    def __str__(self) -> str:
        return "\n".join(map(str, self.found)) or "no attention that is known"


def replace(model: nn.Module, *, strict: bool = False) -> Report:
    """Let attnfast compute the attention of a model, in place.

    Every module whose class and parameters are known is first called beside its replacement, on
    copies of both: several steps on small random padded input, in float64 and as the model is.
    Where outputs, gradients or state differ, its methods take arguments that the replacement does
    not know, a subclass has methods of its own, or an inner layer has hooks, it is left alone.
    Classes (for ``isinstance``), parameters, ``state_dict``, hooks, arguments, results and
    attributes stay as they are; models can be copied and pickled.

    Keys are projected, and their memory prepared, once per source: as long as calls come with the
    same tensors, unchanged in place. Between two calls with one source a parameter that changes
    through ``.data`` or a fused optimiser is not noticed, and of several backwards over one source
    all but the last need ``retain_graph=True``. Weights of inner layers may be read without a call
    of the layer: prune, normalise or adapt layers before, or ``report.undo()`` first.

    Args:
        model: any module; its parameters are not touched.
        strict: raise where a known class of attention cannot be served, instead of leaving it.

    Returns:
        A :class:`Report`; ``print(report)`` says what became of every attention, ``report.undo()``
        takes all back.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: with ``strict``, what was left alone and why; the model is as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    report = Report()
    inner: set[nn.Module] = set()  # parts of known attention
    for path, module in _modules(model):
        host = host_of(module)
        ours = type(module).__module__.startswith("attnfast.")
        if module in inner or ours or (host is None and "Att" not in type(module).__name__):
            continue
        found = Found(path, module, host)
        report.found.append(found)
        if host is None:
            found.left = "its class or its parameters are not known"
            continue
        inner.update(module.modules())
        found.left = why_left(module, host) or ""
    known = [x.module for x in report.found if x.host is not None]
    report.found = [  # what only holds known attention is not worth a line
        x
        for x in report.found
        if x.host is not None or not any(m in known for m in x.module.modules())
    ]
    refused = [x for x in report.left if x.host is not None and dressed(x.module) is None]
    if strict and refused:
        raise RuntimeError("; ".join(map(str, refused)))
    for found in report.replaced:
        parameter = next(found.module.parameters(), torch.empty(0))
        found.backend = choose(None, parameter.device, parameter.dtype, step=True)
        dressed(found.module, found.host)
    return report


def _modules(model: nn.Module, path: str = "", seen: Any = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules with their paths, also layers that Keras keeps in lists of its own."""
    seen = set() if seen is None else seen
    known = list(model.named_modules(seen, path))
    yield from known
    for path, module in known:
        if hasattr(module, "_flatten_layers"):
            for layer in module._flatten_layers(include_self=False, recursive=False):
                if layer not in seen:
                    yield from _modules(layer, f"{path}.{layer.name}".lstrip("."), seen)


def tensors(x: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict):
        yield from tensors(list(x.values()))
    elif isinstance(x, Iterable) and not isinstance(x, str):
        for part in x:
            yield from tensors(part)


def _copy(module: nn.Module) -> nn.Module:
    """Return a copy without hooks, and without the history of what it keeps."""
    kept = [x for x in tensors(list(vars(module).values())) if not x.is_leaf]
    twin = copy.deepcopy(module, {id(x): x.detach().clone() for x in kept})
    for part in twin.modules():
        for name, value in vars(part).items():
            if name.endswith("_hooks") and hasattr(value, "clear"):
                value.clear()
    return twin


def _outcome(module: nn.Module, example, dtype, device) -> tuple[list, list]:
    """Run an example; return its results and state, and the gradients of all of it."""
    draw = Draw(dtype, device)
    results = list(tensors(list(example(module, draw))))
    state = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != PLACE}
    results += tensors(list(state.values()))
    weighted = Draw(dtype, device, seed=1)
    loss: Any = sum(
        (x * weighted(*x.shape, grad=False)).sum()
        for x in results
        if x.requires_grad and x.is_floating_point()
    )
    leaves = [*draw.leaves, *(p for p in module.parameters() if p.requires_grad)]
    return results, list(torch.autograd.grad(loss, leaves, allow_unused=True))


def why_left(module: nn.Module, host: Host) -> str | None:
    """Say why a module of a known class is left alone, or None."""
    if dressed(module) is not None:
        return "it is served already"
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
        return "its parameters have no shape yet: replace it after the first call"
    return (
        why_not_called_alike(module, host)
        or host.why_not(module)
        or why_not_inherited(module, host)
        or why_not_hooked(module)
        or why_not_alike(module, host)
    )


def why_not_called_alike(module: nn.Module, host: Host) -> str | None:
    """Say which arguments the module's methods take and their replacements do not, or None."""
    for name, method in inspect.getmembers(host.methods, inspect.isfunction):
        if not inspect.isfunction(getattr(type(module), name, None)):
            continue
        taken = inspect.signature(method).parameters
        if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            continue
        more = [x for x in arguments(module, name) if x not in taken]
        if more:
            return f"its own {name} takes {', '.join(more)}, which its replacement does not"
    return None


def why_not_inherited(module: nn.Module, host: Host) -> str | None:
    """Say which method of the host's class a subclass of it has of its own, or None."""
    for cls in type(module).__mro__:
        if {cls.__qualname__, f"{cls.__module__}.{cls.__qualname__}"} & set(host.classes):
            return None
        for name in vars(cls):
            known = hasattr(host.methods, name) or hasattr(super(cls, module), name)
            if known and (name == "forward" or not hasattr(nn.Module, name)):
                return f"its class {cls.__name__} has a {name} of its own"
    return None


def why_not_hooked(module: nn.Module) -> str | None:
    """Say which inner layer has hooks, which would not be called, or None."""
    for name, part in module.named_modules():
        hooks = (v for k, v in vars(part).items() if k.endswith("_hooks") and "state_dict" not in k)
        if part is not module and any(hooks):
            return f"its {name} has hooks"
    return None


def why_not_alike(module: nn.Module, host: Host) -> str | None:
    """Say in what the module and its replacement differ on the host's example, or None."""
    parameter = next(module.parameters(), torch.empty(0))
    ways = [(host.dtype, torch.device("cpu"), 1e-9 if host.dtype == torch.float64 else 1e-4)]
    if parameter.dtype in (torch.float32, torch.float64):
        ways.append((parameter.dtype, parameter.device, 1e-4))
    for training in (False, True):
        for dtype, device, tolerance in ways:
            outcomes = []
            for served in (False, True):
                with torch.random.fork_rng(), torch.enable_grad():
                    torch.manual_seed(0)
                    try:
                        twin = _copy(module).to(device, dtype).train(training)
                        if served:
                            dressed(twin, host)
                        outcomes.append(_outcome(twin, host.example, dtype, device))
                    except Exception as error:
                        whose = "its replacement" if served else "its own class"
                        return f"{whose} fails on an example: {type(error).__name__}: {error}"
            for what, old, new in zip(("results", "gradients"), *outcomes):
                if len(old) != len(new):
                    return f"{len(new)} {what} instead of {len(old)}"
                for a, b in zip(old, new):
                    if not _close(a, b, tolerance):
                        return f"{what} differ by {_far(a, b)}"
    return None


def _close(a: Tensor | None, b: Tensor | None, tolerance: float) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach().double(), b.detach().double()
    if not a.numel():
        return True
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * max(1, float(a.abs().max())))


def _far(a: Tensor | None, b: Tensor | None) -> str:
    if a is None or b is None:
        return "one being None"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"form: {b.dtype} {list(b.shape)} instead of {a.dtype} {list(a.shape)}"
    return f"{float((a.double() - b.double()).detach().abs().max()):.2g}"
