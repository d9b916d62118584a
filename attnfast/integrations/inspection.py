"""Inspect a module's class, to skip a copy whose code its replacement may not reproduce."""

from __future__ import annotations

import contextlib
import dis
import inspect
import logging
import sys
from collections.abc import Iterable
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from attnfast.integrations.adapter import Adapter, adapter_serving, arguments
from attnfast.integrations.cache import PLACE

__all__ = ["methods_of", "static_skip_reason", "unsupported_attributes", "words"]

#: Names in code that draws random numbers or uses gradients, which an example may not reveal.
HIDDEN = {
    "random", "rand", "randn", "randint", "rand_like", "randn_like", "randperm", "uniform",
    "uniform_", "normal_", "bernoulli", "bernoulli_", "multinomial", "choice", "detach", "detach_",
    "data", "no_grad", "enable_grad", "set_grad_enabled", "inference_mode", "requires_grad_",
    "requires_grad", "is_grad_enabled", "is_inference", "is_inference_mode_enabled", "is_leaf",
    "grad", "grad_fn", "retain_grad", "retains_grad", "register_hook",
}  # fmt: skip
#: Names by which code looks up an attribute that may be missing.
BY_NAME = {"getattr", "hasattr", "attrgetter", "vars", "__dict__", "__getattribute__"}
FIXED = (torch.dtype, torch.device, str, type(None), logging.Logger)  # types allowed for globals
INTERNAL = {*vars(nn.Module()), PLACE}


def static_skip_reason(module: nn.Module, adapter: Adapter) -> str | None:
    """Return why a module of a known class is skipped without a comparison, or None."""
    if adapter_serving(module) is not None:
        return "it is served already"
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
        return "its parameters have no shape yet: replace it after the first call"
    if any(p.is_meta for p in module.parameters()):
        return "its parameters are on the meta device: replace it when they have values"
    why = (
        signature_mismatch(module, adapter)
        or overridden_method(module, adapter)
        or unsupported_attributes(module, adapter)
        or inner_hooks(module)
    )
    if why:
        return why
    try:
        return adapter.skip_reason(module)
    except AttributeError as error:  # a copy without one of the original's attributes
        return f"it is unlike {adapter.name}: {error}"


def signature_mismatch(module: nn.Module, adapter: Adapter) -> str | None:
    """Return the reason if the module's methods require arguments that replacements lack."""
    for name, method in inspect.getmembers(adapter.implementation, inspect.isfunction):
        if not hasattr(type(module), name):
            continue
        if not inspect.isfunction(getattr(type(module), name)):
            return f"its own {name} is not a plain method"
        taken = inspect.signature(method).parameters
        if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            continue
        own = arguments(module, name).values()  # optional ones fall back to its own class
        more = [p.name for p in own if p.name not in taken and p.default is p.empty]
        if more:
            return f"its own {name} takes {', '.join(more)}, which its replacement does not"
    return None


def overridden_method(module: nn.Module, adapter: Adapter) -> str | None:
    """Return the reason if a subclass of the adapter's class overrides a method, or None."""
    named = adapter.named_class(module)
    for cls in type(module).__mro__:
        if cls is named:
            return None
        for name in vars(cls):
            known = hasattr(adapter.implementation, name) or hasattr(super(cls, module), name)
            if known and (name == "forward" or not hasattr(nn.Module, name)):
                return f"its class {cls.__name__} has a {name} of its own"
    return None


def inner_hooks(module: nn.Module) -> str | None:
    """Return the reason if an inner layer has hooks, which would not be called, or None."""
    for name, part in module.named_modules():
        hooks = (v for k, v in vars(part).items() if k.endswith("_hooks") and "state_dict" not in k)
        if part is not module and any(hooks):
            return f"its {name} has hooks"
    return None


# ---- attributes and globals that its own code reads ----------------------------------------------


