"""What the integrations' tests share: real packages, without what they never call; comparisons."""

from __future__ import annotations

import copy
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

import attnfast
from attnfast.decoding.deferred import DeferredKeyGradients
from attnfast.integrations import fused_decoders
from attnfast.integrations.adapter import ProbeInputs
from attnfast.integrations.probe import run as outcome
from attnfast.integrations.probe import state_of, tensors


class _Unused(types.ModuleType):
    """Stands for a package that is imported and never called: all its names are empty classes."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda *_, **__: None, "__call__": lambda _, x=None: x})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for packages and for all that is in them."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if any(name == n or name.startswith(f"{n}.") for n in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Unused(spec.name)

    def exec_module(self, module):
        pass


@contextmanager
def _stand_ins(names):
    finder = _Finder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n, m in sys.modules.items() if isinstance(m, _Unused)]:
            del sys.modules[name]


def real(name: str, *unused: str):
    """Import a module of a real package; ``unused`` are packages that its attention never calls.

    Skips the file where the package is not installed.
    """
    with _stand_ins(unused), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except (ImportError, OSError) as error:
            pytest.skip(f"{error}: `make integrations` installs it", allow_module_level=True)


def alone(name: str, *unused: str):
    """Import a module of a real package without running the packages that it is in."""
    parents = ["."] + name.split(".")[:-1]
    found = importlib.util.find_spec(parents[1])
    if found is None:
        pytest.skip(
            f"no module {parents[1]}: `make integrations` installs it", allow_module_level=True
        )
    folder, bare = Path(found.submodule_search_locations[0]).parent, []
    for depth in range(2, len(parents) + 1):
        module = types.ModuleType(".".join(parents[1:depth]))
        module.__path__ = [str(folder.joinpath(*parents[1:depth]))]
        bare.append(module)
    with mock.patch.dict(sys.modules, {m.__name__: m for m in bare}):
        return real(name, *unused)


def _is_close(x, y, tolerance):
    """Return whether two tensors are alike, in a thousandth of the time of assert_close."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return torch.equal(x, y) or (x.is_floating_point() and torch.allclose(x, y, **tolerance))


def serve(module):
    """Replace a module that ``replace`` has compared in another test; return the report."""
    with mock.patch("attnfast.integrations.replace.judge", return_value=(None, [])):
        return attnfast.replace(module)


def compare(module, run, dtypes=(torch.float64, torch.float32), training=(False, True)):
    """Compare ``run(module, draw)`` before and after: results, state and gradients of all.

    In the first dtype ``replace`` compares it, too; the second is compared in training alone.
    """
    name = type(module).__qualname__
    for number, dtype in enumerate(dtypes):
        replaced = copy.deepcopy(module).to(dtype)
        report = serve(replaced) if number else attnfast.replace(replaced)
        assert report.replaced[:1] == report.found[:1] and not report.skipped, f"{name}: {report}"
        for train in training[-1:] if number else training:
            plain = copy.deepcopy(module).to(dtype).train(train)
            served = copy.deepcopy(replaced).train(train)
            torch.manual_seed(0)
            want = outcome(plain, run, ProbeInputs(dtype, torch.device("cpu")))
            torch.manual_seed(0)
            got = outcome(served, run, ProbeInputs(dtype, torch.device("cpu")))
            tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {}
            if dtype == torch.float32:
                tolerance = {"rtol": 1e-4, "atol": 1e-5}
            assert got[1].keys() == want[1].keys(), f"{name}: other attributes"
            got, want = ([x for part in parts for x in part.values()] for parts in (got, want))
            for x, y in zip(got, want, strict=True):
                if isinstance(x, torch.Tensor):
                    assert y is not None, f"{name}: a gradient is missing"
                    if not _is_close(x, y, tolerance):
                        torch.testing.assert_close(x, y, **tolerance)
                else:
                    assert x == y, f"{name}: {x} in the place of {y}"
        if dtype == torch.float32:
            same_types_under_autocast(module, replaced, run)
        report.undo()
        assert type(replaced) is type(module)


def same_types_under_autocast(plain, served, run):
    """Compare the types of results and state of ``run(module, draw)`` under autocast."""
    types = []
    for module in (plain, served):
        twin = copy.deepcopy(module).float().eval()
        with torch.autocast("cpu", torch.bfloat16):
            results = tensors(list(run(twin, ProbeInputs(torch.float32, torch.device("cpu")))))
            types.append([x.dtype for x in (*results, *tensors(state_of(twin)))])
    assert types[0] == types[1], type(plain).__qualname__


def preparations(module, run):
    """Return how often the served module prepares a memory, or its filters, in ``run``."""
    served = copy.deepcopy(module).float().train()
    assert attnfast.replace(served).replaced
    with mock.patch.object(
        DeferredKeyGradients, "apply", wraps=DeferredKeyGradients.apply
    ) as apply:
        list(run(served, ProbeInputs(torch.float32, torch.device("cpu"))))
    return apply.call_count


def operators(decoder, use):
    """Return how often ``use`` runs a whole target in one operator."""
    with mock.patch.object(fused_decoders, "run_layer", wraps=fused_decoders.run_layer) as run:
        list(use(decoder, ProbeInputs(torch.float32, torch.device("cpu"))))
    return run.call_count


def same_after_training(plain, use, steps=3):
    """Compare the losses of several steps of training, and parameters after them."""
    outcomes = []
    served = copy.deepcopy(plain)
    assert serve(served).replaced[0].module is served
    for model in (plain, served):
        optimiser, losses = torch.optim.SGD(model.parameters(), 1e-2, 0.9), []
        for seed in range(steps):
            draw = ProbeInputs(torch.float32, torch.device("cpu"), seed=seed)
            torch.manual_seed(seed)
            results = [x for x in tensors(use(model, draw)) if x.requires_grad]
            loss = sum(x.square().sum() for x in results)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
        outcomes.append([*losses, *model.parameters()])
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def same_training_step(plain, served, run):
    """Compare results of ``run(model)`` and all gradients of one step of training."""
    outcomes = []
    for model in (plain, served):
        torch.manual_seed(0)
        results = list(tensors(run(model)))
        loss = sum((x * torch.randn_like(x)).sum() for x in results if x.requires_grad)
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        outcomes.append((results, [g for g in grads if g is not None]))
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def greedy_tokens(model, source, lengths, words, steps=12):
    """Decode greedily with ``model.start(source, lengths)`` and ``model.step(words, memory)``."""
    with torch.no_grad():
        memory = model.start(source, lengths)
        for _ in range(steps):
            words = torch.cat([words, model.step(words[:, -1:], memory)[0].argmax(-1)], 1)
    return words


__all__ = [
    "ProbeInputs",
    "alone",
    "compare",
    "greedy_tokens",
    "operators",
    "preparations",
    "real",
    "same_after_training",
    "same_training_step",
]


def vendored(module):
    """Return the module with its class's file executed again under another name, as in a copy."""
    cls = type(module)
    own = sys.modules[cls.__module__]
    copied = types.ModuleType(f"vendored_{own.__name__.replace('.', '_')}")
    copied.__package__, copied.__file__ = own.__package__, own.__file__  # for relative imports
    sys.modules[copied.__name__] = copied
    source = Path(own.__file__).read_text()
    exec(compile(source, own.__file__, "exec"), vars(copied))
    module.__class__ = getattr(copied, cls.__name__)
    return module
