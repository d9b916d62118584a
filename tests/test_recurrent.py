"""A recurrent layer that attends: one operator, its oracle, and the modules on top."""

import math
import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_type_hints

import pytest
import torch
from table import CPU, DEVICE, check
from torch import Tensor, nn

import attnfast
from attnfast import nn as attn
from attnfast import reference
from attnfast.backends import why_not
from attnfast.models import BahdanauDecoder
from attnfast.nn import layer as layer_code
from attnfast.ops.operators import CHECKS
from attnfast.ops.recurrent import GATES, RECURRENT, Recurred, Recurrent, RecurrentBackward

RECURRENCES = ("attend_first", "attend_last", "input_feeding")


@dataclass(frozen=True)
class Case:
    """A call of the operator; ``terms`` are among those that :func:`call` knows."""

    mode: str
    recurrence: str | None  # None: a plain recurrent layer
    score: str = "dot"
    B: int = 3
    T: int = 5
    E: int = 9
    H: int = 13
    Tk: int = 7
    A: int = 11  # as many as H without a projection
    Dv: int = 10
    F: int = 6  # of an attentional vector
    terms: tuple[str, ...] = ("projection",)
    dtype: torch.dtype = torch.float32
    seed: int = 0
    strict: bool = False  # for table.check


EVERYTHING = ("projection", "lengths", "mask", "span", "targets", "dropout", "feed", "biases")
#: With "past" attention has a history, and no span.
PAST = ("past", "filters", "penalty", "fertility", "transition")
FILTERS = ((1, 2, 1), (4, 1, 3), (33, 2, 5))  # the first is a coverage feature's


def call(case: Case, device: torch.device = CPU) -> Recurrent:
    """Return the arguments of a case, leaves that require gradients."""
    g = torch.Generator().manual_seed(case.seed)
    B, T, E, H, Tk, Dv = case.B, case.T, case.E, case.H, case.Tk, case.Dv
    terms, G = case.terms, GATES[case.mode]
    A = case.A if "projection" in terms else H
    feeds = case.recurrence == "input_feeding"
    F = 0 if case.recurrence is None else case.F if feeds else Dv

    def floats(*shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape, generator=g, dtype=torch.float64) * scale
        return x.to(device, case.dtype).requires_grad_()

    args: dict = {
        "input": floats(B, T, E),
        "hidden": floats(B, H),
        "weight_ih": floats(G * H, E + F, scale=(E + F) ** -0.5 if E + F else 1),
        "weight_hh": floats(G * H, H, scale=0.6 * H**-0.5),  # so that no error grows
        "mode": case.mode,
        "attends_first": case.recurrence in ("attend_first", None),
    }
    if case.mode == "lstm":
        args["cell"] = floats(B, H)
    if "biases" in terms:
        args |= {"bias_ih": floats(G * H), "bias_hh": floats(G * H)}
    if "targets" in terms:
        args["target_lengths"] = torch.randint(0, T + 1, (B,), generator=g).to(device)
    if "dropout" in terms:
        args["dropout"] = ((torch.rand(B, H, generator=g) > 0.3) / 0.7).to(device, case.dtype)
    if case.recurrence is None:
        return Recurrent(**args)
    args |= {"key": floats(B, Tk, A), "value": floats(B, Tk, Dv), "score": case.score}
    args["scale"] = 0.7
    if case.score != "dot":
        args["weight"] = floats(A, scale=2 / max(A, 1) ** 0.5)
    if "projection" in terms:
        args["weight_query"] = floats(A, H, scale=H**-0.5)
        args["bias_query"] = floats(A) if "biases" in terms else None
    if feeds:
        args["weight_output"] = floats(F, Dv + H, scale=(Dv + H) ** -0.5)
        args["bias_output"] = floats(F) if "biases" in terms else None
    if "feed" in terms and not args["attends_first"]:
        args["feed"] = floats(B, F)
    if "lengths" in terms:
        args["lengths"] = torch.randint(0, Tk + 1, (B,), generator=g).to(device)
    if "mask" in terms:
        rows = (B, T) if case.seed % 2 else (1, 1)
        args["mask"] = (torch.rand(*rows, Tk, generator=g) > 0.3).to(device)
    if "past" in terms:
        return Recurrent(**args, **past(case, g, A, device))
    if "span" in terms:
        first = torch.randint(-2, Tk + 1, (B if case.seed % 2 else 1, T, 1), generator=g)
        args["span"] = torch.cat([first, first + 4], -1).to(device)
    return Recurrent(**args)


def past(case: Case, g: torch.Generator, A: int, device: torch.device) -> dict[str, Tensor]:
    """Return what a history adds to the arguments."""
    keys, (K, channels, width) = (case.B, case.Tk), FILTERS[case.seed % 3]
    made = {x: torch.rand(keys, generator=g, dtype=torch.float64) for x in ("coverage", "previous")}
    if "transition" in case.terms:
        made["previous"] += 0.5  # divided by
    if "filters" in case.terms and case.score != "dot":
        of = torch.randn(K, channels, width, generator=g, dtype=torch.float64)
        made["filters"] = of * (channels * width) ** -0.5
        made["projection"] = torch.randn(A, K, generator=g, dtype=torch.float64) * K**-0.5
    if "penalty" in case.terms:
        made["penalty"] = torch.randn(1, generator=g, dtype=torch.float64) * 0.5
    if "fertility" in case.terms:
        made["inverse_fertility"] = 0.5 + torch.rand(keys, generator=g, dtype=torch.float64)
    if "transition" in case.terms:
        made["transition_prob"] = torch.rand(case.B, case.T, generator=g, dtype=torch.float64)
    return {name: x.to(device, case.dtype).requires_grad_() for name, x in made.items()}


