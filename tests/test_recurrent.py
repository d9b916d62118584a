"""A recurrent layer that attends: one operator, its oracle, and the modules on top."""

import functools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

import pytest
import torch
from attention_cases import CPU, DEVICE, check, devices, size
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from attnfast._utils.benchmark import peak_memory
from attnfast.nn import _fused_rnn as layer_code
from attnfast.ops import reference
from attnfast.ops.backends import unsupported_reason
from attnfast.ops.operators import CHECKS
from attnfast.ops.recurrent import (
    GATES,
    RECURRENT,
    WEIGHTS,
    RecurrentBackward,
    RecurrentInputs,
    RecurrentOutputs,
)

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
#: Layers above the first; "targets" and the others go with them.
STACK = ("stack", "dropout above", "dropout of output")
#: Dropout of every step alone.
MASKS = (
    "dropout of state", "dropout of query", "dropout of feed", "dropout of joined",
    "dropout of output", "dropout of cell",
)  # fmt: skip
#: Weights of which many are 0.
SPARSE = ("sparsemax", "entmax15")
#: A gate on the context, and attentional vectors without a tanh.
OUTPUTS = ("gate", "identity")
#: With "sigmoid" the weights of a history are normalised sigmoids, with "detached" it is cut.
#: With "past" attention has a history, and no span; with "unread" no gradient comes for contexts.
PAST = ("past", "filters", "penalty", "fertility", "transition")
OF_HISTORY = (
    "filters", "projection", "penalty", "inverse_fertility", "transition_prob", "coverage",
    "previous",
)  # fmt: skip
FILTERS = ((1, 2, 1), (4, 1, 3), (33, 2, 5))  # the first is a coverage feature's


def call(case: Case, device: torch.device = CPU) -> RecurrentInputs:
    """Return the arguments of a case, leaves that require gradients; "narrow" makes weights so."""
    args = _wide_call(case, device)
    return as_bfloat16(args, WEIGHTS) if "narrow" in case.terms else args


