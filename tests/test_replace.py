"""attnfast.replace: the mechanism, on a class of the tests' own; projects' are in integrations."""

from __future__ import annotations

import collections
import copy
import functools
import io
import pickle
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from integrations.doubles import (
    AdditiveAttention,
    AttentionLayer,
    Attn,
    CaptionAttention,
    GNMTAttention,
    Plain,
    bentrevett,
)
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import prune

import attnfast
from attnfast.integrations import ADAPTERS, Adapter, attend, keep_in_graph, project
from attnfast.integrations.cache import PLACE, Seen
from attnfast.integrations.patch import adapter_serving
from attnfast.integrations.probe import tensors
from attnfast.memory import prepare

PARAMETERS = ["query.weight", "query.bias", "key.weight", "energy.weight", "energy.bias"]


class Served:
    """The methods of Plain's replacement."""

    def forward(self, state, memory, mask=None):
        key = project(self, "key", self.key, memory)
        context, self.last = attend(
            self, self.query(state), key, memory, self.energy.weight, mask=mask
        )
        return keep_in_graph(context, self.energy.bias), self.last


class Wrong(Served):
    """Forgets the mask."""

    def forward(self, state, memory, mask=None):
        return super().forward(state, memory)


class WrongLater(Served):
    """Right at the first step only."""

    def forward(self, state, memory, mask=None):
        again, self.again = getattr(self, "again", 0), getattr(self, "again", 0) + 1
        return super().forward(state * (1 + 1e-3 * again), memory, mask)


def example(module, draw):
    for lengths in draw.sources((4, 2)):
        B, Tk = len(lengths), max(lengths)
        memory = draw(B, Tk, module.key.in_features)
        for _ in range(3):
            yield module(draw(B, module.query.in_features), memory, mask=draw.seen(lengths, Tk))


def register(methods=Served, **more):
    terms = {"classes": ["Plain"], "parameters": PARAMETERS, "example": example, "name": "plain"}
    attnfast.register_adapter(Adapter(methods=methods, **{**terms, **more}))


@pytest.fixture(autouse=True)
def adapters():
    with mock.patch.dict(ADAPTERS):
        register()
        yield


def model(n=1):
    torch.manual_seed(0)
    return nn.ModuleDict({f"a{i}": Plain() for i in range(n)})


