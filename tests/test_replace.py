"""attnfast.replace: what becomes of a model, on the double Plain; projects' are in integrations."""

from __future__ import annotations

import abc
import copy
import functools
import io
import itertools
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from integrations.plain import Served, as_plain, inputs, model, register, run, same
from integrations.reference_projects import Plain
from torch import nn

import attnfast
from attnfast.integrations import ADAPTERS, attend_to_source
from attnfast.integrations.cache import PLACE
from attnfast.integrations.patch import adapter_serving
from attnfast.integrations.registry import PROJECTS


@pytest.fixture(autouse=True)
def adapters():
    with mock.patch.dict(ADAPTERS):
        register()
        yield


def test_same_numbers_in_place():
    m = model()
    args, plain = inputs(), copy.deepcopy(m)
    report = attnfast.replace(m)
    assert [x.path for x in report.replaced] == ["a0"] and not report.skipped
    same(run(m["a0"], *args), run(plain["a0"], *args))
    assert adapter_serving(m["a0"]).implementation is Served
    assert isinstance(m["a0"], Plain) and repr(m) == repr(plain)
    assert m.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(m["a0"].last, run(plain["a0"], *args)[0][-1])
    report.undo()
    assert type(m["a0"]) is Plain and PLACE not in vars(m["a0"])
    assert "a0: Plain skipped: its replacement was undone" in str(report)


def test_hooks_fire_and_parameters_stay():
    m = model()["a0"]
    before, calls = list(m.parameters()), []
    m.register_forward_hook(lambda *_: calls.append("after"))
    m.register_forward_pre_hook(lambda *_: calls.append("before"))
    assert attnfast.replace(m).replaced
    assert not calls  # the probe ran on copies
    states, memory, mask = inputs(steps=1)
    m(states[0], memory, mask)
    assert calls == ["before", "after"]
    assert all(a is b for a, b in zip(before, m.parameters(), strict=True))


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


class ByFactory(Plain):
    """Makes a copy of whatever class it has; such a factory cannot be pickled."""

    def __reduce__(self):
        cls = type(self)
        return lambda: cls(), (), vars(self)


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


@pytest.mark.parametrize(
    ("cls", "way"),
    [*itertools.product([Plain, *OWN], WAYS), (ByFactory, "copy"), (ByFactory, "deepcopy")],
)
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


def test_other_parameters_are_not_known():
    m = model()
    m["a0"].gate = nn.Linear(2, 2)
    assert "known class, plain; its parameters differ: it has gate.bias" in str(attnfast.replace(m))
    m["a0"].__class__ = type("MyAttention", (Plain,), {})
    assert "known class, plain; its parameters differ" in str(attnfast.replace(m))
    m["a0"].__class__ = type("MyAttention", (nn.Module,), {})
    assert "MyAttention is not known" in str(attnfast.replace(m))


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
    (state, *_), memory, mask = inputs()
    calls = [
        ((), {"mask": mask}, True),
        ((), {"heat": 3.0, "mask": mask}, False),
        ((), {"heat": None, "mask": mask}, True),
        ((3.0, mask), {}, False),
        ((None, mask), {}, True),
    ]
    for args, more, ours in calls:
        with mock.patch("integrations.plain.attend_to_source", wraps=attend_to_source) as attending:
            got = served(state, memory, *args, **more)
        torch.testing.assert_close(got, plain(state, memory, *args, **more))
        assert attending.called == ours


def test_a_class_that_starts_with_abc():
    """Its instances are laid out in another way."""

    @as_plain
    class Abstract(abc.ABC, Plain):
        pass

    plain = Abstract()
    served = copy.deepcopy(plain)
    report = attnfast.replace(served, strict=True)
    same(run(copy.deepcopy(served), *inputs()), run(plain, *inputs()))
    report.undo()
    assert type(served) is Abstract