def doubled(args: Recurrent) -> Recurrent:
    """Return the same numbers in float64."""
    kept = {
        name: x.detach().double().requires_grad_(x.requires_grad)
        for name, x in args._asdict().items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    return args._replace(**kept)


def results(case: Case, args: Recurrent, run) -> dict[str, Tensor]:
    """Return what ``run`` makes of a call, and the gradients of a random sum of it."""
    made = run(args)
    g = torch.Generator().manual_seed(case.seed + 1)
    outputs = []
    for name in ("states", "cells", "contexts", "weights", "attentional", "coverage", "loss"):
        x = getattr(made, name)
        noise = torch.randn(x.shape, generator=g, dtype=torch.float64).bfloat16()
        if x.requires_grad and x.numel():
            outputs.append((x, noise.to(x.device, x.dtype)))
    leaves = {n: x for n, x in args._asdict().items() if isinstance(x, Tensor) and x.requires_grad}
    found = {name: x.detach() for name, x in made._asdict().items() if name != "odds"}
    grads: tuple = (None,) * len(leaves)
    if outputs:
        tensors, upstream = zip(*outputs)
        grads = torch.autograd.grad(tensors, [*leaves.values()], upstream, allow_unused=True)
    for (name, leaf), grad in zip(leaves.items(), grads):
        found[f"grad of {name}"] = torch.zeros_like(leaf) if grad is None else grad
    return found


def served(backend: str, dtype: torch.dtype, terms: tuple[str, ...] = ()) -> None:
    """Skip a backend that has no such operator, and the oracle, which judges."""
    if backend == "reference":
        pytest.skip("what the others are judged by")
    asked = (DEVICE[backend], dtype, "recurrent", False, 0, "past" in terms)
    if reason := why_not(backend, *asked):
        pytest.skip(f"{backend}: {reason}")


def operator(backend: str):
    """Return what runs a backend's operator, differentiably."""
    if backend == "reference":
        return reference.recurrent
    return lambda args: RECURRENT.differentiable(backend, args)


def judge(case: Case, backend: str) -> None:
    args = call(case, DEVICE[backend])
    wanted = results(case, doubled(call(case)), reference.recurrent)
    check(case, results(case, args, operator(backend)), wanted, losses(case, wanted))


def losses(case: Case, wanted: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield what eager code gives, then what it loses where inputs differ by a thousandth.

    What it loses in a single call is luck: see table.nearby.
    """
    yield results(case, call(case), reference.recurrent)
    for seed in range(12):
        g, kept = torch.Generator().manual_seed(seed), {}
        for name, x in call(case)._asdict().items():
            if isinstance(x, Tensor) and x.requires_grad:
                noise = torch.randn(x.shape, generator=g, dtype=x.dtype)
                kept[name] = (x.detach() * (1 + 1e-3 * noise)).requires_grad_()
        near = call(case)._replace(**kept)
        plain = results(case, near, reference.recurrent)
        exact = results(case, doubled(near), reference.recurrent)
        yield {k: want + plain[k].double() - exact[k] for k, want in wanted.items()}


CASES = [
    *(
        Case(mode, recurrence, score, terms=terms, seed=seed)
        for mode in GATES
        for recurrence in RECURRENCES
        for seed, (score, terms) in enumerate(
            [("dot", ()), ("dot", ("projection", "targets")), ("tanh", EVERYTHING)]
        )
    ),
    *(Case(mode, None, terms=("targets", "dropout", "biases"), H=70) for mode in GATES),
    *(Case("gru", x, "relu", B=37, H=33, A=65, Dv=40, F=70, terms=EVERYTHING) for x in RECURRENCES),
    *(Case("lstm", x, "tanh", B=1, T=9, H=100, Tk=150, A=64, Dv=64, F=64) for x in RECURRENCES),
    *(Case("gru", x, "tanh", 2, 40, 1, 1, 1, 1, 1, 1, terms=EVERYTHING) for x in RECURRENCES),
    *(Case("gru", "attend_last", "tanh", **{size: 0}) for size in ("B", "T", "Tk", "Dv")),
    *(
        Case(mode, recurrence, score, terms=(*EVERYTHING, *terms), seed=seed)
        for mode in GATES
        for recurrence in RECURRENCES
        for seed, (score, terms) in enumerate(
            [
                ("tanh", PAST),
                ("tanh", ("past", "filters")),
                ("relu", PAST),
                ("tanh", ("past", "penalty", "fertility")),
                ("dot", ("past", "penalty")),
                ("tanh", ("past", "transition")),
                ("leaky_relu", ("past",)),
            ]
        )
    ),
    *(
        Case("lstm", x, "tanh", 1, 9, 5, 70, 150, 64, 64, 64, ("past", *terms), seed=seed)
        for x in RECURRENCES
        for seed, terms in ((1, ("filters", "projection")), (2, ("penalty",)))
    ),
    *(
        Case("gru", "attend_first", "tanh", terms=(*EVERYTHING, *PAST), seed=2, **{size: 0})
        for size in ("B", "T", "Tk", "Dv")
    ),
    *(
        Case("gru", x, "tanh", 2, 40, 1, 1, 1, 1, 1, 1, terms=(*EVERYTHING, *PAST), seed=seed)
        for x in RECURRENCES
        for seed in (0, 2)
    ),
    *(
        Case("lstm", x, "tanh", terms=EVERYTHING, dtype=torch.float64, seed=1, H=20)
        for x in RECURRENCES
    ),
    Case("gru", "attend_first", "tanh", B=2, T=3, Tk=9, A=200, H=600, E=300, Dv=520),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_table(case, backend):
    served(backend, case.dtype, case.terms)
    judge(case, backend)


@pytest.mark.parametrize("seed", range(4))
def test_fuzz(seed, backend):
    served(backend, torch.float32)
    draw = random.Random(seed)
    every = EVERYTHING if backend == "cuda" else (*EVERYTHING, *PAST)
    for _ in range(16):
        size = lambda *most: draw.randint(1, draw.choice(most))  # noqa: E731
        case = Case(
            draw.choice(list(GATES)),
            draw.choice((*RECURRENCES, None)),
            draw.choice(("dot", "tanh", "tanh", "relu", "leaky_relu")),
            B=size(3, 40), T=size(4, 12), E=size(9, 70), H=size(9, 70), Tk=size(5, 70),
            A=size(9, 70), Dv=size(9, 70), F=size(9, 70),
            terms=tuple(x for x in every if draw.random() < 0.4),
            dtype=draw.choice((torch.float32, torch.float32, torch.float64)),
            seed=draw.randint(0, 2**31),
        )  # fmt: skip
        judge(case, backend)  # a failure prints the case


@pytest.mark.parametrize(("score", "terms"), [("dot", ()), ("tanh", ()), ("tanh", PAST)])
@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("mode", GATES)
def test_gradcheck(mode, recurrence, score, terms, backend):
    served(backend, torch.float64, terms)
    terms = (*EVERYTHING, *terms)
    case = Case(mode, recurrence, score, 2, 3, 2, 3, 4, 3, 2, 2, terms, torch.float64, 1)
    args = call(case, DEVICE[backend])
    names = [n for n, x in args._asdict().items() if isinstance(x, Tensor) and x.requires_grad]

    def run(*leaves):
        made = operator(backend)(args._replace(**dict(zip(names, leaves))))
        return [x for x in made[:7] if x.requires_grad and x.numel()]

    leaves = [getattr(args, name) for name in names]
    assert torch.autograd.gradcheck(run, leaves, nondet_tol=0.0)


@pytest.mark.parametrize("terms", [(), PAST])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_opcheck(recurrence, terms, backend):
    served(backend, torch.float32, terms)
    case = Case("lstm", recurrence, "tanh", terms=(*EVERYTHING, *terms))
    args = call(case, DEVICE[backend])
    torch.library.opcheck(RECURRENT.forwards[backend], tuple(args))
    made = RECURRENT(backend, args)
    torch.library.opcheck(RECURRENT.backwards[backend], tuple(backward_of(args, made)))


def backward_of(args: Recurrent, made: Recurred) -> RecurrentBackward:
    """Return a call of the backward with all gradients given."""
    fields = {x: None for x in RecurrentBackward._fields}
    fields |= {x: y for x, y in (made._asdict() | args._asdict()).items() if x in fields}
    fields |= {
        x: torch.randn_like(getattr(made, x[5:]))
        for x in fields
        if x.startswith("grad_") and x[5:] in made._fields
    }
    fields |= {x: True for x in fields if x.startswith("need_")}
    fields = {n: x.detach() if isinstance(x, Tensor) else x for n, x in fields.items()}
    return RecurrentBackward(**fields)


@pytest.mark.parametrize("terms", [(), PAST, ("past", "penalty")])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_what_no_step_reads_changes_nothing(recurrence, terms, backend):
    """NaN beyond the keys' lengths and beyond the targets' ends."""
    if backend != "reference":
        served(backend, torch.float32, terms)
    terms = ("projection", "lengths", "targets", *terms)
    case = Case("gru", recurrence, "tanh", 4, terms=terms, seed=3)
    clean, poisoned = (call(case, DEVICE[backend]) for _ in range(2))
    with torch.no_grad():
        for b in range(case.B):
            for x in (poisoned.key, poisoned.value):
                x[b, clean.lengths[b] :] = math.nan
            poisoned.input[b, clean.target_lengths[b] :] = math.nan
    a, b = (results(case, x, operator(backend)) for x in (clean, poisoned))
    for name, x in a.items():
        y = b[name]
        if name == "grad of key":  # the gradient of what is not seen is 0
            assert torch.isfinite(y).all()
        assert torch.equal(x, y), name


@pytest.mark.parametrize("terms", [(), PAST, ("past", "penalty")])
@pytest.mark.parametrize("recurrence", [*RECURRENCES, None])
def test_every_run_gives_the_same_bits(recurrence, terms, backend):
    served(backend, torch.float32, terms)
    terms = ("projection", *terms)
    case = Case("lstm", recurrence, "tanh", 40, 6, 30, 70, 60, 50, 40, 40, terms=terms)
    args, threads = call(case, DEVICE[backend]), torch.get_num_threads()
    first = results(case, args, operator(backend))
    try:
        for count in (1, 2, 3, *[threads] * 20):
            torch.set_num_threads(count)
            again = results(case, args, operator(backend))
            assert all(torch.equal(x, again[name]) for name, x in first.items()), count
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("mode", GATES)
def test_without_attention_it_is_pytorchs_layer(mode, backend):
    served(backend, torch.float64)
    kind = {"tanh": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[mode]
    layer = kind(5, 7, batch_first=True).double()
    x, lengths = torch.randn(4, 6, 5, dtype=torch.float64), torch.tensor([6, 2, 1, 4])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
    wanted, last = layer(packed)
    wanted, _ = nn.utils.rnn.pad_packed_sequence(wanted, batch_first=True)
    zeros = x.new_zeros(4, 7)
    made = operator(backend)(
        Recurrent(
            x, zeros, layer.weight_ih_l0, layer.weight_hh_l0, zeros if mode == "lstm" else None,
            None, layer.bias_ih_l0, layer.bias_hh_l0, target_lengths=lengths, mode=mode,
        )
    )  # fmt: skip
    torch.testing.assert_close(made.states, wanted)
    last = last if mode == "lstm" else (last,)
    for x, y in zip((made.states, made.cells), last):
        torch.testing.assert_close(layer_code.last_of(x, zeros, lengths), y[0])


def test_misfits(backend):
    """What the operator's check refuses the compiled operator refuses, and nothing else."""
    served(backend, torch.float32)
    draw, counts = random.Random(0), [0, 0]
    for seed in range(900):
        terms = tuple(x for x in (*EVERYTHING, *PAST) if draw.random() < 0.6)
        kind = draw.choice(list(GATES)), draw.choice((*RECURRENCES, None))
        args = call(Case(*kind, draw.choice(("dot", "tanh")), terms=terms, seed=seed))
        name, given = "recurrent", args
        if draw.random() < 0.5:
            name, given = "recurrent_backward", backward_of(args, RECURRENT(backend, args))
        field = draw.choice([n for n, x in given._asdict().items() if isinstance(x, Tensor)])
        x = getattr(given, field).detach()
        may_be_none = get_type_hints(type(given))[field] == Tensor | None
        how = draw.choice(("nothing", "rank", "size", "dtype", *["none"] * may_be_none))
        if how == "rank":
            x = x.unsqueeze(draw.randint(0, x.dim())) if draw.random() < 0.5 else x.flatten()
        if how == "size":
            axis = draw.randrange(x.dim())
            grown = list(x.shape)
            grown[axis] = draw.choice((0, 1, grown[axis] + 1, 30))
            x = torch.zeros(grown, dtype=x.dtype)
        if how == "dtype":
            x = x.to(draw.choice((torch.float64, torch.int64, torch.bfloat16, torch.bool)))
        if how == "none":
            x = None
        given = given._replace(**{field: x})
        overload = (RECURRENT.forwards if name == "recurrent" else RECURRENT.backwards)[backend]
        said = [refusal(f, given) for f in (CHECKS[name], overload)]
        assert (said[0] is None) == (said[1] is None), f"{name}: {how} of {field}: {said}"
        counts[said[0] is None] += 1
    assert min(counts) > 100
    short = call(Case("gru", "attend_first"))._replace(packed=torch.zeros(64, dtype=torch.uint8))
    assert "packed" in refusal(RECURRENT.forwards[backend], short)
    if backend != "cuda":
        given = call(Case("gru", "attend_first", "tanh", terms=("past",)))
        given = given._replace(span=torch.zeros(1, 1, 2, dtype=torch.int64).expand(3, 5, 2))
        for function in (CHECKS["recurrent"], RECURRENT.forwards[backend]):
            assert "span" in refusal(function, given)


def refusal(function, args) -> str | None:
    try:
        function(*args)
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        return str(error)
    return None


# ---- modules ------------------------------------------------------------------------------------


def number() -> nn.Parameter:
    return nn.Parameter(torch.tensor(0.3))


ATTENTIONS = {
    "bahdanau": lambda: attn.BahdanauAttention(12, 10, 8, bias=True),
    "dot": lambda: attn.LuongAttention(12, 12, "scaled_dot"),
    "general": lambda: attn.LuongAttention(12, 10, "general"),
    "concat": lambda: attn.LuongAttention(12, 10, "concat"),
    "coverage": lambda: attn.CoverageAttention(12, 10, 8),
    "penalty": lambda: attn.CoverageAttention(12, 10, 8, feature=False, penalty=0.7),
    "learned penalty": lambda: attn.CoverageAttention(12, 10, 8, penalty=number()),
    "fertility": lambda: attn.CoverageAttention(12, 10, 8, fertility=2.0, activation="relu"),
    "location": lambda: attn.LocationAwareAttention(12, 10, 8, 5, 3),
    "location, cumulative": lambda: attn.LocationAwareAttention(
        12, 10, 8, 5, 3, channels="cumulative"
    ),
    "location, both": lambda: attn.LocationAwareAttention(12, 10, 8, 5, 3, channels="both"),
    "content": lambda: attn.LocationAwareAttention(12, 10, 8, 0, bias=False),
    "forward": lambda: attn.ForwardAttention(12, 10, 8),
    "forward, location": lambda: attn.ForwardAttention(12, 10, 8, 5, 3, channels="both"),
    "window": lambda: attn.LocalAttention(12, 10, window=2),
    "heads": lambda: attn.MultiHeadAttention(12, 10, 10, 2),
}


def layer_and_inputs(kind, attention: str, **options):
    torch.manual_seed(0)
    size = 12 if attention == "dot" else 10
    layer = kind(6, 12, size, ATTENTIONS[attention](), **options).double()
    x = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    source = torch.randn(3, 9, size, dtype=torch.float64, requires_grad=True)
    return layer, x, source, torch.tensor([9, 4, 6])


def tensors(result) -> list[Tensor]:
    """Return all that a layer gives."""
    state = [x for x in result.state if isinstance(x, Tensor)]
    past = result.state.history
    past = past if isinstance(past, attn.History) else ()
    return [result.output, result.states, result.contexts, result.weights, *state, *past]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("kind", [attn.AttentionGRU, attn.AttentionLSTM])
def test_in_one_call_in_parts_and_in_steps(kind, recurrence, attention, monkeypatch):
    layer, x, source, lengths = layer_and_inputs(kind, attention, recurrence=recurrence)
    memory = layer.prepare(source, lengths)
    whole = layer(x, memory)
    state, outputs = None, []
    for part in (x[:, :3], x[:, 3:4], x[:, 4:]):
        output, state = layer(part, memory, state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), whole.output)
    assert isinstance(state.history, type(whole.state.history))
    for a, b in zip(state[:3], whole.state[:3]):
        torch.testing.assert_close(a, b)
    for a, b in zip(state.history or (), whole.state.history or ()):
        torch.testing.assert_close(a, b)

    def run():
        targets = torch.tensor([7, 0, 3])
        with torch.no_grad():
            x[1], x[2, 3:] = math.nan, math.nan  # padding
        found = tensors(
            layer(x, layer.prepare(source, lengths), target_lengths=targets, need_weights=True)
        )
        total = sum((y * torch.linspace(0, 1, y.numel()).double().view_as(y)).sum() for y in found)
        found += torch.autograd.grad(total, [x, source, *layer.parameters()])
        assert all(y.isfinite().all() for y in found)
        return found

    served_so = run()
    monkeypatch.setattr(layer_code, "backend_of", lambda *_, **__: None)
    torch.testing.assert_close(served_so, run())


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_which_attentions_are_one_operator(attention, monkeypatch):
    layer, x, source, lengths = layer_and_inputs(attn.AttentionGRU, attention)
    calls, run = [], layer_code.dispatch.run
    monkeypatch.setattr(
        layer_code.dispatch, "run", lambda *args: calls.append(args[0].name) or run(*args)
    )
    layer(x, layer.prepare(source, lengths))
    assert calls == ["recurrent"] if attention != "heads" else "recurrent" not in calls


@pytest.mark.parametrize("attention", ["coverage", "location"])
def test_a_decoders_mask_of_words_is_padding_to_a_history(attention, monkeypatch):
    torch.manual_seed(0)
    decoder = BahdanauDecoder(6, 10, 12, ATTENTIONS[attention]()).double()
    words, source = (torch.randn(3, n, m).double() for n, m in ((7, 6), (9, 10)))
    there = torch.arange(7) < torch.tensor([[7], [0], [3]])
    seen = torch.rand(3, 9) > 0.3

    def run(mask):
        for x in (None, seen):
            memory = decoder.attention.prepare(source, torch.tensor([9, 4, 6]), x)
            state = decoder.initial(words[:, 0].new_zeros(3, 12))
            output, state, weights = decoder(words, state, memory, True, mask)
            yield [output, weights, *state.history]

    served_so, without = list(run(there)), list(run(None))
    monkeypatch.setattr(layer_code, "backend_of", lambda *_, **__: None)
    torch.testing.assert_close(served_so, list(run(there)))
    assert not torch.allclose(served_so[0][2], without[0][2])


def test_a_history_that_does_not_fit():
    layer, x, source, lengths = layer_and_inputs(attn.AttentionGRU, "location")
    memory = layer.prepare(source, lengths)
    _, state = layer(x, memory)
    short = state.history._replace(coverage=state.history.coverage[:2])
    with pytest.raises(ValueError, match=r"coverage must be \[3, 9\], got \[2, 9\]"):
        layer(x, memory, state._replace(history=short))
    with pytest.raises(TypeError, match="history must be a History or None"):
        layer(x, memory, state._replace(history=1))


@pytest.mark.parametrize("slope", [1.0, 1.3])
def test_a_window_moves_on_from_call_to_call(slope):
    layer, x, source, lengths = layer_and_inputs(attn.AttentionLSTM, "window")
    layer.attention.slope = slope
    memory = layer.prepare(source, lengths)
    whole = layer(x, memory, need_weights=True)
    state, weights = None, []
    for part in x.split([2, 1, 4], 1):
        result = layer(part, memory, state, need_weights=True)
        state, weights = result.state, [*weights, result.weights]
    torch.testing.assert_close(torch.cat(weights, 1), whole.weights)
    seen = whole.weights[0] > 0
    centre = slope * torch.arange(x.shape[1])[:, None]
    assert torch.equal(seen, (torch.arange(source.shape[1]) - centre).abs() <= 2)


def test_a_window_with_a_stride_is_kept():
    layer, x, source, lengths = layer_and_inputs(attn.AttentionGRU, "window")
    layer.attention.span = attnfast.Span(window=4, stride=2)
    found = layer(x, layer.prepare(source, lengths), need_weights=True).weights
    layer.attention.backend = "reference"
    wanted = layer(x, layer.prepare(source, lengths), need_weights=True).weights
    torch.testing.assert_close(found, wanted)


def test_a_window_that_wants_all_rows_says_so():
    layer, x, source, _ = layer_and_inputs(attn.AttentionGRU, "window")
    layer.attention.slope = None
    with pytest.raises(ValueError, match="slope must be a number"):
        layer(x, layer.prepare(source))


def test_layers_above_the_first_read_its_contexts():
    layer, x, source, lengths = layer_and_inputs(attn.AttentionGRU, "bahdanau", num_layers=3)
    result = layer(x, layer.prepare(source, lengths))
    assert result.state.hidden.shape == (3, 3, 12)
    states = attn.AttentionGRU(6, 12, 10, layer.attention).double()
    states.load_state_dict(
        {k: v for k, v in layer.state_dict().items() if "_l1" not in k and "_l2" not in k}
    )
    memory = layer.prepare(source, lengths)
    y = states(x, memory).output
    for number in (1, 2):
        above = nn.GRU(22, 12, batch_first=True).double()
        names = [f"{x}_l{number}" for x in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        above.load_state_dict({f"{n[:-1]}0": getattr(layer, n) for n in names})
        y = above(torch.cat([y, result.contexts], -1))[0]
    torch.testing.assert_close(result.output, y)
    state, outputs = None, []
    for part in x.split(1, 1):
        output, state = layer(part, memory, state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), result.output)


@torch.no_grad()
def test_modules_that_are_more_than_their_parameters_are_called():
    layer, x, source, lengths = layer_and_inputs(
        attn.AttentionGRU, "bahdanau", recurrence="input_feeding"
    )
    memory, hidden = layer.prepare(source, lengths), layer.output_proj.in_features
    plain = layer(x, memory).output
    layer.output_proj = nn.Linear(hidden, 12).double()  # a bias that nobody foresaw
    layer.output_proj.bias.fill_(1.0)
    whole, state = layer(x, memory).output, None
    for t, part in enumerate(x.split(1, 1)):
        step, state = layer(part, memory, state)
        torch.testing.assert_close(step[:, 0], whole[:, t])
    assert not torch.allclose(plain, whole)
    for module in (layer.output_proj, layer.attention, layer.attention.query_proj):
        calls: list[object] = []
        hook = module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        torch.testing.assert_close(layer(x, memory).output, whole)
        assert len(calls) == x.shape[1]
        hook.remove()


@torch.no_grad()
def test_packed_weights_are_those_of_the_parameters():
    layer, x, source, lengths = layer_and_inputs(attn.AttentionGRU, "bahdanau")
    memory = layer.prepare(source, lengths)
    _, state = layer(x[:, :1], memory)
    for _ in range(20):  # a new parameter may come to lie where the last one did
        layer.weight_hh_l0 = nn.Parameter(torch.randn_like(layer.weight_hh_l0))
        got, fresh = (layer(x[:, :1], memory, s)[0] for s in (state, state._replace(packed=None)))
        assert torch.equal(got, fresh)
        _, state = layer(x[:, :1], memory, state)
    assert pickle.loads(pickle.dumps(state)).packed is None


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.GRU])
def test_a_loops_weights_load(kind):
    loop = kind(16, 12).double()
    layer, x, source, lengths = layer_and_inputs(attn.AttentionGRU, "bahdanau")
    missing, unexpected = layer.load_state_dict(loop.state_dict(), strict=False)
    assert not unexpected and all(name.startswith("attention.") for name in missing)
    memory, h, states = layer.prepare(source, lengths), x.new_zeros(3, 12), []
    for word in x.unbind(1):
        context, _ = layer.attention(h, memory)
        word = torch.cat([word, context], -1)
        h = loop(word, h) if kind is nn.GRUCell else loop(word[None], h[None])[1][0]
        states.append(h)
    torch.testing.assert_close(layer(x, memory).output, torch.stack(states, 1))


