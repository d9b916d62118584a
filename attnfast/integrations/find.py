"""Find the attention in a model: modules with an adapter, and others that look like attention."""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.inspection import methods_of, words
from attnfast.integrations.registry import adapters_of, check_command, unknown_reason

__all__ = ["Found", "attention_code", "find_attention"]

#: In the names of the classes that a report mentions.
ATTENTION_NAMES = re.compile("Att|attention|attn|LSA")
#: Products by which code computes scores or a context; ``@`` is none of its names.
PRODUCTS = ("bmm", "baddbmm", "matmul", "einsum")


@dataclass
class Found:
    """The entry of a report for one module: its path, class, and backend or reason for skipping it.

    ``zero_gradients`` names parameters whose gradient is now exactly 0 because a softmax cancels
    them. The project's own code gives them rounding errors, which an optimiser follows. ``refused``
    says why other adapters of its class, by their names, were not used.
    """

    path: str
    module: nn.Module
    adapter: Adapter | None
    backend: str = ""
    skip_reason: str = ""
    zero_gradients: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        name = f"{self.path or '(the model)'}: {type(self.module).__name__}"
        if self.skip_reason:
            return f"{name} skipped: {self.skip_reason}"
        assert self.adapter is not None
        notes = [self.adapter.note] if self.adapter.note else []
        notes += [f"not as {name}: {why}" for name, why in self.refused.items()]
        if self.zero_gradients:
            notes.append(f"gradient 0 instead of rounding errors: {', '.join(self.zero_gradients)}")
        return "; ".join([f"{name} served by {self.backend}, as {self.adapter.name}", *notes])


def find_attention(model: nn.Module) -> list[Found]:
    """Return an entry for each module that has an adapter or looks like attention.

    Parts of supported attention are not listed, nor other modules that contain supported attention,
    nor a module that only its code gives away if it contains any attention.
    """
    found: list[Found] = []
    inner: set[nn.Module] = set()  # parts of supported attention
    by_code: set[nn.Module] = set()
    for path, module in _modules(model):
        if module in inner or type(module).__module__.startswith("attnfast."):
            continue
        adapter = next(iter(adapters_of(module)), None)
        entry = Found(path, module, adapter)
        if adapter is None:
            named = ATTENTION_NAMES.search(type(module).__name__)
            code = "" if named else attention_code(module)
            if not named and not code:
                continue
            by_code.update([module] if code else [])
            reason = f"{code}, and {unknown_reason(module)}" if code else unknown_reason(module)
            next_step = f"what to do (docs/adapters.md): {check_command(type(module))}"
            entry.skip_reason = f"{reason}; {next_step}"
        elif not adapter.attention:
            inner.update(module.modules())
        found.append(entry)

    known = {x.module for x in found if x.adapter is not None}
    every = {x.module for x in found}

    def is_outer(module: nn.Module) -> bool:
        parts = {x for x in module.modules() if x is not module}
        return not parts.isdisjoint(every if module in by_code else known)

    return [x for x in found if x.adapter is not None or not is_outer(x.module)]


def attention_code(module: nn.Module) -> str:
    """Return in words how a module's own code computes attention, or an empty string.

    It takes a softmax, and multiplies matrices or has the layers of an additive score: one with A
    outputs, and one from A inputs to one score.
    """
    softmax, product = _attention_calls(type(module))  # type: ignore[arg-type]
    parts = list(module.children())
    if not softmax and not any(isinstance(x, nn.Softmax) for x in parts):
        return ""
    if product:
        return f"its own code computes a softmax and calls {product}"
    linear = [x for x in parts if isinstance(x, nn.Linear)]
    own = [x for x in module.parameters(recurse=False) if not is_lazy(x)]
    vectors = {x.numel() for x in own if x.numel() == max(x.shape, default=0)}
    scores = {x.in_features for x in linear if x.out_features == 1} | vectors
    features = {x.out_features for x in linear if x.out_features > 1}
    return "its own code computes a softmax of an additive score" if features & scores else ""


@cache
def _attention_calls(cls: type) -> tuple[bool, str]:
    """Return whether a class's methods take a softmax, and how they call a matrix product."""
    if cls.__module__.startswith("torch."):
        return False, ""
    functions = [f for versions in methods_of(cls).values() for f in versions]
    names = set().union(*(words(f.__code__) for f in functions))
    softmax = any("softmax" in x and "log_softmax" not in x for x in names if x.isidentifier())
    steps = (step for f in functions for step in dis.get_instructions(f))
    at = any("MATRIX" in x.opname or (x.opname == "BINARY_OP" and "@" in x.argrepr) for x in steps)
    return softmax, next((x for x in PRODUCTS if x in names), "@" * at)


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
