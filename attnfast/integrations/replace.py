"""``attnfast.replace(model)`` replaces the supported attention modules of a model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from attnfast._utils.checks import check_flag
from attnfast.integrations.adapter import adapter_serving
from attnfast.integrations.find import Found, find_attention
from attnfast.integrations.patch import patch, unpatch
from attnfast.integrations.probe import judge
from attnfast.integrations.registry import adapters_of
from attnfast.ops.backends import select_backend, try_select_backend
from attnfast.ops.recurrent import RECURRENT

__all__ = ["Report", "replace"]

NOTHING = "no attention of a supported project"


@dataclass
class Report:
    """Result of :func:`attnfast.replace`; prints one line for each module.

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
        return "\n".join(map(str, self.found)) or f"{NOTHING}, nor a module that looks like it"


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
    call, or, where no operator computes them, its own loop runs, and on a CPU the gradients of the
    loop's weights are computed after the loop's backward, each in one product. In any other decoder
    only the attention is replaced.

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
        A :class:`attnfast.integrations.Report`; ``print(report)`` lists the result for every
        attention module, ``report.undo()`` restores the model.

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
    report = Report(find_attention(model))
    for found in report.found:
        _compare(found)
    for found in report.replaced:
        _choose_backend(found, report)
    attention = [x for x in report.skipped if x.adapter and not x.adapter.attention]
    refused = [x for x in attention if not adapter_serving(x.module)]
    if strict and refused:
        raise RuntimeError("; ".join(map(str, refused)))
    if strict and not any(x.adapter for x in report.found):
        similar = "".join(f"; {x}" for x in report.found)
        raise RuntimeError(f"{type(model).__name__} has {NOTHING}{similar}")
    for found in report.replaced:
        assert found.adapter is not None
        patch(found.module, found.adapter)
    return report


def _compare(found: Found) -> None:
    """Compare a module with each of its adapters until one agrees; record the reasons if none."""
    reasons = found.refused
    for adapter in adapters_of(found.module):
        why, found.zero_gradients = judge(found.module, adapter)
        if not why:
            found.adapter = adapter
            return
        reasons[adapter.name] = why
    if len(set(reasons.values())) > 1:
        found.skip_reason = "; ".join(f"as {name}, {why}" for name, why in reasons.items())
    elif reasons:
        (found.skip_reason,) = set(reasons.values())


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
    attention = found.module.get_submodule(adapter.attention)
    if all(attention is not x.module for x in report.replaced) and not adapter_serving(attention):
        found.skip_reason = f"its {adapter.attention} is skipped"