def inputs(B=2, Tk=4, steps=3):
    torch.manual_seed(1)
    memory = torch.randn(B, Tk, 6, requires_grad=True)
    mask = torch.arange(Tk) < torch.tensor([Tk, Tk - 2] * (B // 2)).unsqueeze(1)
    return [torch.randn(B, 6, requires_grad=True) for _ in range(steps)], memory, mask


def run(attention, states, memory, mask):
    """All outputs and gradients of a recurrent loop."""
    context, outputs = 0, []
    for state in states:
        context, weights = attention(state + context, memory, mask)
        outputs += [context, weights]
    loss = sum((x.sin() * (i + 1)).sum() for i, x in enumerate(outputs))
    leaves = [*states, memory, *attention.parameters()]
    return outputs, torch.autograd.grad(loss, leaves, allow_unused=True)


def same(got, want):
    for a, b in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def projections(attention):
    """Count the calls of the key's projection."""
    calls = []
    attention.key.register_forward_hook(lambda *_: calls.append(1))
    return calls


def test_same_numbers_in_place():
    m = model()
    args, plain = inputs(), copy.deepcopy(m)
    report = attnfast.replace(m)
    assert [x.path for x in report.replaced] == ["a0"] and not report.left
    same(run(m["a0"], *args), run(plain["a0"], *args))
    assert type(m["a0"]).forward is Served.forward
    assert isinstance(m["a0"], Plain) and repr(m) == repr(plain)
    assert m.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(m["a0"].last, run(plain["a0"], *args)[0][-1])
    report.undo()
    assert type(m["a0"]) is Plain and PLACE not in vars(m["a0"])
    assert "a0: Plain left alone: its replacement was undone" in str(report)


def test_hooks_fire_and_parameters_stay():
    m = model()["a0"]
    before, calls = list(m.parameters()), []
    m.register_forward_hook(lambda *_: calls.append("after"))
    m.register_forward_pre_hook(lambda *_: calls.append("before"))
    attnfast.replace(m)
    assert not calls  # the probe ran on copies
    states, memory, mask = inputs(steps=1)
    m(states[0], memory, mask)
    assert calls == ["before", "after"]
    assert all(a is b for a, b in zip(before, m.parameters(), strict=True))


def test_the_probe_leaves_no_trace():
    m = model()["a0"]
    states, memory, mask = inputs()
    run(m, states, memory, mask)  # its state has a history now
    last, random, grads = m.last, torch.get_rng_state(), [p.grad for p in m.parameters()]
    attnfast.replace(m)
    assert m.last is last and torch.equal(random, torch.get_rng_state())
    assert [p.grad for p in m.parameters()] == grads and m.training


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_served_too(way):
    m = model()
    attnfast.replace(m)
    args = inputs()
    want = run(m["a0"], *args)
    if way == "deepcopy":
        with torch.no_grad():
            m["a0"](args[0][0], *args[1:])
        twin = copy.deepcopy(m)
    elif way == "pickle":
        m["a0"].last = None
        twin = pickle.loads(pickle.dumps(m))
    else:
        m["a0"].last = None
        file = io.BytesIO()
        torch.save(m, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert adapter_serving(twin["a0"]) is ADAPTERS["plain"] and type(twin["a0"]) is type(m["a0"])
    same(run(twin["a0"], *args), want)


def test_a_pickle_of_an_unknown_adapter():
    m = model()
    attnfast.replace(m)
    data = pickle.dumps(m)
    del ADAPTERS["plain"]
    with pytest.raises(RuntimeError, match="replaced as plain: register that adapter first"):
        pickle.loads(data)


def remade(made, args):
    return made(*args)


class ByReduce(Plain):
    def __reduce__(self):
        return type(self), (6,), vars(self)


class ByKeyword(Plain):
    def __reduce__(self):
        return functools.partial(type(self), features=5), (), vars(self)


class ByMethod(Plain):
    @classmethod
    def made(cls, dim):
        return cls(dim)

    def __reduce__(self):
        return self.made, (6,), vars(self)


class ByReduceEx(Plain):
    def __reduce_ex__(self, protocol):
        made, args, *rest = super().__reduce_ex__(protocol)
        return (remade, (made, args), *rest)


class ByState(Plain):
    def __getstate__(self):
        return {**vars(self), "version": 2}

    def __setstate__(self, state):
        assert state.pop("version") == 2
        super().__setstate__(state)


class ByCopies(Plain):
    def __copy__(self):
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo):
        twin = type(self).__new__(type(self))
        vars(twin).update({k: copy.deepcopy(v, memo) for k, v in vars(self).items()})
        return twin


class ByName(Plain):
    def __deepcopy__(self, memo):
        twin = ByName()
        twin.load_state_dict(self.state_dict())
        return twin


def saved(m):
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
    **{f"pickle {n}": lambda m, n=n: pickle.loads(pickle.dumps(m, n)) for n in (0, 2, 5)},
}
OWN = [ByReduce, ByKeyword, ByMethod, ByReduceEx, ByState, ByCopies, ByName]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", [Plain, *OWN])
def test_what_the_own_class_says_of_its_copies(cls, way):
    m = cls()
    attnfast.replace(m, strict=True)
    served, (states, memory, mask) = type(m), inputs()
    context, _ = m(states[0], memory, mask)
    m.last, kept = None, vars(m)[PLACE]
    twin = WAYS[way](m)
    assert type(twin) is served is type(m) and twin is not m
    assert vars(m)[PLACE] is kept and PLACE not in vars(twin)
    torch.testing.assert_close(twin(states[0], memory, mask)[0], context)


class Watched(Plain):
    """Lets another thread look while it says what is copied."""

    meeting = threading.Barrier(1)

    def __getstate__(self):
        for _ in range(2):
            self.meeting.wait()
        return vars(self).copy()


@pytest.mark.parametrize("way", WAYS)
def test_a_call_while_another_thread_copies(way, monkeypatch):
    """The class of a module that is copied is at no time another."""
    m = Watched()
    attnfast.replace(m, strict=True)
    served, (states, memory, mask) = type(m), inputs()
    monkeypatch.setattr(Watched, "meeting", threading.Barrier(2, timeout=60))
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        want = m(states[0], memory, mask)
        for _ in range(3):
            twin = pool.submit(WAYS[way], m)
            m.meeting.wait()
            seen, got = type(m), m(states[0], memory, mask)
            m.meeting.wait()
            assert seen is served is type(twin.result())
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("methods", [Wrong, WrongLater])
def test_what_differs_is_left_alone(methods):
    register(methods)
    m = model(2)
    report = attnfast.replace(m)
    assert not report.replaced and all("differ" in x.left for x in report.left)
    assert type(m["a0"]) is Plain
    assert "a0: Plain left alone: " in str(report)
    with pytest.raises(RuntimeError, match=r"a0: Plain left alone: .*differ.*; a1: Plain"):
        attnfast.replace(m, strict=True)


def test_a_missing_gradient_is_a_difference():
    class Untouched(Served):
        def forward(self, state, memory, mask=None):
            key = project(self, "key", self.key, memory)
            return attend(self, self.query(state), key, memory, self.energy.weight, mask=mask)

    register(Untouched)
    report = attnfast.replace(model())
    assert not report.replaced


def test_other_parameters_are_not_known():
    m = model()
    m["a0"].gate = nn.Linear(2, 2)
    assert not attnfast.replace(m).found
    m["a0"].__class__ = type("MyAttention", (Plain,), {})
    assert "not known" in str(attnfast.replace(m))


def test_subclasses_that_compute_something_else_are_left_alone():
    class Plain2(Plain):
        def forward(self, state, memory, mask=None):
            return super().forward(state * 2, memory, mask)

    report = attnfast.replace(nn.ModuleList([Plain2(), Plain()]))
    assert [x.path for x in report.left] == ["0"] and [x.path for x in report.replaced] == ["1"]


def test_arguments_that_a_replacement_does_not_take():
    class Sharper(Plain):
        def forward(self, state, memory, sharpness, mask=None):
            return super().forward(state * sharpness, memory, mask)

    class Wider(Plain):
        def forward(self, *inputs, **more):
            return super().forward(*inputs, **more)

    reports = [str(attnfast.replace(cls())) for cls in (Sharper, Wider)]
    what = "left alone: its own forward takes {}, which its replacement does not"
    assert what.format("sharpness") in reports[0]
    assert what.format("inputs, more") in reports[1]

    class Any(Served):
        def forward(self, *inputs, **more):
            return super().forward(*inputs, **more)

    register(Any)
    assert attnfast.replace(Plain()).replaced


def as_plain(cls):
    """Let a class be known as Plain, as a copy is."""
    cls.__qualname__ = "Plain"
    return cls


def test_an_optional_argument_that_is_new_goes_to_the_own_class():
    @as_plain
    class Tempered(Plain):
        def forward(self, state, memory, heat=None, mask=None):
            scores = self.energy(torch.tanh(self.query(state).unsqueeze(1) + self.key(memory)))
            scores = scores.squeeze(2) / (1 if heat is None else heat)
            self.last = scores.masked_fill(~mask, -1e9).softmax(1)
            return (self.last.unsqueeze(1) @ memory).squeeze(1), self.last

    plain = Tempered()
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    calls = projections(served)
    (state, *_), memory, mask = inputs()
    for more in ({"mask": mask}, {"heat": 3.0, "mask": mask}, {"heat": None, "mask": mask}):
        torch.testing.assert_close(served(state, memory, **more), plain(state, memory, **more))
    torch.testing.assert_close(served(state, memory, 3.0, mask), plain(state, memory, 3.0, mask))
    torch.testing.assert_close(served(state, memory, None, mask), plain(state, memory, None, mask))
    assert len(calls) == 3  # of its own twice, of its replacement once


# ---- copies that do something else, which a short example would not show -------------------------


@as_plain
class Clamped(Plain):
    def scores(self, state, memory):
        features = torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))
        return self.energy(features).squeeze(2).clamp(-5, 5)

    def forward(self, state, memory, mask=None):
        self.last = self.scores(state, memory).masked_fill(~mask, -1e9).softmax(1)
        return (self.last.unsqueeze(1) @ memory).squeeze(1), self.last