@pytest.mark.parametrize("lengths", [None, torch.tensor([7, 1, 4])])
@pytest.mark.parametrize(("layers", "both_ways"), [(1, False), (1, True), (3, True)])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_pytorchs_layers_in_the_operator(kind, layers, both_ways, lengths):
    if why_not("cpu", CPU, torch.float64, "recurrent"):
        pytest.skip("no operator")
    rnn = kind(6, 9, layers, batch_first=True, bidirectional=both_ways).double()
    x = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    h, c = torch.randn(2, layers * (1 + both_ways), 3, 9, dtype=torch.float64)
    hx = (h, c) if kind is nn.LSTM else h
    done = layer_code.run_rnn(rnn, x, hx, lengths)
    if kind is nn.LSTM and lengths is None:
        assert done is None  # PyTorch's own is as quick
        return
    given = x
    if lengths is not None:
        given = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
    wanted = rnn(given, hx)
    if lengths is not None:
        padded, _ = nn.utils.rnn.pad_packed_sequence(wanted[0], batch_first=True, total_length=7)
        wanted = padded, wanted[1]
    torch.testing.assert_close(done, wanted)
    noise, leaves = torch.randn_like(done[0]), [x, *rnn.parameters()]
    grads = [torch.autograd.grad(y[0], leaves, noise) for y in (done, wanted)]
    torch.testing.assert_close(*grads)
    assert layer_code.run_rnn(rnn, x, hx, lengths, "reference") is None
    rnn.register_forward_hook(lambda *_: None)
    assert layer_code.run_rnn(rnn, x, hx, lengths) is None


