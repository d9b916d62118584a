"""attnfast.replace compares first, and what differs is skipped: variants of the double Plain."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
from unittest import mock

import pytest
import torch
from integrations.plain import Served, as_plain, example, inputs, model, register, run
from integrations.reference_projects import Plain
from torch import nn

import attnfast
from attnfast.integrations import ADAPTERS, attend_to_source, probe, project


@pytest.fixture(autouse=True)
def adapters():
    with mock.patch.dict(ADAPTERS):
        register()
        yield


class Wrong(Served):
    """Forgets the mask."""

    def forward(self, state, memory, mask=None):
        return super().forward(state, memory)


class WrongLater(Served):
    """Right at the first step only."""

    def forward(self, state, memory, mask=None):
        again, self.again = getattr(self, "again", 0), getattr(self, "again", 0) + 1
        return super().forward(state * (1 + 1e-3 * again), memory, mask)


def test_the_probe_leaves_no_trace():
    m = model()["a0"]
    states, memory, mask = inputs()
    run(m, states, memory, mask)  # its state has a history now
    last, random, grads = m.last, torch.get_rng_state(), [p.grad for p in m.parameters()]
    attnfast.replace(m)
    assert m.last is last and torch.equal(random, torch.get_rng_state())
    assert [p.grad for p in m.parameters()] == grads and m.training


AUTOCAST = functools.partial(torch.autocast, "cpu", torch.bfloat16)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, AUTOCAST])
def test_the_probe_does_not_run_in_the_callers_mode(mode):
    with mode():
        assert attnfast.replace(Plain()).replaced


@pytest.mark.parametrize("methods", [Wrong, WrongLater])
def test_what_differs_is_left_alone(methods):
    register(methods)
    m = model(2)
    report = attnfast.replace(m)
    assert not report.replaced and all("differ" in x.skip_reason for x in report.skipped)
    assert type(m["a0"]) is Plain
    assert "a0: Plain skipped: " in str(report)
    with pytest.raises(RuntimeError, match=r"a0: Plain skipped: .*differ.*; a1: Plain"):
        attnfast.replace(m, strict=True)


def test_a_missing_gradient_is_a_difference():
    class Untouched(Served):
        def forward(self, state, memory, mask=None):
            key = project(self, "key", self.key, memory)
            return attend_to_source(
                self, self.query(state), key, memory, self.energy.weight, mask=mask
            )

    register(Untouched)
    report = attnfast.replace(model())
    assert not report.replaced


def test_subclasses_that_compute_something_else_are_left_alone():
    class Plain2(Plain):
        def forward(self, state, memory, mask=None):
            return super().forward(state * 2, memory, mask)

    report = attnfast.replace(nn.ModuleList([Plain2(), Plain()]))
    assert [x.path for x in report.skipped] == ["0"] and [x.path for x in report.replaced] == ["1"]


def test_arguments_that_a_replacement_does_not_take():
    class Sharper(Plain):
        def forward(self, state, memory, sharpness, mask=None):
            return super().forward(state * sharpness, memory, mask)

    class Wider(Plain):
        def forward(self, *inputs, **more):
            return super().forward(*inputs, **more)

    reports = [str(attnfast.replace(cls())) for cls in (Sharper, Wider)]
    what = "skipped: its own forward takes {}, which its replacement does not"
    assert what.format("sharpness") in reports[0]
    assert what.format("inputs, more") in reports[1]

    class Any(Served):
        def forward(self, *inputs, **more):
            return super().forward(*inputs, **more)

    register(Any)
    assert attnfast.replace(Plain()).replaced


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


TEMPERATURE, SEEN = 1.0, []


def observed(method):
    """Read a global around a method, and write another."""

    @functools.wraps(method)
    def wrapper(*args):
        SEEN.append(len(args))
        return method(*args) / TEMPERATURE

    return wrapper


def logged(method):
    @functools.wraps(method)
    def wrapper(*args):
        logging.getLogger().debug("called")
        return method(*args)

    return wrapper


class Divided:
    """A function that is an object."""

    by = 1.0

    def __call__(self, scores):
        return scores / self.by


@as_plain
class Decorated(Clamped):
    @logged
    @observed
    def scores(self, state, memory):
        features = torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))
        return self.energy(features).squeeze(2)


@as_plain
class DecoratedSetLater(Clamped):
    @logged
    def scores(self, state, memory):
        features = torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))
        with contextlib.suppress(AttributeError):
            features = features * self.gain
        return self.energy(features).squeeze(2)


@as_plain
class Static(Clamped):
    def scores(self, state, memory):
        features = torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))
        return self.scaled(self.energy(features).squeeze(2))

    @staticmethod
    def scaled(scores):
        return scores / TEMPERATURE


@as_plain
class StaticObject(Static):
    scaled = Divided()


ByTemperature = functools.partial(torch.mul, other=torch.ones(1))


@as_plain
class Partial(Clamped):
    def scores(self, state, memory):
        features = torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))
        return ByTemperature(self.energy(features).squeeze(2))


@as_plain
class Remembering(Clamped):
    def scores(self, state, memory, *, calls=[], scale=1.0):  # noqa: B006
        calls.append(1)
        features = torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))
        return self.energy(features).squeeze(2) / scale


def enclosing(change):
    """Return a class whose code calls a variable of this function."""

    @as_plain
    class Enclosed(Clamped):
        def scores(self, state, memory):
            features = torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))
            return change(self.energy(features).squeeze(2), memory)

    return Enclosed


def divided_by(options):
    return lambda scores, memory: scores / options[0]


def where(ask):
    """Change the scores where something else than in the comparison is so."""
    return lambda scores, memory: scores * 2 if ask(memory) else scores


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
        (Decorated, "its own code reads SEEN, TEMPERATURE, which"),
        (DecoratedSetLater, "its own code reads gain, which"),
        (Static, "its own code reads scaled, which"),
        (StaticObject, "its own code reads scaled, which"),
        (Remembering, "its own code reads calls, which"),
        (Partial, "its own code reads ByTemperature, which"),
        (Padded, "results differ"),
        (ByHand, "results differ"),
        (Linear, "results differ"),
        (Named, "results differ by being a tuple of 2 instead of a Result of 2"),
        (More, "results differ by being a tuple of 2 instead of a tuple of 3"),
    ],
)
def test_copies_that_compute_something_else_are_left_alone(cls, why):
    assert why in str(attnfast.replace(cls()))


@pytest.mark.parametrize("options", [[1.0], {0: 1.0}, torch.ones(1), (1.0,)])
def test_what_an_enclosing_function_keeps_is_read(options):
    report = str(attnfast.replace(enclosing(divided_by(options))()))
    assert "its own code reads options, which" in report
    report = str(attnfast.replace(enclosing(Divided())()))
    assert "its own code reads change, which" in report


@pytest.mark.parametrize(
    ("decorator", "why"),
    [
        (torch.enable_grad(), "its own code reads decorate_context, which"),
        (functools.lru_cache, "its own forward is not a plain method"),
    ],
)
def test_decorators_of_other_packages(decorator, why):
    class Decorated(Plain):
        forward = decorator(Plain.forward)

    report = str(attnfast.replace(as_plain(Decorated)()))
    assert f"skipped: {why}" in report


def test_functions_that_change_nothing_may_enclose():
    assert attnfast.replace(enclosing(logged(lambda scores, memory: scores))()).replaced
    assert attnfast.replace(enclosing(where(lambda memory: len(memory) < 0))()).replaced


ASKS = {
    "requires_grad": lambda x: not x.requires_grad,
    "is_leaf": lambda x: not x.is_leaf,
    "grad_fn": lambda x: x.grad_fn is not None,
    "grad": lambda x: x.grad is not None,
    "is_inference": lambda x: x.is_inference(),
    "is_inference_mode_enabled": lambda x: torch.is_inference_mode_enabled(),
}


@pytest.mark.parametrize("name", ASKS)
def test_whether_gradients_are_wanted_is_not_asked(name):
    report = str(attnfast.replace(enclosing(where(ASKS[name]))()))
    assert f"its own code reads {name}, which" in report


@pytest.mark.parametrize(("how", "what"), [("buffer", "calls"), ("list", "list"), ("", "number")])
def test_what_a_copy_counts_is_compared(how, what):
    register(classes=[f"{Counting.__module__}.Counting"])
    report = str(attnfast.replace(Counting(how)))
    assert "skipped: state differ" in report and what in report, report


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
    assert "0: Logged skipped: its class Logged has a forward of its own" in str(report)


def test_layers_with_hooks_are_left_to_the_project():
    m = model()["a0"]
    m.energy.register_forward_hook(lambda module, args, output: 3 * output)
    assert "skipped: its energy has hooks" in str(attnfast.replace(m))


def test_why_not_and_a_failing_example():
    register(skip_reason=lambda module: "it is a Tuesday")
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


def test_examples_that_yield_nothing():
    register(example=lambda module, draw: [])
    report = str(attnfast.replace(Plain()))
    failure = "fails on an example: ValueError: the example yields no tensor, in float64 with "
    assert f"{failure}batches of 9 and 17" in report
    register(example=lambda module, draw: [draw(2, grad=False)])
    assert attnfast.replace(Plain()).replaced  # nothing has a gradient, on both sides


@as_plain
class Placeless(Plain):
    """Makes tensors on the default device."""

    def forward(self, state, memory, mask=None):
        return super().forward(state + torch.zeros(6), memory, mask)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_another_default_device(device):
    torch.set_default_device(device)
    try:
        with torch.device("cpu"):
            m = Plain()
        report = attnfast.replace(m, strict=True)
        assert "served by cpu" in str(report)
        m.__class__ = Placeless
        assert attnfast.replace(m, strict=True).replaced
    finally:
        torch.set_default_device(None)  # the cpu by name would stay as a mode
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


def test_nothing_is_logged_and_no_log_is_set_up(monkeypatch, caplog):
    class Logging(Plain):
        def forward(self, state, memory, mask=None):
            logging.warning("a step")
            return Plain.forward(self, state, memory, mask)

    register(classes=[f"{Logging.__module__}.{Logging.__qualname__}"])
    assert attnfast.replace(Logging()).replaced and not caplog.records
    monkeypatch.setattr(logging.root, "handlers", [])
    attnfast.replace(Logging())
    assert not logging.root.handlers and logging.root.manager.disable == 0


class Worded(Plain):
    """Has an embedding whose gradients are sparse."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 6, sparse=True)

    def forward(self, state, memory, mask=None):
        return Plain.forward(self, state + word(self, state), memory, mask)