@as_plain
class Windowed(Clamped):
    """Only the first words of a long source."""

    def scores(self, state, memory):
        features = torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))
        far = torch.arange(memory.shape[1]) >= 500
        return self.energy(features).squeeze(2).masked_fill(far, -1e9)


@as_plain
class Heated(Clamped):
    temperature = 1.0

    def scores(self, state, memory):
        features = torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))
        return self.energy(features).squeeze(2) / self.temperature


@as_plain
class HeatedInstance(Clamped):
    def __init__(self):
        super().__init__()
        self.heat = 1.0

    def scores(self, state, memory):
        features = torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))
        return self.energy(features).squeeze(2) / self.__dict__["heat"]


@as_plain
class Padded(Clamped):
    """Finds padding where the states are 0, as pad_packed_sequence leaves them."""

    def scores(self, state, memory):
        features = torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))
        scores = self.energy(features).squeeze(2)
        return scores.masked_fill((memory == 0).all(-1), -1e10)


@as_plain
class ByHand(Clamped):
    """A softmax that divides by a little more."""

    def forward(self, state, memory, mask=None):
        features = torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))
        e = self.energy(features).squeeze(2).exp() * mask
        self.last = e / (e.sum(1, keepdim=True) + 1e-12)
        return (self.last.unsqueeze(1) @ memory).squeeze(1), self.last