def test_a_search_reorders_the_state():
    layer, x, source, lengths = layer_and_inputs(
        attn.AttentionLSTM, "coverage", recurrence="input_feeding"
    )
    memory, index = layer.prepare(source, lengths), torch.tensor([2, 0])
    _, state = layer(x[:, :2], memory)
    chosen, _ = layer(x[index, 2:], memory.index_select(index), state.index_select(index))
    whole, _ = layer(x[:, 2:], memory, state)
    torch.testing.assert_close(chosen, whole[index])


@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("kind", [attn.AttentionGRU, attn.AttentionLSTM])
@torch.no_grad()
def test_steps_of_a_search_pack_once(kind, recurrence):
    if why_not("cpu", CPU, torch.float64, "recurrent"):
        pytest.skip("no backend that packs")
    layer, x, source, lengths = layer_and_inputs(kind, "bahdanau", recurrence=recurrence)
    memory = layer.prepare(source, lengths)
    for _ in range(2):
        state, outputs, kept = None, [], []
        for part in x.split(1, 1):
            output, state = layer(part, memory, state)
            outputs.append(output)
            kept.append(state.packed[0].kept)
        assert all(y is kept[0] for y in kept)
        torch.testing.assert_close(torch.cat(outputs, 1), layer(x, memory).output)
        layer.weight_hh_l0.mul_(0.5)
        changed, after = layer(x[:, :1], memory, state)  # packs again
        assert after.packed[0].kept is not kept[0]
        again, _ = layer(x[:, :1], memory, state._replace(packed=None))
        assert torch.equal(changed, again)


