"""``attnfast.replace(model)`` replaces the supported attention modules of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from attnfast._utils.checks import check_flag
from attnfast.integrations.adapter import Adapter
from attnfast.integrations.patch import adapter_serving, patch, unpatch
from attnfast.integrations.probe import judge
from attnfast.integrations.registry import adapters_of, why_unknown
from attnfast.ops.backends import select_backend, try_select_backend
from attnfast.ops.recurrent import RECURRENT

__all__ = ["Report", "replace"]

#: In the names of the classes that a report mentions.
ATTENTION_NAMES = re.compile("Att|attention|attn|LSA")


@dataclass
class Found:
    """The entry of a report for one module: its path, class, and backend or reason for skipping it.

    ``zero_gradients`` names parameters whose gradient is now exactly 0 because a softmax cancels
    them. The project's own code gives them rounding errors, which an optimiser follows.
    """

    path: str
    module: nn.Module
    adapter: Adapter | None
    backend: str = ""
    skip_reason: str = ""
    zero_gradients: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        what = f"{self.path or '(the model)'}: {type(self.module).__name__}"
        if self.skip_reason:
            return f"{what} left alone: {self.skip_reason}"
        assert self.adapter is not None
        notes = [self.adapter.note] if self.adapter.note else []
        if self.zero_gradients:
            notes.append(f"gradient 0 instead of rounding errors: {', '.join(self.zero_gradients)}")
        return "; ".join([f"{what} served by {self.backend}, as {self.adapter.name}", *notes])


@dataclass
class Report:
    """Result of :func:`replace`; prints one line for each module.

    Attributes:
        found: an entry for each attention module, with its ``path``, ``module``, ``adapter``,
            ``backend``, and ``skip_reason``, or "".

    Example:
        >>> class MyAttention(torch.nn.Module):
        ...     pass
        >>> report = attnfast.replace(torch.nn.Sequential(MyAttention()))
        >>> report.replaced, [x.path for x in report.skipped]
        ([], ['0'])
    """

    found: list[Found] = field(default_factory=list)

    @property
    def replaced(self) -> list[Found]:
        """The modules that were replaced."""
        return [x for x in self.found if not x.skip_reason]

    @property
    def skipped(self) -> list[Found]:
        """The modules that were skipped, and why."""
        return [x for x in self.found if x.skip_reason]

    def undo(self) -> None:
        """Restore the original methods of every module."""
        for x in self.replaced:
            unpatch(x.module)
            x.skip_reason = "its replacement was undone"

    def __str__(self) -> str:
        return "\n".join(map(str, self.found)) or "no attention that is known"


def replace(model: nn.Module, *, strict: bool = False) -> Report:
    """Let attnfast compute the attention of a model, in place.

    Every module whose class and parameters are supported is first compared with its replacement, on
    copies of both: several steps on small random padded input, in float64, in the module's dtype,
    under autocast, and with larger parameters on a long source. The module is skipped if outputs,
    gradients, buffers or attributes differ, its methods need arguments that the replacement does
    not support, a subclass overrides methods, a copied class reads or writes other attributes, or
    an inner layer has hooks. Classes (for ``isinstance``), parameters, ``state_dict``, hooks,
    arguments, results and attributes are unchanged; models can be copied and pickled. The module's
    own code still runs calls with an optional argument that the replacement does not support, with
    queries and sources of different batch sizes or a mask of another shape, within ``torch.func``
    and forward mode, while TorchScript or ONNX trace a graph, and while inner layers have hooks or
    a class other than the one compared. For a supported decoder class all target steps run as one
    call; otherwise only its attention is replaced.

    Keys are projected, and their memory prepared, once per source, as long as calls pass the same
    tensors, unchanged. On a CPU every modification of a source is detected, also through NumPy
    or another tensor over its memory, except writes through ``.data`` to a source with a
    ``grad_fn``; on a GPU those that version counters record. A write through ``.data`` to a
    parameter between two calls with one source, as running averages make, is detected by sampling
    some values (CPU only; a write that leaves the samples unchanged is missed). On a GPU call
    ``train()`` or ``eval()`` after such a write. Several backward passes over one source need
    ``retain_graph=True`` in all but the last; second derivatives need ``report.undo()`` first.
    Prune, normalise or adapt inner layers before replacing.

    Args:
        model: any module; its parameters are not touched.
        strict: raise if a module of a supported class is skipped, or if there is none; a decoder
            may be skipped if its attention is replaced.

    Returns:
        A :class:`Report`; ``print(report)`` lists the result for every attention module,
        ``report.undo()`` restores the model.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: with ``strict``, a module was skipped, with the reason, or no attention is
            supported; the model is unchanged.

    Example:
        >>> class BahdanauAttention(torch.nn.Module):  # a copy of the translation tutorial's
        ...     def __init__(self, hidden_size):
        ...         super().__init__()
        ...         self.Wa = torch.nn.Linear(hidden_size, hidden_size)
        ...         self.Ua = torch.nn.Linear(hidden_size, hidden_size)
        ...         self.Va = torch.nn.Linear(hidden_size, 1)
        ...     def forward(self, query, keys):
        ...         scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys)))
        ...         weights = scores.squeeze(2).unsqueeze(1).softmax(-1)
        ...         return torch.bmm(weights, keys), weights
        >>> report = attnfast.replace(BahdanauAttention(8))
        >>> len(report.replaced), len(report.skipped)
        (1, 0)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_flag("strict", strict)
    report = Report()
    inner: set[nn.Module] = set()  # parts of supported attention
    for path, module in _modules(model):
        adapters = adapters_of(module)
        ours = type(module).__module__.startswith("attnfast.")
        if (
            module in inner
            or ours
            or not (adapters or ATTENTION_NAMES.search(type(module).__name__))
        ):
            continue
        found = _judge(path, module, adapters)
        report.found.append(found)
        if found.adapter is not None and not found.adapter.attention:
            inner.update(module.modules())
    for found in report.replaced:
        _choose_backend(found, report)
    known = [x.module for x in report.found if x.adapter is not None]
    report.found = [  # containers of supported attention are not listed
        x
        for x in report.found
        if x.adapter is not None or not any(m in known for m in x.module.modules())
    ]
    attention = [x for x in report.skipped if x.adapter and not x.adapter.attention]
    refused = [x for x in attention if not adapter_serving(x.module)]
    if strict and refused:
        raise RuntimeError("; ".join(map(str, refused)))
    if strict and not known:
        raise RuntimeError(f"{type(model).__name__} has {report}")
    for found in report.replaced:
        assert found.adapter is not None
        patch(found.module, found.adapter)
    return report