@as_plain
class Linear(Clamped):
    """Without the tanh, and so small that it hardly shows."""

    def __init__(self):
        super().__init__()
        for p in self.parameters():
            torch.nn.init.constant_(p, 1e-9)

    def scores(self, state, memory):
        return self.energy(self.query(state).unsqueeze(1) + self.key(memory)).squeeze(2)


Result = collections.namedtuple("Result", ["context", "weights"])


@as_plain
class Named(Plain):
    def forward(self, state, memory, mask=None):
        return Result(*super().forward(state, memory, mask))


@as_plain
class More(Plain):
    def forward(self, state, memory, mask=None):
        return *super().forward(state, memory, mask), None


class Settings:
    temperature = 1.0


def heated_by(module, scores):
    return scores / module.warmth


@as_plain
class HeatedElsewhere(Clamped):
    def scores(self, state, memory):
        features = torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))
        return self.energy(features).squeeze(2) / Settings.temperature


@as_plain
class HeatedByHelper(Clamped):
    def __init__(self):
        super().__init__()
        self.warmth = 1.0

    def scores(self, state, memory):
        features = torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))
        return heated_by(self, self.energy(features).squeeze(2))


@as_plain
class HeatedByWeight(Clamped):
    """A name that parameters have, too."""

    def __init__(self):
        super().__init__()
        self.weight = 1.0

    def scores(self, state, memory):
        features = torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))
        return self.energy(features).squeeze(2) / self.weight


class Counting(Plain):
    """Known by its own name; counts where its replacement does not."""

    def __init__(self, how):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.list, self.number, self.how = [], 0, how

    def forward(self, state, memory, mask=None):
        if self.how == "buffer":
            self.calls += 1
        elif self.how == "list":
            self.list.append("a call")
        else:
            self.number += 1
        return Plain.forward(self, state, memory, mask)


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (Clamped, "results differ"),
        (Windowed, "results differ"),
        (Heated, "its own code reads temperature, which"),
        (HeatedInstance, "its own code reads heat, which"),
        (HeatedElsewhere, "its own code reads Settings.temperature, which"),
        (HeatedByHelper, "its own code reads warmth, which"),
        (HeatedByWeight, "its own code reads weight, which"),
        (Padded, "results differ"),
        (ByHand, "results differ"),
        (Linear, "results differ"),
        (Named, "results differ by being a tuple of 2 instead of a Result of 2"),
        (More, "results differ by being a tuple of 2 instead of a tuple of 3"),
    ],
)
def test_copies_that_compute_something_else_are_left_alone(cls, why):
    assert why in str(attnfast.replace(cls()))


@pytest.mark.parametrize(("how", "what"), [("buffer", "calls"), ("list", "list"), ("", "number")])
def test_what_a_copy_counts_is_compared(how, what):
    register(classes=[f"{Counting.__module__}.Counting"])
    report = str(attnfast.replace(Counting(how)))
    assert "left alone: state differ" in report and what in report, report


def test_layers_without_state_may_be_read():
    @as_plain
    class Modular(Clamped):
        def __init__(self):
            super().__init__()
            self.tanh, self.softmax = nn.Tanh(), nn.Softmax(1)

        def scores(self, state, memory):
            features = self.tanh(self.query(state).unsqueeze(1) + self.key(memory))
            return self.energy(features).squeeze(2)

        def forward(self, state, memory, mask=None):
            self.last = self.softmax(self.scores(state, memory).masked_fill(~mask, -1e9))
            return (self.last.unsqueeze(1) @ memory).squeeze(1), self.last

    assert attnfast.replace(Modular()).replaced
    m = Modular()
    m.tanh = nn.Identity()
    assert "its own code reads tanh" in str(attnfast.replace(m))


def test_subclasses_with_methods_of_their_own_are_left_alone():
    """What they do differently need not show on the example."""

    class Logged(Plain):
        def forward(self, state, memory, mask=None):
            return super().forward(state, memory, mask)

    class Kept(Plain):
        """Has more, but nothing else."""

        dropout = 0.1

        def more(self):
            return self.last

        def extra_repr(self):
            return "more"

    report = attnfast.replace(nn.ModuleList([Logged(), Kept()]))
    assert [x.path for x in report.replaced] == ["1"]
    assert "0: Logged left alone: its class Logged has a forward of its own" in str(report)


def test_layers_with_hooks_are_left_to_the_project():
    m = model()["a0"]
    m.energy.register_forward_hook(lambda module, args, output: 3 * output)
    assert "left alone: its energy has hooks" in str(attnfast.replace(m))


def test_why_not_and_a_failing_example():
    register(why_not=lambda module: "it is a Tuesday")
    assert "it is a Tuesday" in str(attnfast.replace(model()))

    def fails(module, draw):
        yield module(draw(1))

    register(example=fails)
    assert "its own class fails on an example: TypeError" in str(attnfast.replace(model()))