def test_recurrent_dropout_is_one_mask_a_call():
    layer, x, source, lengths = layer_and_inputs(
        attn.AttentionGRU, "bahdanau", recurrent_dropout=0.5
    )
    memory = layer.prepare(source, lengths)
    torch.manual_seed(1)
    first = layer(x, memory).output
    torch.manual_seed(1)
    assert torch.equal(layer(x, memory).output, first)
    assert not torch.equal(layer(x, memory).output, first)
    layer.eval()
    assert torch.equal(layer(x, memory).output, layer(x, memory).output)


@pytest.mark.parametrize(
    ("recurrence", "attention"),
    [
        *((x, "bahdanau") for x in RECURRENCES[1:]),
        ("attend_first", "learned penalty"),
        ("input_feeding", "location"),
    ],
)
def test_compile(recurrence, attention):
    layer, x, source, lengths = layer_and_inputs(
        attn.AttentionGRU, attention, recurrence=recurrence
    )

    def loss(x, source):
        output, state = layer(x, layer.prepare(source, lengths))
        past = state.history.loss.sum() if state.history else 0
        return output.sin().sum() + state.hidden.sum() + past

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for T in (7, 4):
        part = x[:, :T].detach().requires_grad_()
        leaves = [part, source, layer.weight_ih_l0, layer.attention.key_proj.weight]
        for a, b in zip(
            torch.autograd.grad(compiled(part, source), leaves),
            torch.autograd.grad(loss(part, source), leaves),
        ):
            torch.testing.assert_close(a, b)