def words(code: CodeType) -> set[str]:
    """Return the names, including attributes, and the strings that code uses."""
    inner = [words(x) for x in code.co_consts if isinstance(x, CodeType)]
    strings = {x for x in code.co_consts if isinstance(x, str)}
    return strings.union(code.co_names, *inner)


def methods_of(cls: type) -> dict[str, list[FunctionType]]:
    """Return the methods of a class and of its bases, without those of ``nn.Module``.

    For a decorated method the list also has the method that it wraps.
    """
    found: dict[str, list[FunctionType]] = {}
    for base in cls.__mro__:
        for name, method in () if issubclass(nn.Module, base) else vars(base).items():
            while isinstance(method, FunctionType):
                found.setdefault(name, []).append(method)
                method = vars(method).get("__wrapped__")
    return found


READS, WRITES = ("LOAD_ATTR", "LOAD_METHOD"), ("STORE_ATTR",)


def of_self(function: FunctionType, operations: tuple[str, ...] = READS) -> set[str]:
    """Return the attributes of its first argument that a function reads, or writes."""
    code, found, is_self = function.__code__, set(), False
    for step in dis.get_instructions(code):
        if is_self and step.opname in operations:
            found.add(step.argval)
        loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        is_self = step.opname.startswith("LOAD_") and loaded[-1:] == code.co_varnames[:1] != ()
    return found


def loaded(code: CodeType) -> set[str]:
    """Return the names and strings in code, but not attributes that it only writes."""
    inner = [loaded(x) for x in code.co_consts if isinstance(x, CodeType)]
    values = [x.argval for x in dis.get_instructions(code) if x.opname not in WRITES]
    return {x for x in values if isinstance(x, str)}.union(*inner)


def read_by_name(code: CodeType) -> set[str]:
    """Return the strings in code that looks up attributes by name."""
    inner = [read_by_name(x) for x in code.co_consts if isinstance(x, CodeType)]
    strings = {x for x in code.co_consts if isinstance(x, str) and x.isidentifier()}
    return (strings if BY_NAME.intersection(code.co_names) else set()).union(*inner)


def is_ready_made(x: Any, project: str) -> bool:
    """Return whether x is code of Python or an installed package, which a project does not modify.

    Instances of classes from there, such as a tensor, command-line options, a layer or a
    ``functools.partial``, can be modified, and the result is False for them.
    """
    if not isinstance(x, (type, FunctionType, BuiltinFunctionType, ModuleType)):
        return False
    name = x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", None) or ""
    package = name.partition(".")[0]
    if package == project:
        return False
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package in sys.stdlib_module_names or "site-packages" in file or "dist-packages" in file


def bound_to(function: FunctionType) -> dict[str, Any]:
    """Return a function's closure variables and its defaults, except numbers and tuples, by name.

    A variable without a value is represented by its cell.
    """
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    cells.pop("__class__", None)  # of ``super()``
    found: dict[str, Any] = dict(cells)
    for name, cell in cells.items():
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    for p in inspect.signature(function, follow_wrapped=False).parameters.values():
        if p.default is not p.empty and not isinstance(p.default, (int, float, tuple)):
            found[p.name] = p.default
    return found


def used_by(
    names: Iterable[str], methods: dict[str, list[FunctionType]]
) -> tuple[set[FunctionType], set[str], set[str]]:
    """Return these methods and all that they call, the names they use, and the globals they read.

    Globals include closure variables and the defaults of arguments; for modules and classes, those
    of their attributes that are neither functions nor classes.
    """
    found: set[str] = set()
    read: set[str] = set()
    todo = [f for name in names for f in methods.get(name, ())]
    seen: set[FunctionType] = set()
    while todo:
        function = todo.pop()
        if function in seen:
            continue
        seen.add(function)
        home = str(function.__globals__.get("__name__"))
        project = str(function.__module__).partition(".")[0]
        if is_ready_made(sys.modules.get(home), project):  # a decorator of another package
            read.add(function.__code__.co_name)
            continue
        used, bound = words(function.__code__), bound_to(function)
        found |= used
        todo += [f for name in used for f in methods.get(name, ())]
        used |= bound.keys()
        places = [("", {**function.__globals__, **bound})]
        while places:
            path, names_here = places.pop()
            for name in used & names_here.keys():
                x = names_here[name]
                if is_ready_made(x, project):
                    continue
                if isinstance(x, FunctionType):
                    todo.append(x)
                elif isinstance(x, (ModuleType, type)):
                    places += [] if path else [(f"{name}.", vars(x))]
                elif not isinstance(x, FIXED):
                    read.add(path + name)
    return seen, found, read