def test_what_cannot_be_copied_is_left_alone():
    class Single(Plain):
        def __deepcopy__(self, memo):
            raise RuntimeError("there is only one")

    assert "RuntimeError: there is only one" in str(attnfast.replace(Single()))


def test_twice_and_nothing():
    m = model()
    attnfast.replace(m)
    report = attnfast.replace(m)
    assert "served already" in str(report) and not report.replaced
    assert str(attnfast.replace(nn.Linear(2, 2))) == "no attention that is known"
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got int"):
        attnfast.replace(3)


def test_what_is_no_adapter():
    with pytest.raises(TypeError, match="methods must be a class, got 3"):
        register(3)
    for names in ("a", 3, [3], iter("a")):
        with pytest.raises(TypeError, match="parameters must be a list of names, got "):
            register(parameters=names)
    with pytest.raises(TypeError, match=r"adapter must be an attnfast.integrations.Adapter, got 3"):
        attnfast.register_adapter(3)


def test_strict_raises_where_nothing_is_known():
    with pytest.raises(RuntimeError, match="Linear has no attention that is known"):
        attnfast.replace(nn.Linear(2, 2), strict=True)
    m = nn.ModuleList([nn.MultiheadAttention(4, 2)])
    with pytest.raises(RuntimeError, match="MultiheadAttention is not known"):
        attnfast.replace(m, strict=True)
    m.append(Plain())
    assert attnfast.replace(m, strict=True).replaced  # what is not known is no reason beside it
    attnfast.replace(m, strict=True)


@pytest.mark.parametrize("name", ["self_attention", "LSA", "attn_layer", "GlobalAttn"])
def test_what_may_be_attention_is_mentioned(name):
    report = str(attnfast.replace(type(name, (nn.Module,), {})()))
    assert f"{name} left alone: its class" in report
    assert f".{name} is not known; attnfast.register_adapter" in report
    assert not attnfast.replace(nn.ModuleList([nn.Flatten(), nn.BatchNorm1d(2)])).found


def test_parameters_that_are_not_known_are_named():
    m = as_plain(type("PlainAttn", (Plain,), {}))()
    m.__class__.__name__ = "PlainAttn"
    m.gate = nn.Linear(2, 2)
    del m.query
    report = str(attnfast.replace(m))
    assert "unlike plain it has gate.bias, gate.weight and it lacks query.bias, query.w" in report


def test_examples_that_yield_nothing():
    register(example=lambda module, draw: [])
    report = str(attnfast.replace(Plain()))
    assert report.endswith("fails on an example: ValueError: the example yields no tensor")
    register(example=lambda module, draw: [draw(2, grad=False)])
    assert attnfast.replace(Plain()).replaced  # nothing has a gradient, on both sides


@as_plain
class Placeless(Plain):
    """Makes tensors on the default device."""

    def forward(self, state, memory, mask=None):
        return super().forward(state + torch.zeros(6), memory, mask)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_another_default_device(device):
    before = torch.get_default_device()
    torch.set_default_device(device)
    try:
        with torch.device("cpu"):
            m = Plain()
        report = attnfast.replace(m, strict=True)
        assert "served by cpu" in str(report)
        m.__class__ = Placeless
        assert attnfast.replace(m, strict=True).replaced
    finally:
        torch.set_default_device(before)
    with torch.device("meta"):
        report = attnfast.replace(Plain())
    assert "its parameters are on the meta device" in str(report)


def test_one_thread_compares():
    threads = []

    def watch(module, draw):
        threads.append(torch.get_num_threads())
        yield from example(module, draw)

    register(example=watch)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        attnfast.replace(Plain())
        assert set(threads) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_strict_changes_nothing_before_it_raises():
    m = nn.ModuleList([Plain(), Plain()])
    register(why_not=lambda module: "the second" if module is m[1] else None)
    with pytest.raises(RuntimeError, match="1: Plain left alone: the second"):
        attnfast.replace(m, strict=True)
    assert type(m[0]) is Plain


# ---- keys are projected once per source, and never stale -----------------------------------------


def test_keys_are_projected_once_per_source():
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    calls = projections(m)
    for _ in range(2):
        states, memory, mask = inputs(steps=4)
        same(run(m, states, memory, mask), run(plain, states, memory, mask))
    assert len(calls) == 2


def test_after_an_optimiser_step():
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    states, memory, mask = inputs()
    for attention in (m, plain):
        optimiser = torch.optim.SGD(attention.parameters(), 0.5)
        for _ in range(2):
            optimiser.zero_grad()
            sum(attention(s, memory, mask)[0].sum() for s in states).backward()
            optimiser.step()
    with torch.no_grad():
        for s in states:
            torch.testing.assert_close(m(s, memory, mask), plain(s, memory, mask))