@torch.no_grad()
def test_export():
    """With sizes that are not known."""
    layer, x, source, _ = layer_and_inputs(attn.AttentionGRU, "bahdanau")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, source):
            return self.layer(x, self.layer.prepare(source))[0]

    b, t, k = (torch.export.Dim(name, min=2, max=64) for name in "btk")
    shapes = ({0: b, 1: t}, {0: b, 1: k})
    exported = torch.export.export(Model(), (x, source), dynamic_shapes=shapes, strict=False)
    other = x.new_ones(5, 4, 6), x.new_ones(5, 3, 10)
    torch.testing.assert_close(exported.module()(*other), Model()(*other))


def test_memory_changed_in_place_is_refused():
    layer, x, source, lengths = layer_and_inputs(attn.AttentionGRU, "bahdanau")
    memory = layer.prepare(source, lengths)
    memory.lengths.fill_(1)
    with pytest.raises(RuntimeError, match="lengths"):
        layer(x, memory)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"input_size": 0}, "input_size must be at least 1, got 0"),
        ({"recurrence": "luong"}, "recurrence must be 'attend_first', "),
        ({"num_layers": 2, "recurrence": "input_feeding"}, "num_layers must be 1 with input"),
        ({"output_size": 3}, "output_size must be None without input feeding, got 3"),
        ({"dropout": 1.0}, "dropout must be a probability below 1, got 1.0"),
        ({"attention": nn.Linear(2, 2)}, "attention must be a module of attnfast.nn, got 'Linear'"),
        ({"attention": "bahdanau"}, "attention must be a module of attnfast.nn, got 'bahdanau'"),
    ],
)
def test_a_layer_that_cannot_be(options, words):
    sizes = {"input_size": 6, "hidden_size": 12, "context_size": 10}
    attention = {"attention": ATTENTIONS["general"]()}
    with pytest.raises((ValueError, TypeError), match=words):
        attn.AttentionGRU(**{**sizes, **attention, **options})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: {**a, "input": a["input"][0]}, r"input must be \[B, T, 6\], got \[7, 6\]"),
        (lambda a: {**a, "input": a["input"].float()}, "input must be of the module's dtype"),
        (lambda a: {**a, "input": a["input"][:2]}, "memory must be of 2 sources"),
        (lambda a: {**a, "memory": a["input"]}, "memory must be what prepare"),
        (lambda a: {**a, "hx": torch.zeros(3, 12)}, r"hx.hidden must be \[1, 3, 12\]"),
        (lambda a: {**a, "hx": "none"}, "hx must be a tensor"),
        (lambda a: {**a, "hx": torch.zeros(1, 3, 12)}, "hx.hidden must be torch.float64 on cpu"),
        (lambda a: {**a, "hx": (a["input"].new_zeros(1, 3, 12),) * 2}, "hx.cell must be None"),
        (lambda a: {**a, "target_lengths": torch.tensor([8, 1, 1])}, "target_lengths must be betw"),
        (lambda a: {**a, "target_lengths": torch.zeros(3)}, "target_lengths must be int64"),
        (lambda a: {**a, "need_weights": "all"}, "need_weights must be True or False"),
    ],
)
def test_a_call_that_cannot_be(change, words):
    layer, x, source, lengths = layer_and_inputs(attn.AttentionGRU, "bahdanau")
    arguments = {"input": x, "memory": layer.prepare(source, lengths)}
    with pytest.raises((ValueError, TypeError), match=words):
        layer(**change(arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", ["bahdanau", "general", "coverage", "window"])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_half_types_are_summed_in_float32(recurrence, attention, dtype, monkeypatch):
    layer, x, source, lengths = layer_and_inputs(
        attn.AttentionLSTM, attention, recurrence=recurrence
    )
    layer = layer.to(dtype).double()  # the numbers of a half type, exactly
    x, source = (y.detach().to(dtype).double() for y in (x, source))
    targets, grad = torch.tensor([7, 2, 5]), torch.randn(3, 7, 12).to(dtype)

    def run(kind):
        layer.to(kind)
        inputs = [y.to(kind).requires_grad_() for y in (x, source)]
        memory = layer.prepare(inputs[1], lengths)
        made = layer(inputs[0], memory, target_lengths=targets, need_weights=True)
        found = [made.output, made.contexts, made.weights, made.state.hidden, made.state.cell]
        assert all(y.dtype == kind for y in found)
        leaves = [*inputs, *layer.parameters()]
        grads = torch.autograd.grad(made.output, leaves, grad.to(kind))
        assert all(y.dtype == kind for y in grads)
        return [y.detach().double() for y in (*found, *grads)]

    calls, original = [], layer_code.dispatch.run
    monkeypatch.setattr(
        layer_code.dispatch, "run", lambda *call: calls.append(call[0].name) or original(*call)
    )
    ours, exact = run(dtype), run(torch.float64)
    if not why_not("cpu", CPU, torch.float32, "recurrent"):
        assert calls.count("recurrent") == 2
    monkeypatch.setattr(layer_code, "backend_of", lambda *_, **__: None)
    loop = run(dtype)
    for got, eager, want in zip(ours, loop, exact):
        ulp = torch.finfo(dtype).eps * float(want.abs().max())
        assert float((got - want).abs().max()) <= max(ulp, 2 * float((eager - want).abs().max()))


@pytest.mark.skipif(why_not("cpu", CPU, torch.float32, "recurrent") is not None, reason="no _C_cpu")
def test_steps_of_a_half_type_keep_weights_packed():
    layer, x, source, lengths = layer_and_inputs(attn.AttentionGRU, "bahdanau")
    layer.bfloat16()
    with torch.no_grad():
        memory = layer.prepare(source.bfloat16(), lengths)
        first = layer(x[:, :1].bfloat16(), memory).state
        second = layer(x[:, 1:2].bfloat16(), memory, first).state
        assert second.packed[0] is first.packed[0]
        layer.weight_hh_l0.mul_(2)
        assert layer(x[:, 1:2].bfloat16(), memory, first).state.packed[0] is not first.packed[0]