def as_bfloat16(args: Any, names: Iterable[str]) -> Any:
    """Return a call with those of its arguments in bfloat16."""
    given = [(x, getattr(args, x, None)) for x in names]
    changed = {
        name: x.detach().bfloat16().requires_grad_(x.requires_grad)
        for name, x in given
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    return args._replace(**changed)


def _wide_call(case: Case, device: torch.device) -> RecurrentInputs:
    g = torch.Generator().manual_seed(case.seed)
    B, T, E, H, Tk, Dv = case.B, case.T, case.E, case.H, case.Tk, case.Dv
    terms, G = case.terms, GATES[case.mode]
    A = case.A if "projection" in terms else H
    feeds = case.recurrence == "input_feeding"
    F = 0 if case.recurrence is None else case.F if feeds else Dv
    layers = (2 + case.seed % 2,) if "stack" in terms else ()

    def floats(*shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape, generator=g, dtype=torch.float64) * scale
        return x.to(device, case.dtype).requires_grad_()

    def mask(*shape: int) -> Tensor:
        return ((torch.rand(shape, generator=g) > 0.3) / 0.7).to(device, case.dtype)

    args: dict = {
        "input": floats(B, T, E),
        "hidden": floats(*layers, B, H),
        "weight_ih": floats(G * H, E + F, scale=(E + F) ** -0.5 if E + F else 1),
        "weight_hh": floats(
            *layers, G * H, H, scale=0.6 * max(H, 1) ** -0.5
        ),  # so that no error grows
        "mode": case.mode,
        "attends_first": case.recurrence in ("attend_first", None),
    }
    if case.mode == "lstm":
        args["cell"] = floats(*layers, B, H)
    if "biases" in terms:
        args |= {x: floats(*layers, G * H) for x in ("bias_ih", "bias_hh")}
    if "targets" in terms:
        args["target_lengths"] = torch.randint(0, T + 1, (B,), generator=g).to(device)
    if "dropout" in terms:
        args["dropout"] = mask(*layers, B, H)
    if "dropout of state" in terms:
        args["dropout_state"] = mask(*layers, B, T, H)
    if "dropout of cell" in terms and case.mode == "lstm":
        args["dropout_cell"] = mask(*layers, B, T, H)
    args["zoneout"] = "zoneout" in terms
    if "stack" in terms:
        args["weight_ih_upper"] = floats(layers[0] - 1, G * H, H, scale=max(H, 1) ** -0.5)
        if "dropout above" in terms:
            args["dropout_between"] = mask(layers[0] - 1, B, T, H)
    if case.recurrence is None:
        return RecurrentInputs(**args)
    args |= {"key": floats(B, Tk, A), "value": floats(B, Tk, Dv), "score": case.score}
    args["scale"] = 0.7
    if case.score != "dot":
        args["score_vector"] = floats(A, scale=2 / max(A, 1) ** 0.5)
    if "projection" in terms:
        args["weight_query"] = floats(A, H, scale=max(H, 1) ** -0.5)
        args["bias_query"] = floats(A) if "biases" in terms else None
    if feeds:
        args["weight_output"] = floats(F, Dv + H, scale=max(Dv + H, 1) ** -0.5)
        args["bias_output"] = floats(F) if "biases" in terms else None
        args["dropout_output"] = mask(B, T, F) if "dropout of output" in terms else None
        args["dropout_joined"] = mask(B, T, Dv + H) if "dropout of joined" in terms else None
    args["dropout_query"] = mask(B, T, H) if "dropout of query" in terms else None
    args["dropout_feed"] = mask(B, T, F) if "dropout of feed" in terms else None
    args["output_activation"] = "identity" if "identity" in terms else "tanh"
    if "gate" in terms:
        args["weight_gate"] = floats(Dv, H, scale=max(H, 1) ** -0.5)
        args["bias_gate"] = floats(Dv) if "biases" in terms else None
    if "feed" in terms and not args["attends_first"]:
        args["feed"] = floats(B, F)
    if "lengths" in terms:
        args["lengths"] = torch.randint(0, Tk + 1, (B,), generator=g).to(device)
    if "mask" in terms:
        rows = (B, T) if case.seed % 2 else (1, 1)
        args["mask"] = (torch.rand(*rows, Tk, generator=g) > 0.3).to(device)
    if "past" in terms:
        return RecurrentInputs(**args, **past(case, g, A, device))
    if "span" in terms:
        first = torch.randint(-2, Tk + 1, (B if case.seed % 2 else 1, T, 1), generator=g)
        args["key_bounds"] = torch.cat([first, first + 4], -1).to(device)
    [args["normalisation"]] = [x for x in SPARSE if x in terms] or ["softmax"]
    return RecurrentInputs(**args)


def past(case: Case, g: torch.Generator, A: int, device: torch.device) -> dict[str, Any]:
    """Return what a history adds to the arguments."""
    keys, (K, channels, width) = (case.B, case.Tk), FILTERS[case.seed % 3]
    made = {x: torch.rand(keys, generator=g, dtype=torch.float64) for x in ("coverage", "previous")}
    if "transition" in case.terms:
        made["previous"] = (made["previous"] + 0.5).log()
    if "filters" in case.terms and case.score != "dot":
        of = torch.randn(K, channels, width, generator=g, dtype=torch.float64)
        made["filters"] = of * (channels * width) ** -0.5
        made["projection"] = torch.randn(A, K, generator=g, dtype=torch.float64) * K**-0.5
    if "penalty" in case.terms:
        made["penalty"] = torch.randn(1, generator=g, dtype=torch.float64) * 0.5
    if "fertility" in case.terms:
        made["inverse_fertility"] = 0.5 + torch.rand(keys, generator=g, dtype=torch.float64)
    if "transition" in case.terms:
        chance = torch.rand(case.B, case.T, generator=g, dtype=torch.float64)
        made["transition_prob"] = 0.05 + 0.9 * chance  # its gradient is divided by u or 1 − u
    tensors = {name: x.to(device, case.dtype).requires_grad_() for name, x in made.items()}
    return {
        **tensors,
        "normalisation": "sigmoid" if "sigmoid" in case.terms else "softmax",
        "detach_history": "detached" in case.terms,
    }


def doubled(args: RecurrentInputs) -> RecurrentInputs:
    """Return the same numbers in float64."""
    kept = {
        name: x.detach().double().requires_grad_(x.requires_grad)
        for name, x in args._asdict().items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    return args._replace(**kept)


def results(case: Case, args: RecurrentInputs, run) -> dict[str, Tensor]:
    """Return what ``run`` makes of a call, and the gradients of a random sum of it."""
    made = run(args)
    g = torch.Generator().manual_seed(case.seed + 1)
    outputs = []
    names = ("states", "cells", "contexts", "weights", "attentional", "coverage", "loss")
    for name in (*names, "log_weights"):
        x = getattr(made, name)
        noise = torch.randn(x.shape, generator=g, dtype=torch.float64).bfloat16()
        noise = noise.masked_fill(x.cpu() == -math.inf, 0)
        unread = name == "contexts" and "unread" in case.terms
        if x.requires_grad and x.numel() and not unread:
            outputs.append((x, noise.to(x.device, x.dtype)))
    leaves = {n: x for n, x in args._asdict().items() if isinstance(x, Tensor) and x.requires_grad}
    found = {name: x.detach() for name, x in made._asdict().items()}
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
    asked = DEVICE[backend], dtype, "recurrent", False, 0, "past" in terms
    if reason := unsupported_reason(backend, *asked):
        pytest.skip(f"{backend}: {reason}")
    if {*SPARSE} & {*terms} and backend != "cpu":
        pytest.skip(f"{backend}: its kernels support only softmax")
    if "narrow" in terms and backend != "cpu":
        pytest.skip(f"{backend}: weights are of the numbers' dtype")


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

    What it loses in a single call is luck: see table.nearby. Beside weights of bfloat16 all that
    eager code has is of bfloat16.
    """

    def plain_of(args: RecurrentInputs) -> RecurrentInputs:
        narrow = [x for x in args._fields if "narrow" in case.terms and x not in OF_HISTORY]
        return as_bfloat16(args, narrow)

    for device in devices():
        yield results(case, plain_of(call(case, device)), reference.recurrent)
    for seed in range(12):
        g, kept = torch.Generator().manual_seed(seed), {}
        for name, x in call(case)._asdict().items():
            if isinstance(x, Tensor) and x.requires_grad:
                noise = torch.randn(x.shape, generator=g, dtype=x.dtype)
                kept[name] = (x.detach() * (1 + 1e-3 * noise)).requires_grad_()
        near = call(case)._replace(**kept)
        plain = results(case, plain_of(near), reference.recurrent)
        exact = results(case, doubled(near), reference.recurrent)
        yield {k: want + plain[k].double() - exact[k] for k, want in wanted.items()}


CASES = [
    *(
        Case(mode, recurrence, score, terms=terms, seed=seed)
        for mode in GATES
        for recurrence in RECURRENCES
        for seed, (score, terms) in enumerate(
            [
                ("dot", ()),
                ("dot", ("projection", "targets", "unread")),
                ("tanh", EVERYTHING),
                ("tanh", (*EVERYTHING, "unread")),
            ]
        )
    ),
    *(Case(mode, None, terms=("targets", "dropout", "biases"), H=70) for mode in GATES),
    *(Case("gru", x, "relu", B=37, H=33, A=65, Dv=40, F=70, terms=EVERYTHING) for x in RECURRENCES),
    *(Case("lstm", x, "tanh", B=1, T=9, H=100, Tk=150, A=64, Dv=64, F=64) for x in RECURRENCES),
    *(Case("gru", x, "tanh", 2, 40, 1, 1, 1, 1, 1, 1, terms=EVERYTHING) for x in RECURRENCES),
    *(
        Case("gru", x, "tanh", **{size: 0})
        for x in RECURRENCES[1:]
        for size in ("B", "T", "Tk", "Dv", *["F"] * (x == "input_feeding"))
    ),
    *(  # f much wider than a context
        Case(mode, "input_feeding", score, B=37, T=3, Dv=33, F=70, terms=terms)
        for mode, score, terms in (("gru", "tanh", EVERYTHING), ("lstm", "dot", ()))
    ),
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
                ("tanh", (*PAST, "detached")),
            ]
        )
    ),
    *(
        Case(mode, x, score, terms=(*EVERYTHING, "past", "sigmoid", *terms), seed=seed)
        for mode, score, terms, seed in (
            ("gru", "tanh", ("filters", "penalty", "fertility"), 0),
            ("lstm", "tanh", ("filters", "detached"), 2),
            ("lstm", "dot", ("penalty",), 1),
        )
        for x in RECURRENCES
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
    *(
        Case(mode, recurrence, score, terms=(*terms, *STACK), seed=seed)
        for mode in GATES
        for recurrence in RECURRENCES
        for seed, (score, terms) in enumerate([("dot", ()), ("tanh", EVERYTHING)])
    ),
    *(Case(mode, None, terms=("targets", "dropout", "biases", *STACK), H=70) for mode in GATES),
    *(
        Case("lstm", x, "tanh", 37, 6, 5, 65, 30, 40, 33, 20, (*EVERYTHING, *STACK, *more), seed=1)
        for x in RECURRENCES
        for more in ((), ("narrow",), PAST)
    ),
    *(
        Case(mode, recurrence, score, terms=(*terms, *MASKS), seed=seed)
        for mode in GATES
        for recurrence in RECURRENCES
        for seed, (score, terms) in enumerate([("dot", ()), ("tanh", EVERYTHING)], 1)
    ),
    *(
        Case("lstm", x, "tanh", 37, 6, 5, 65, 30, 40, 33, 20, (*EVERYTHING, *MASKS, *more), seed=1)
        for x in RECURRENCES
        for more in (STACK, ("narrow",), PAST)
    ),
    *(Case(mode, None, terms=("dropout of state", "targets"), H=70) for mode in GATES),
    *(
        Case(mode, x, "tanh", terms=(*terms, "zoneout", "dropout of state", "dropout of cell"))
        for mode in GATES
        for x in (None, "attend_first")
        for terms in ((), ("targets", "dropout", "stack"))
    ),
    Case("lstm", None, H=70, terms=("dropout of cell", "zoneout", "targets")),
    *(
        Case("lstm", x, score, terms=(*terms, normalisation), seed=seed, Tk=40)
        for x in RECURRENCES
        for normalisation in SPARSE
        for seed, (score, terms) in enumerate(
            [("dot", ()), ("tanh", EVERYTHING), ("tanh", (*EVERYTHING, "unread", *STACK))]
        )
    ),
    *(
        Case(mode, recurrence, score, terms=(*terms, *OUTPUTS), seed=seed)
        for mode in GATES
        for recurrence in RECURRENCES
        for seed, (score, terms) in enumerate(
            [("dot", ()), ("relu", EVERYTHING), ("tanh", (*EVERYTHING, *MASKS, "unread"))]
        )
    ),
    *(
        Case(
            "lstm", x, "tanh", 37, 6, 5, 65, 30, 40, 33, 20, (*EVERYTHING, *OUTPUTS, *more), seed=1
        )
        for x in RECURRENCES
        for more in (STACK, ("narrow",), PAST)
    ),
    *(
        Case("lstm", x, "tanh", 3, 4, terms=(*terms, "zoneout", *MASKS, *OUTPUTS), seed=seed)
        for x in RECURRENCES
        for seed, terms in enumerate([PAST, STACK, (*EVERYTHING, *PAST), (*EVERYTHING, *STACK)])
    ),
    *(Case("gru", "input_feeding", "tanh", terms=(x, "biases")) for x in (*MASKS, *OUTPUTS)),
    *(
        Case("gru", "input_feeding", "tanh", terms=(*EVERYTHING, *OUTPUTS), **{size: 0})
        for size in ("B", "T", "Tk", "Dv", "F")
    ),
    *(
        Case("gru", "input_feeding", "tanh", terms=(*EVERYTHING, *STACK, *MASKS), **{size: 0})
        for size in ("B", "T", "Tk", "Dv")
    ),
    Case("gru", "attend_first", "tanh", B=2, T=3, Tk=9, A=200, H=600, E=300, Dv=520),
    *(
        Case(mode, x, "tanh", B=11, E=17, H=34, F=33, terms=(*EVERYTHING, "narrow"))
        for mode in GATES
        for x in RECURRENCES
    ),
    Case("gru", "attend_first", "tanh", 13, 3, 301, 600, 9, 200, 1100, terms=("narrow",)),
    Case("lstm", None, H=70, terms=("narrow", "biases")),
    Case("tanh", None, B=3, T=11, H=1, terms=("narrow",)),  # a left factor of one column
    Case("lstm", "attend_last", "tanh", terms=("narrow", "projection", *PAST)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_table(case, backend):
    served(backend, case.dtype, case.terms)
    judge(case, backend)


def fuzz(seed: int, count: int, backend: str) -> Iterator[Case]:
    """Yield seeded random cases, a size 0 now and then."""
    draw = random.Random(seed)
    draw_size = functools.partial(size, draw)
    every = (
        *EVERYTHING,
        "unread",
        *STACK,
        *PAST,
        *OUTPUTS,
        *(x for x in (*MASKS, "zoneout") if x not in STACK),
        *([] if backend == "cuda" else ["narrow"]),
    )
    for _ in range(count):
        case = Case(
            draw.choice(list(GATES)),
            draw.choice((*RECURRENCES, None)),
            draw.choice(("dot", "tanh", "tanh", "relu", "leaky_relu")),
            B=draw_size(3, 40), T=draw_size(4, 12), Tk=draw_size(5, 70),
            **{x: draw_size(9, 70) for x in ("E", "H", "A", "Dv", "F")},
            terms=tuple(x for x in every if draw.random() < 0.4),
            dtype=draw.choice((torch.float32, torch.float32, torch.float64)),
            seed=draw.randint(0, 2**31),
        )  # fmt: skip
        if case.dtype == torch.float64:
            case = replace(case, terms=tuple(x for x in case.terms if x != "narrow"))
        if "narrow" in case.terms and case.score.endswith("relu"):
            case = replace(case, score="tanh")  # rounded across its kink, a relu's gradient jumps
        yield case


@pytest.mark.parametrize("seed", range(4))
def test_fuzz(seed, backend):
    served(backend, torch.float32)
    for case in fuzz(seed, 16, backend):
        judge(case, backend)  # a failure prints the case


def test_layouts_change_nothing(backend):
    served(backend, torch.float64)
    terms = (*EVERYTHING, *STACK, *MASKS, *OUTPUTS)
    for recurrence in RECURRENCES:
        case = Case("lstm", recurrence, "tanh", terms=terms, dtype=torch.float64)
        args = call(case, DEVICE[backend])
        turned = {
            name: x.detach().movedim(-1, 0).contiguous().movedim(0, -1).requires_grad_()
            for name, x in args._asdict().items()
            if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1
        }
        made, others = (
            results(case, x, operator(backend)) for x in (args, args._replace(**turned))
        )
        for name, x in made.items():
            torch.testing.assert_close(others.get(name, x), x, msg=name)


@pytest.mark.parametrize(
    ("score", "terms"),
    [("dot", ()), ("tanh", STACK), ("tanh", (*PAST, *STACK[1:])), ("tanh", OUTPUTS)],
)
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


@pytest.mark.parametrize(
    ("recurrence", "terms"),
    [
        *((x, ()) for x in RECURRENCES),
        ("input_feeding", STACK),
        ("attend_first", PAST),
        ("input_feeding", OUTPUTS),
    ],
)
def test_opcheck(recurrence, terms, backend):
    served(backend, torch.float32, terms)
    case = Case("lstm", recurrence, "tanh", terms=(*EVERYTHING, *terms))
    args = call(case, DEVICE[backend])
    torch.library.opcheck(RECURRENT.forwards[backend], tuple(args))
    made = RECURRENT(backend, args)
    torch.library.opcheck(RECURRENT.backwards[backend], tuple(backward_of(args, made)))


def backward_of(args: RecurrentInputs, made: RecurrentOutputs) -> RecurrentBackward:
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


@pytest.mark.parametrize("terms", [(), ("unread",), STACK, PAST, ("past", "penalty"), OUTPUTS])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_what_no_step_reads_changes_nothing(recurrence, terms, backend):
    """NaN beyond the keys' lengths and the targets' ends; NaN and infinities behind a mask."""
    if backend != "reference":
        served(backend, torch.float32, terms)
    terms = ("projection", "lengths", "targets", "mask", *terms)
    case = Case("gru", recurrence, "tanh", 4, terms=terms, seed=3)
    clean, poisoned = (call(case, DEVICE[backend]) for _ in range(2))
    with torch.no_grad():
        for x in (clean, poisoned):
            x.mask[..., :2] = False
        for x in (poisoned.key, poisoned.value):
            x[:, :2] = math.nan
        poisoned.value[:, 1] = math.inf
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


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_a_sequence_that_has_diverged_is_alone(recurrence, backend):
    if backend != "reference":
        served(backend, torch.float32)
    case = Case("gru", recurrence, "tanh", terms=("projection", "lengths"), seed=3)
    args = call(case, DEVICE[backend])
    poisoned = args.value.detach().clone()
    poisoned[1] = math.nan
    with torch.no_grad():
        a, b = (operator(backend)(args._replace(value=x)) for x in (args.value, poisoned))
    assert torch.isnan(b.contexts[1]).all() == (args.lengths[1] > 0)
    for name in ("states", "contexts", "weights", "attentional"):
        x, y = getattr(a, name), getattr(b, name)
        assert not x.numel() or torch.equal(x[::2], y[::2]), name


@pytest.mark.parametrize("terms", [(), STACK, PAST, ("past", "penalty")])
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


KINDS = {"tanh": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


@pytest.mark.parametrize("mode", GATES)
def test_a_stack_without_attention_is_pytorchs(mode, backend):
    served(backend, torch.float64, STACK)
    stack = KINDS[mode](5, 7, 3, batch_first=True).double()
    stack = stack.to(DEVICE[backend])
    x, zeros = (
        y.double().to(DEVICE[backend]) for y in (torch.randn(4, 6, 5), torch.zeros(3, 4, 7))
    )
    names = ("weight_hh", "bias_ih", "bias_hh")
    of_all = {n: torch.stack([getattr(stack, f"{n}_l{i}") for i in range(3)]) for n in names}
    above = torch.stack([stack.weight_ih_l1, stack.weight_ih_l2])
    cell = zeros if mode == "lstm" else None
    made = operator(backend)(
        RecurrentInputs(
            x, zeros, stack.weight_ih_l0, cell=cell, weight_ih_upper=above, mode=mode, **of_all
        )
    )
    wanted, last = stack(x)
    torch.testing.assert_close(made.states[-1], wanted)
    for y, z in zip((made.states, made.cells), last if cell is not None else (last,)):
        torch.testing.assert_close(y[:, :, -1], z)


@pytest.mark.parametrize("mode", GATES)
def test_without_attention_it_is_pytorchs_layer(mode, backend):
    served(backend, torch.float64)
    layer = KINDS[mode](5, 7, batch_first=True).double()
    x, lengths = torch.randn(4, 6, 5, dtype=torch.float64), torch.tensor([6, 2, 1, 4])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
    wanted, last = layer(packed)
    wanted, _ = nn.utils.rnn.pad_packed_sequence(wanted, batch_first=True)
    zeros = x.new_zeros(4, 7)
    args = RecurrentInputs(
        x, zeros, layer.weight_ih_l0, layer.weight_hh_l0, zeros if mode == "lstm" else None,
        None, layer.bias_ih_l0, layer.bias_hh_l0, target_lengths=lengths, mode=mode,
    )  # fmt: skip
    made = operator(backend)(tree_map_only(Tensor, lambda x: x.to(DEVICE[backend]), args))
    torch.testing.assert_close(made.states.cpu(), wanted)
    last = last if mode == "lstm" else (last,)
    for x, y in zip((made.states, made.cells), last):
        torch.testing.assert_close(layer_code.last_of(x.cpu(), zeros, lengths), y[0])


def test_invalid_calls(backend):
    """What the operator's check refuses the compiled operator refuses, and nothing else."""
    served(backend, torch.float32)
    draw, counts = random.Random(0), [0, 0]
    for seed in range(900):
        every = (*EVERYTHING, *PAST, *STACK, "narrow", *MASKS, "sparsemax")
        terms = tuple(x for x in every if draw.random() < 0.6)
        lone = (*SPARSE, "narrow")
        terms = tuple(x for x in terms if x not in lone or backend == "cpu")
        kind = draw.choice(list(GATES)), draw.choice((*RECURRENCES, None))
        case = Case(*kind, draw.choice(("dot", "tanh")), terms=terms, seed=seed)
        args = call(case, DEVICE[backend])
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
            x = x.new_zeros(grown)
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
    short = call(Case("gru", "attend_first"), DEVICE[backend])
    short = short._replace(packed=short.hidden.new_zeros(64, dtype=torch.uint8))
    assert "packed" in refusal(RECURRENT.forwards[backend], short)
    if backend != "cuda":
        given = call(Case("gru", "attend_first", "tanh", terms=("past",)))
        given = given._replace(key_bounds=torch.zeros(1, 1, 2, dtype=torch.int64).expand(3, 5, 2))
        for function in (CHECKS["recurrent"], RECURRENT.forwards[backend]):
            assert "key_bounds" in refusal(function, given)
        alone = call(Case("gru", "attend_last"))
        masks = {"dropout_output": 0, "dropout_cell": alone.hidden.shape[-1]}
        for name, columns in masks.items():
            given = alone._replace(**{name: torch.ones(*alone.input.shape[:2], columns)})
            for function in (CHECKS["recurrent"], RECURRENT.forwards[backend]):
                assert name in refusal(function, given)
        stack = call(Case("gru", None, terms=("stack",)))
        of_one = {x: getattr(stack, x)[:1] for x in ("hidden", "weight_hh")}
        single = stack._replace(**of_one, weight_ih_upper=stack.weight_ih_upper[:0])
        for function in (CHECKS["recurrent"], RECURRENT.forwards[backend]):
            assert "hidden" in refusal(function, single)


def refusal(function, args) -> str | None:
    try:
        function(*args)
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        return str(error)
    return None


@pytest.mark.cpu_library
def test_memory_of_a_history_does_not_grow_with_the_hidden_size():
    """The filters' gradients are in parts for each sequence, not for each of its hidden units."""

    def backward(H: int) -> int:
        terms = ("projection", "past", "filters")
        args = call(
            Case("gru", "attend_first", "tanh", B=4, T=2, E=2, H=H, A=64, seed=2, terms=terms)
        )
        made = backward_of(args, operator("cpu")(args))
        return peak_memory(lambda: RECURRENT.backward("cpu", made), CPU)

    parameters = 3 * 512 * (512 + 2 + Case.Dv) + 64 * 512  # and their gradients
    assert backward(512) - backward(8) < 4 * (2 * parameters + 4 * 512 * 100)