def test_a_step_between_two_calls_without_gradients():
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    states, memory, mask = inputs()
    with torch.no_grad():
        for change in (m.key.weight, m.energy.weight, memory):
            m(states[0], memory, mask)
            change.mul_(1.5)
            if change is not memory:
                dict(plain.named_parameters())[
                    next(k for k, p in m.named_parameters() if p is change)
                ].mul_(1.5)
            torch.testing.assert_close(m(states[1], memory, mask), plain(states[1], memory, mask))


def averages(m):
    return {k: 0.5 * p.detach() + 0.1 * torch.randn_like(p) for k, p in m.named_parameters()}


def copy_through_data(m, new):
    for k, p in m.named_parameters():
        p.data.copy_(new[k])


def mix_through_data(m, new):
    for k, p in m.named_parameters():
        p.data.mul_(0.5).add_(new[k], alpha=0.5)


def assign_data(m, new):
    for k, p in m.named_parameters():
        p.data = new[k].clone()


def from_a_vector(m, new):
    vector = torch.cat([new[k].flatten() for k, _ in m.named_parameters()])
    nn.utils.vector_to_parameters(vector, m.parameters())


def load(m, new):
    m.load_state_dict({**m.state_dict(), **new})


def load_assigned(m, new):
    m.load_state_dict({**m.state_dict(), **new}, assign=True)