def integers(cls: type) -> list[int]:
    """Return the integers in the code of a class and of its callees, which are likely word ids."""
    methods = methods_of(cls)
    todo: list[Any] = []
    for function in used_by(methods, methods)[0]:
        shared, code = function.__globals__, function.__code__
        todo += [code, function.__defaults__, tuple((function.__kwdefaults__ or {}).values())]
        todo += [shared[name] for name in words(code) & shared.keys()]
    found = set()
    for x in todo:
        if isinstance(x, CodeType):
            todo += x.co_consts
            todo += [s.argval for s in dis.get_instructions(x) if s.opname == "LOAD_SMALL_INT"]
        elif isinstance(x, (tuple, frozenset)):
            todo += x
        elif type(x) in (int, float) and x % 1 == 0:
            found.add(int(x))
    return sorted(found)


def unsupported_attributes(module: nn.Module, adapter: Adapter) -> str | None:
    """Return the reason if a copied class uses attributes that its replacement does not, or None.

    The example may not reveal the effect of an attribute, such as a temperature that is still 1.
    """
    if adapter.is_original(module):
        return None
    own, ours = methods_of(type(module)), methods_of(adapter.implementation)
    parameters = (*adapter.parameters, *adapter.optional)
    known = {*(name.partition(".")[0] for name in parameters), *adapter.known_attributes}
    served = list(chain(*ours.values()))
    module_globals = {id(x): x for f in served for x in f.__globals__.values()}.values()
    helpers = [f for f in module_globals if isinstance(f, FunctionType)]
    served += [f for f in helpers if f.__code__.co_varnames[:1] == ("self",)]
    known = known.union(*(of_self(f) for f in served))
    replaced = own.keys() & ours.keys()
    runs = known - replaced  # its own methods that the replacement calls
    code, read, shared = used_by(replaced, {name: own[name] for name in own.keys() - runs})
    state = {*vars(module), *module._buffers, *module._parameters, *module._modules} - INTERNAL
    for cls in type(module).__mro__:
        if not issubclass(nn.Module, cls):
            state.update(k for k in vars(cls) if k not in own and k[:2] != "__")
    plain = {
        name  # ReLU, Softmax: without state
        for name, part in module.named_children()
        if type(part).__module__ == "torch.nn.modules.activation"
    }
    methods = code.intersection(chain(*own.values()))
    named = set().union(*(of_self(f) for f in methods), *(read_by_name(f.__code__) for f in code))
    state |= {name for name in named if not hasattr(module, name)}  # set later
    written = set().union(*(of_self(f, WRITES) for f in methods))
    only_written = {x for x in written if not hasattr(type(module), x)}  # a property's setter reads
    only_written = only_written.difference(*(loaded(f.__code__) for f in code))
    unknown = sorted(read & (state | HIDDEN) - known - plain - only_written)
    unknown += sorted(x for x in shared if x.partition(".")[0] not in known)
    if unknown:
        return f"its own code reads {', '.join(unknown)}, which its replacement does not"
    lost = sorted(
        written.difference(adapter.known_attributes, *(of_self(f, WRITES) for f in served))
    )
    if lost:
        return f"its own code writes {', '.join(lost)}, which its replacement does not"
    return None