def test_twice_and_nothing():
    m = model()
    attnfast.replace(m)
    report = attnfast.replace(m)
    assert "served already" in str(report) and not report.replaced
    nothing = "no attention of a supported project, nor a module that looks like it"
    assert str(attnfast.replace(nn.Linear(2, 2))) == nothing
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got int"):
        attnfast.replace(3)


def test_every_adapter_has_a_name_of_its_own():
    adapters = [adapter.name for project in PROJECTS for adapter in project.ADAPTERS]
    assert len(PROJECTS) > 10 and len(adapters) == len(set(adapters))


def test_what_is_no_adapter():
    with pytest.raises(TypeError, match="implementation must be a class, got 3"):
        register(3)
    for names in ("a", 3, [3], iter("a")):
        with pytest.raises(TypeError, match="parameters must be a list of names, got "):
            register(parameters=names)
    with pytest.raises(TypeError, match=r"adapter must be an attnfast.integrations.Adapter, got 3"):
        attnfast.register_adapter(3)


def test_strict_raises_where_nothing_is_known():
    with pytest.raises(RuntimeError, match="Linear has no attention of a supported project"):
        attnfast.replace(nn.Linear(2, 2), strict=True)
    m = nn.ModuleList([nn.MultiheadAttention(4, 2)])
    with pytest.raises(RuntimeError, match="MultiheadAttention is not known"):
        attnfast.replace(m, strict=True)
    m.append(Plain())
    assert attnfast.replace(m, strict=True).replaced  # what is not known is no reason beside it
    attnfast.replace(m, strict=True)


@pytest.mark.parametrize("name", ["self_attention", "DecoderLSA", "attn_layer", "GlobalAttn"])
def test_what_may_be_attention_is_mentioned(name):
    report = str(attnfast.replace(type(name, (nn.Module,), {})()))
    assert f"{name} skipped: its class" in report
    command = f"python -m attnfast.integrations check {__name__}:{name}"
    assert report.endswith(f".{name} is not known; what to do (docs/adapters.md): {command}")
    assert not attnfast.replace(nn.ModuleList([nn.Flatten(), nn.BatchNorm1d(2)])).found


def test_parameters_that_are_not_known_are_named():
    m = as_plain(type("PlainAttn", (Plain,), {}))()
    m.__class__.__name__ = "PlainAttn"
    m.gate = nn.Linear(2, 2)
    del m.query
    report = str(attnfast.replace(m))
    what = (
        "known class, plain; its parameters differ: it has gate.bias, gate.weight and lacks query"
    )
    assert what in report


def test_strict_changes_nothing_before_it_raises():
    m = nn.ModuleList([Plain(), Plain()])
    register(skip_reason=lambda module: "the second" if module is m[1] else None)
    with pytest.raises(RuntimeError, match="1: Plain skipped: the second"):
        attnfast.replace(m, strict=True)
    assert type(m[0]) is Plain


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
    still = "gradient 0 instead of rounding errors: energy.bias"
    assert text[0].startswith("x: Plain served by ")
    assert text[0].endswith(f"as plain; nothing else; {still}")
    assert text[1].startswith("MultiheadAttention: MultiheadAttention skipped: ")
    assert all(a != b for a, b in itertools.pairwise(text))


def test_parameters_that_an_optimiser_no_longer_moves_are_named():
    """The own code's gradients of a bias before a softmax are not quite 0."""
    plain = Plain()
    served = copy.deepcopy(plain)
    (found,) = attnfast.replace(served).replaced
    assert found.zero_gradients == ["energy.bias"]
    grads = []
    for m in (plain.double(), served.double()):
        states, memory, mask = inputs()
        context, _ = m(states[0].double(), memory.double(), mask)
        context.square().sum().backward()
        grads.append({name: p.grad for name, p in m.named_parameters()})
    assert [name for name, x in grads[1].items() if not x.any()] == ["energy.bias"]
    assert attnfast.replace(Plain().requires_grad_(False)).replaced[0].zero_gradients == []