CHANGES = [copy_through_data, mix_through_data, assign_data, from_a_vector, load, load_assigned]
OF_ONE_SOURCE = {
    "plain": (Plain, lambda m, q, h: m(q, h)),
    "gnmt": (lambda: GNMTAttention(6, 6, 5, True, True), lambda m, q, h: m(q, h)),
    "bentrevett": (lambda: bentrevett("2024", False, 6, 6), lambda m, q, h: m(q, h)),
    "allennlp": (lambda: AdditiveAttention(6, 6), lambda m, q, h: m(q, h)),
    "sgrvinod": (lambda: CaptionAttention(6, 6, 5), lambda m, q, h: m(h, q)),
    "chatbot": (lambda: Attn("general", 6), lambda m, q, h: m(q.unsqueeze(0), h)),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", OF_ONE_SOURCE)
def test_averages_that_are_swapped_in_between_two_calls(name, change, grad):
    make, call = OF_ONE_SOURCE[name]
    torch.manual_seed(0)
    plain = make()
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    source, query = torch.randn(3, 3, 6), torch.randn(3, 6)
    with torch.set_grad_enabled(grad):
        for _ in range(4):  # also where what was freed is allocated again
            torch.testing.assert_close(call(served, query, source), call(plain, query, source))
            new = averages(plain)
            for m in (plain, served):
                change(m, new)


def test_averages_of_torch():
    """A served model within a running average, which is updated between two calls."""
    m = model()["a0"]
    attnfast.replace(m)
    averaged = torch.optim.swa_utils.AveragedModel(m)
    plain = Plain()
    states, memory, mask = inputs()
    with torch.no_grad():
        for _ in range(3):
            averaged.update_parameters(m)
            plain.load_state_dict(averaged.module.state_dict())
            torch.testing.assert_close(
                averaged(states[0], memory, mask), plain(states[0], memory, mask)
            )
            for p in m.parameters():
                p.add_(0.5)


def test_training_and_evaluation_end_what_is_kept():
    m = model()["a0"]
    attnfast.replace(m)
    states, memory, mask = inputs()
    with torch.no_grad():
        for change in (m.train, m.eval):
            m(states[0], memory, mask)
            assert vars(m)[PLACE]
            change()
            assert not vars(m).get(PLACE)


def test_backward_twice_over_one_source():
    """The graph of the kept keys is gone after the first."""
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    args = inputs()
    for _ in range(2):
        same(run(m, *args), run(plain, *args))


def test_retained_graph_and_a_loss_for_each_step():
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    states, memory, mask = inputs()
    grads = []
    for attention in (m, plain):
        losses = [attention(s, memory, mask)[0].square().sum() for s in states]
        grads.append(
            [
                torch.autograd.grad(x, [memory, *attention.parameters()], retain_graph=True)
                for x in losses
            ]
        )
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_grad_mode_may_change():
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    args = inputs()
    with torch.no_grad():
        m(args[0][0], *args[1:])
    same(run(m, *args), run(plain, *args))
    with torch.inference_mode():
        torch.testing.assert_close(m(args[0][0], *args[1:]), plain(args[0][0], *args[1:]))
    same(run(m, *args), run(plain, *args))


def test_slices_and_beams():
    """The batch shrinks, and a beam search repeats and reorders sources."""
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    states, memory, mask = inputs(B=4)
    with torch.no_grad():
        for index in ([0, 1, 2, 3], [0, 1, 2], [2, 0], [0, 0, 2, 2, 3, 3], [3, 3, 0, 2, 2, 1]):
            for s in states:
                args = s[index], memory[index], mask[index]
                torch.testing.assert_close(m(*args), plain(*args))
            views = states[0][: len(index)], memory[: len(index)], mask[: len(index)]
            torch.testing.assert_close(m(*views), plain(*views))


@pytest.mark.parametrize("grad", [False, True])
def test_sources_that_come_once_are_not_prepared(grad):
    """A beam search that indexes its source at every step; then one that does not."""
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    states, memory, mask = inputs(B=4, steps=20)
    with (
        torch.set_grad_enabled(grad),
        mock.patch("attnfast.integrations.serve.prepare", wraps=prepare) as made,
    ):
        for s in states:
            args = s, memory[torch.randperm(4)], mask
            torch.testing.assert_close(m(*args), plain(*args))
        assert made.call_count <= 4
        for s in states:
            torch.testing.assert_close(m(s, memory, mask), plain(s, memory, mask))
        assert made.call_count <= 5
        calls = projections(m)
        m(states[0], memory, mask)
        assert not calls


BROADCAST = [(n, r) for n in ("plain", "sgrvinod", "allennlp", "dot") for r in ((3, 1), (1, 3))]


@pytest.mark.parametrize(("name", "rows"), [*BROADCAST, ("fairseq", (3, 1))])
def test_one_source_for_many_queries_and_the_reverse(name, rows):
    """Where the project's own code broadcasts."""
    torch.manual_seed(0)
    B, S = rows
    if name == "fairseq":
        plain, call = AttentionLayer(6, 6, 5), lambda m, q, h: m(q, h.transpose(0, 1), None)
    elif name == "dot":
        plain, call = Attn("dot", 6), lambda m, q, h: m(q.unsqueeze(0), h.transpose(0, 1))
    else:
        make, call = OF_ONE_SOURCE[name]
        plain = make()
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    source = torch.randn(S, 4, 6, requires_grad=True)
    for _ in range(3):
        query = torch.randn(B, 6, requires_grad=True)
        got, want = (
            [x for x in tensors(call(m, query, source)) if x is not None] for m in (served, plain)
        )
        torch.testing.assert_close(got, want)
        weights = [torch.randn_like(x) for x in want]
        grads = [
            torch.autograd.grad(x, [query, source, *m.parameters()], weights, allow_unused=True)
            for x, m in ((got, served), (want, plain))
        ]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    states, memory, mask = inputs()
    grads = []
    for attention in (m, plain):
        losses = [
            torch.utils.checkpoint.checkpoint(
                lambda s, h, a=attention: a(s, h, mask)[0], s, memory, use_reentrant=reentrant
            )
            .square()
            .sum()
            for s in states
        ]
        for p in attention.parameters():
            p.grad = None
        memory.grad = None
        sum(losses).backward()
        grads.append([memory.grad, *(p.grad for p in attention.parameters())])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_autocast():
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    states, memory, mask = inputs()
    m(states[0], memory, mask)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = m(states[0], memory, mask), plain(states[0], memory, mask)
    torch.testing.assert_close(
        [x.float() for x in got], [x.float() for x in want], atol=2e-2, rtol=2e-2
    )
    assert m(states[0], memory, mask)[0].dtype == torch.float32


def test_another_type_under_autocast_is_left_alone():
    class Single(Served):
        def forward(self, state, memory, mask=None):
            context, weights = super().forward(state, memory, mask)
            return context.float() if context.dtype == torch.bfloat16 else context, weights

    register(Single)
    what = "results differ by form: torch.float32 [2, 6] instead of torch.bfloat16 [2, 6]"
    assert what in str(attnfast.replace(Plain()))

    class Double(Plain):
        def forward(self, state, memory, mask=None):
            assert not torch.is_autocast_enabled("cpu"), "not under autocast"
            return super().forward(state, memory, mask)

    register()
    assert attnfast.replace(as_plain(Double)()).replaced  # nothing to compare with


def test_nothing_of_a_source_stays_after_backward():
    m = model()["a0"]
    attnfast.replace(m)
    run(m, *inputs())
    assert not vars(m)[PLACE]


def test_layers_that_are_not_plain_are_called_at_every_step():
    m = model()["a0"]
    m.key = nn.utils.parametrizations.weight_norm(m.key)
    names = [n for n, _ in m.named_parameters()]
    register(parameters=names)
    plain = copy.deepcopy(m)
    assert attnfast.replace(m).replaced
    same(run(m, *inputs()), run(plain, *inputs()))


@torch.no_grad()
def test_a_weight_that_a_hook_computes_is_seen_to_change():
    plain = bentrevett("2024", False, 6, 6)
    served = copy.deepcopy(plain)
    assert attnfast.replace(served).replaced
    state, memory = torch.randn(2, 6), torch.randn(5, 2, 6)
    for m in (served, plain):
        m(state, memory)
        prune.random_unstructured(m.attn_fc, "weight", 0.0)
        m.attn_fc.weight_orig.mul_(2)  # its weight is another after the next call
    torch.testing.assert_close(served(state, memory), plain(state, memory))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler of torch 2.10 and 2.11
def test_compile():
    m = model()["a0"]
    plain = copy.deepcopy(m)
    attnfast.replace(m)
    states, memory, mask = inputs()
    got = torch.compile(m)(states[0], memory, mask)
    torch.testing.assert_close(got, plain(states[0], memory, mask))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compile_in_one_graph_with_the_rectifier():
    plain = CaptionAttention(6, 6, 5)
    m = copy.deepcopy(plain)
    attnfast.replace(m, strict=True)
    source, query = torch.randn(3, 4, 6), torch.randn(3, 6)
    got = torch.compile(m, backend="aot_eager", fullgraph=True)(source, query)
    torch.testing.assert_close(got, plain(source, query))


def test_data_parallel_replicas_use_their_own_parameters():
    m = model()["a0"]
    attnfast.replace(m)
    replica = m._replicate_for_data_parallel()
    with torch.no_grad():
        replica._parameters = {k: p * 2 for k, p in m._parameters.items()}
        for name, layer in m.named_children():
            twin = copy.deepcopy(layer)
            for p in twin.parameters():
                p.mul_(2)
            replica._modules = {**replica._modules, name: twin}
        states, memory, mask = inputs()
        plain = Plain()
        plain.load_state_dict(replica.state_dict())
        torch.testing.assert_close(replica(states[0], memory, mask), plain(states[0], memory, mask))


def test_the_report_says_it_all():
    register(note="nothing else")
    m = nn.ModuleDict({"x": Plain(), "MultiheadAttention": nn.MultiheadAttention(4, 2)})
    text = str(attnfast.replace(m)).splitlines()
    assert text[0].startswith("x: Plain served by ") and text[0].endswith("as plain; nothing else")
    assert text[1].startswith("MultiheadAttention: MultiheadAttention left alone: ")
    assert all(a != b for a, b in pairwise(text))


def test_the_adapter_of_the_docs():
    class Attention(nn.Module):
        """What the methods in docs/replace.md stand in for."""

        def __init__(self):
            super().__init__()
            self.W, self.U = nn.Linear(6, 5, bias=False), nn.Linear(4, 5)
            self.v = nn.Linear(5, 1)

        def forward(self, state, source, mask=None):
            energy = self.v((self.W(state).unsqueeze(1) + self.U(source)).tanh()).squeeze(2)
            weights = energy.masked_fill(~mask, -1e9).softmax(1)
            return (weights.unsqueeze(1) @ source).squeeze(1), weights

    text = (Path(__file__).parent.parent / "docs" / "replace.md").read_text()
    (code,) = (x for x in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "example(" in x)
    Attention.__module__, Attention.__qualname__ = "speller", "Attention"
    exec(code, {"attnfast": attnfast})
    assert str(attnfast.replace(Attention(), strict=True)).endswith("as speller")


def test_views_of_one_tensor_are_told_apart():
    x = torch.randn(4, 6)
    seen = Seen(x[:, :3])
    assert seen.again(x[:, :3])
    for other in (x[:, :2], x[:3, :3], x[:, :6:2], x[:, :3].T, x.view(torch.int32)[:, :3]):
        assert not seen.again(other)


@pytest.mark.parametrize("grad", [False, True])
def test_a_graph_that_is_traced_takes_its_own_source(grad):
    """What is kept of a source would be a constant of the graph."""
    m = model()["a0"].requires_grad_(grad)
    attnfast.replace(m, strict=True)
    (state, *_), memory, mask = inputs()
    with torch.set_grad_enabled(grad):
        m(state, memory, mask)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jit.trace is deprecated
            traced = torch.jit.trace(m, (state, memory, mask), check_trace=False)
        graphs = [traced] if grad else [traced, make_fx(m)(state, memory, mask)]
        want = m(state * 2, memory + 1, mask)
        for graph in graphs:
            torch.testing.assert_close(graph(state * 2, memory + 1, mask), want)