def word(module, state, sparse=True):
    index = torch.arange(len(state), device=state.device)
    return nn.functional.embedding(index, module.words.weight, sparse=sparse)


@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_gradients_are_compared(sparse):
    class Ours(Served):
        def forward(self, state, memory, mask=None):
            return super().forward(state + word(self, state, sparse), memory, mask)

    names = [n for n, _ in Worded().named_parameters()]
    register(Ours, classes=[f"{__name__}.Worded"], parameters=names)
    report = attnfast.replace(Worded())
    assert bool(report.replaced) == sparse, report
    what = "gradients differ in words.weight by layout: torch.float64 [20, 6] instead of"
    assert sparse or what in str(report)


def test_what_cannot_be_compared_is_left_alone():
    with mock.patch(
        "attnfast.integrations.probe.outcome_mismatch", side_effect=NotImplementedError
    ):
        assert "the comparison fails on an example" in str(attnfast.replace(Plain()))


def test_another_type_under_autocast_is_left_alone():
    class Single(Served):
        def forward(self, state, memory, mask=None):
            context, weights = super().forward(state, memory, mask)
            return context.float() if context.dtype == torch.bfloat16 else context, weights

    register(Single)
    what = "results differ by dtype: torch.float32 [2, 6] instead of torch.bfloat16 [2, 6]"
    assert f"{what} in call 1[0], under autocast to bfloat16" in str(attnfast.replace(Plain()))

    class Double(Plain):
        def forward(self, state, memory, mask=None):
            assert not torch.is_autocast_enabled("cpu"), "not under autocast"
            return super().forward(state, memory, mask)

    register()
    assert attnfast.replace(as_plain(Double)()).replaced  # nothing to compare with


class Cancels(Plain):
    """Its own rounding errors are larger than a replacement's usual difference."""

    def forward(self, state, memory, mask=None):
        context, weights = super().forward(state, memory, mask)
        large = 10000 if context.dtype == torch.float32 else 0
        return (context + large) - large, weights


class WrongInItsOwnDtype(Served):
    def forward(self, state, memory, mask=None):
        context, weights = super().forward(state, memory, mask)
        wrong = 1e-3 if context.dtype == torch.float32 else 0.0
        return context + wrong, weights


@pytest.mark.parametrize("own", [Cancels, Plain])
def test_a_difference_is_judged_by_rounding_errors(own, monkeypatch):
    """In float32, by those of the module's own code with its own parameters."""
    monkeypatch.setattr(probe, "SEEDS", 1)  # no other example
    own.__qualname__ = "Plain"
    torch.manual_seed(0)
    assert attnfast.replace(own()).replaced
    register(WrongInItsOwnDtype)
    [skipped] = attnfast.replace(Plain()).skipped
    assert "results differ by 0.001" in skipped.skip_reason