def _judge(path: str, module: nn.Module, adapters: list[Adapter]) -> Found:
    """Return the entry of a module with the first adapter that serves it, or why none does."""
    if not adapters:
        return Found(path, module, None, skip_reason=why_unknown(module))
    reasons: dict[str, str] = {}
    for adapter in adapters:  # classes that people copy share names
        why, zero_gradients = judge(module, adapter)
        if why is None:
            return Found(path, module, adapter, zero_gradients=zero_gradients)
        reasons.setdefault(why, adapter.name)
    several = len(reasons) > 1
    reason = "; ".join(f"as {name} {why}" if several else why for why, name in reasons.items())
    return Found(path, module, adapters[0], skip_reason=reason)


def _choose_backend(found: Found, report: Report) -> None:
    """Record the backend that runs a module, or the reason why none runs a whole decoder."""
    parameter = next(found.module.parameters(), torch.empty(0, device="cpu"))
    like, adapter = (parameter.device, parameter.dtype), found.adapter
    assert adapter is not None
    if not adapter.attention:
        found.backend = select_backend(None, *like, step=True)
        return
    found.backend = try_select_backend(None, *like, RECURRENT.name) or ""
    if not found.backend:
        found.skip_reason = f"no operator runs whole targets in {like[1]} on {like[0]}"
    attention = getattr(found.module, adapter.attention)
    if all(attention is not x.module for x in report.replaced) and not adapter_serving(attention):
        found.skip_reason = f"its {adapter.attention} is left alone"


def _modules(model: nn.Module, path: str = "", seen: Any = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules with their paths, also layers that Keras stores in its own lists."""
    seen = set() if seen is None else seen
    known = list(model.named_modules(seen, path))
    yield from known
    for path, module in known:
        if hasattr(module, "_flatten_layers"):
            for layer in module._flatten_layers(include_self=False, recursive=False):
                if layer not in seen:
                    yield from _modules(layer, f"{path}.{layer.name}".lstrip("."), seen)
