"""What tests and benchmarks share: cases, inputs, eager code, and what "correct" means."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import attnfast
from attnfast.ops import reference
from attnfast.ops.arguments import SCORES
from attnfast.ops.attention import AttentionInputs
from attnfast.ops.backends import BACKENDS, unsupported_reason

CPU = torch.device("cpu")
DEVICE = {name: torch.device("cuda" if torch.cuda.is_available() else "cpu") for name in BACKENDS}
DEVICE["cpu"] = CPU

#: Error allowed whatever the eager code loses: absolute (half types are computed in float32), or in
#: units of eps · max|oracle| if more.
FLOOR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}
FLOOR_ULPS = {torch.float64: 4.0, torch.float32: 4.0, torch.bfloat16: 1.0, torch.float16: 1.0}
#: Times the eager code's own error; and root-mean-square error over root-mean-square oracle, where
#: eager code does not lose more.
FACTOR = 2.0
RMS = 5e-3


#: Sums over the keys of what adds up to 0 for a row, where all tanh are about as steep: noise, in
#: eager code too. A strict case judges them by the size of what is summed.
OF_KEYS = ("grad of query", "grad of coverage_weight")


#: Activations that kernels take as they stand.
PLAIN = SCORES[2:]


@dataclass(frozen=True)
class Case:
    """One call of attention; ``terms`` are among lengths, mask, bias."""

    score: str  # dot, or the activation of the additive score
    B: int
    Tq: int
    Tk: int
    A: int
    Dv: int
    H: int | None = None
    dtype: torch.dtype = torch.float32
    terms: tuple[str, ...] = ()
    layout: str = "contiguous"
    seed: int = 0
    scale: float = 1.0  # of queries and keys
    weight_per_head: bool = False
    positive: bool = False  # a weight from 0 to 1, as many draw it: large scores, one sign
    strict: bool = False  # judged without the absolute floor
    normalisation: str = "softmax"

    @property
    def heads(self) -> tuple[int, ...]:
        return () if self.H is None else (self.H,)

    @property
    def elements(self) -> int:
        sizes = (self.B, self.H or 1, self.Tq, self.Tk, max(self.A, self.Dv))
        return math.prod(max(x, 1) for x in sizes)  # Tk rows are read where there is no query


def small(case: Case) -> list[Case]:
    """Return the case with queries and keys near 0.

    Scores and their gradients are as small, so an absolute floor would hide all that they lose.
    """
    return [replace(case, scale=scale, strict=True) for scale in (1e-4, 1e-3, 1e-2, 1e-1)]


LENGTHS = (1, 2, 3, 5, 17, 63, 64, 65, 97, 127, 128, 129, 203, 257, 1023)
FEATURES = (1, 7, 8, 33, 59, 64, 72, 96, 111, 128, 203, 256, 512)
TERMS = [(), ("lengths",), ("mask",), ("bias",), ("lengths", "mask", "bias")]
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded")


def cases() -> list[Case]:
    """Return every length and feature count, both scores, all terms, layouts and dtypes."""
    draw = random.Random(0)
    terms, layouts = itertools.cycle(TERMS), itertools.cycle(LAYOUTS)
    table = []
    for score in ("dot", "tanh"):
        for Tq, Tk in zip(LENGTHS, draw.sample(LENGTHS, len(LENGTHS))):
            A, Dv = draw.choice(FEATURES), draw.choice(FEATURES)
            while Tq * Tk * max(A, Dv) > 4e6:
                A, Dv = draw.choice(FEATURES), draw.choice(FEATURES)
            table.append(
                Case(score, 2, Tq, Tk, A, Dv, None, terms=next(terms), layout=next(layouts))
            )
        for A in FEATURES:
            H = draw.choice((None, 1, 3))
            table.append(Case(score, 2, 5, 17, A, draw.choice(FEATURES), H, terms=next(terms)))
        table += [
            Case(score, 0, 3, 5, 8, 8),
            Case(score, 2, 0, 5, 8, 8),
            Case(score, 2, 3, 0, 8, 8),
            Case(score, 2, 3, 5, 8, 0),
            Case(score, 2, 3, 5, 0, 8),
            *(Case(score, 2, *sizes) for sizes in ((9, 0, 64, 64), (9, 5, 64, 0), (9, 5, 0, 64))),
            Case(score, 0, 9, 5, 64, 64),
            Case(score, 1, 0, 130, 7, 1),
            Case(score, 2, 3, 5, 8, 8, 4, weight_per_head=True),
            Case(score, 1, 1, 300, 64, 64, terms=("lengths",)),
        ]
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            for shape in ((2, 17, 33, 59, 64, 2), (3, 5, 97, 128, 33, None)):
                table.append(Case(score, *shape, dtype=dtype, terms=("lengths", "mask", "bias")))
    sizes = ((17, 65, 64, 33), (1, 130, 72, 40), (5, 3, 7, 1), (129, 64, 33, 8), (3, 0, 8, 8))
    for shape, term, layout in zip(sizes, TERMS, itertools.cycle(LAYOUTS)):
        table.append(Case(PLAIN[0], 2, *shape, terms=term, layout=layout))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        table.append(Case(PLAIN[0], 2, 17, 33, 59, 64, 2, dtype=dtype, terms=("lengths", "mask")))
    for score in PLAIN:  # what does not hang on f is tested with one
        table.append(Case(score, 2, 3, 5, 8, 8, 4, weight_per_head=True))
        table.append(Case(score, 2, 7, 19, 40, 24, scale=1e3))
        table.append(Case(score, 1, 20, 33, 9, 8, dtype=torch.float64, terms=("lengths",)))
    for shape in ((2, 9, 33, 512, 40), (1, 2, 5, 600, 8), (2, 1, 20, 2048, 16)):
        table.append(Case("tanh", *shape, positive=True))
    return table


#: Share of the sizes of a fuzz that are 0.
ZEROS = 0.04


def size(draw: random.Random, *most: int) -> int:
    """Return a random size up to one of ``most``, now and then 0."""
    return 0 if draw.random() < ZEROS else draw.randint(1, draw.choice(most))


def fuzz(seed: int, count: int, most: float) -> list[Case]:
    """Return ``count`` seeded random cases of at most ``most`` elements."""
    draw = random.Random(seed)
    table = []
    while len(table) < count:
        case = Case(
            score=draw.choice(("tanh", *SCORES)),
            B=size(draw, 1, 4),
            Tq=size(draw, 1, 3, 40, 150),
            Tk=size(draw, 2, 40, 300, 2000),
            A=size(draw, 8, 130),
            Dv=size(draw, 8, 130),
            H=draw.choice((None, None, size(draw, 1, 5))),
            dtype=draw.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16)),
            terms=draw.choice(TERMS),
            layout=draw.choice(LAYOUTS),
            seed=draw.randint(0, 2**31),
            scale=draw.choice((0.1, 1.0, 1.0, 4.0)),
        )
        if case.elements <= most:
            own = case.H is not None and draw.random() < 0.5
            table.append(replace(case, weight_per_head=own, positive=draw.random() < 0.25))
    return table


def runnable(backend: str, case: Case) -> bool:
    """Whether ``backend`` can run the case; Triton's interpreter only if it is small."""
    if unsupported_reason(backend, DEVICE[backend], case.dtype) is not None:
        return False
    return backend != "triton" or DEVICE["triton"].type == "cuda" or case.elements <= 60_000


def _laid_out(x: Tensor, layout: str) -> Tensor:
    """Return the same numbers in memory laid out otherwise."""
    if layout == "transposed":  # features outside of time
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "time first":  # before the heads, or before the batch
        return x.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "sliced":  # a part of something larger, NaN around it
        room = x.new_full((*x.shape[:-2], x.shape[-2] + 3, x.shape[-1] + 5), math.nan)
        view = room[..., 1 : 1 + x.shape[-2], 2 : 2 + x.shape[-1]]
        return view.copy_(x)
    return x


def inputs(case: Case, device: torch.device = CPU) -> dict[str, Tensor | None]:
    """Return the arguments of the case, leaves that require gradients where they can."""
    g = torch.Generator().manual_seed(case.seed)
    lead = (case.B, *case.heads)

    def floats(*shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape, generator=g, dtype=torch.float64) * scale
        return x.to(device, case.dtype)

    args: dict[str, Tensor | None] = {
        "query": floats(*lead, case.Tq, case.A, scale=case.scale),
        "key": floats(*lead, case.Tk, case.A, scale=case.scale),
        "value": floats(*lead, case.Tk, case.Dv),
        "score_vector": None,
        "bias": None,
        "mask": None,
        "lengths": None,
    }
    if case.layout == "expanded":  # one memory for the whole batch
        args["key"] = args["key"][:1].expand(*lead, case.Tk, case.A)
        args["value"] = args["value"][:1].expand(*lead, case.Tk, case.Dv)
    else:
        for name in ("query", "key", "value"):
            args[name] = _laid_out(args[name], case.layout)
    if case.score != "dot":
        shape = (*case.heads, case.A) if case.weight_per_head else (case.A,)
        args["score_vector"] = floats(*shape, scale=2 / max(case.A, 1) ** 0.5)
        if case.positive:
            weight = torch.rand(shape, generator=g, dtype=torch.float64)
            args["score_vector"] = weight.to(device, case.dtype)
    if "bias" in case.terms:
        rows = case.Tq if case.seed % 2 else 1
        args["bias"] = floats(case.B, *([1] * len(case.heads)), rows, case.Tk)
    if "mask" in case.terms:
        shape = (*lead, case.Tq if case.Tq < 100 else 1, case.Tk)
        args["mask"] = (torch.rand(shape, generator=g) > 0.3).to(device)
    if "lengths" in case.terms:
        args["lengths"] = torch.randint(0, case.Tk + 1, (case.B,), generator=g).to(device)
    args = {k: _leaf(v) for k, v in args.items()}
    if case.normalisation != "softmax":
        args["normalisation"] = case.normalisation
    return {**args, "activation": case.score} if case.score not in ("dot", "tanh") else args


def _leaf(x: Tensor | None) -> Tensor | None:
    floats = isinstance(x, Tensor) and x.is_floating_point()
    return x.detach().requires_grad_() if floats else x


def frozen(args: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return the arguments, of which the query alone requires a gradient."""
    tensors = {k: v for k, v in args.items() if isinstance(v, Tensor) and k != "query"}
    return {**args, **{k: v.detach() for k, v in tensors.items()}}


def every(result) -> tuple:
    """Return the items of a public function's result and what it has besides, by name."""
    return (*result, *getattr(result, "__dict__", {}).values())


def attend(args: dict[str, Tensor | None], **options):
    """Call the public function that the arguments belong to."""
    args = {**args, **options}
    weight = args.pop("score_vector")
    query, key, value = args.pop("query"), args.pop("key"), args.pop("value")
    if weight is None:
        return attnfast.dot_attention(query, key, value, scale=1.0, **args)
    return attnfast.additive_attention(query, key, value, weight, **args)


EAGER = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.2 * x),
}


NORMALISE = {
    "softmax": lambda e: e.softmax(-1),
    "sparsemax": lambda e: reference.entmax(e, 2),
    "entmax15": lambda e: reference.entmax(e, 1.5),
}


def eager(
    query, key, value, score_vector=None, bias=None, mask=None, lengths=None, activation="tanh",
    normalisation="softmax",
):  # fmt: skip
    """Attend as people write it, in the tensors' own dtype: context, weights, log-sum-exp."""
    if score_vector is None:
        score = query @ key.transpose(-1, -2)
    else:
        features = EAGER[activation](query.unsqueeze(-2) + key.unsqueeze(-3))
        score = (
            features @ score_vector
            if score_vector.dim() == 1
            else (features @ score_vector[:, None, :, None]).squeeze(-1)
        )
    if bias is not None:
        score = score + bias
    if lengths is not None:
        seen = torch.arange(key.shape[-2], device=key.device) < lengths.unsqueeze(-1)
        seen = seen.view(len(lengths), *[1] * (score.dim() - 2), key.shape[-2])
        mask = seen if mask is None else seen & mask
    normalise = NORMALISE[normalisation]
    if mask is None:
        weights = normalise(score)
        return weights @ value, weights, score.logsumexp(-1)
    empty = ~mask.expand_as(score).any(-1, keepdim=True)
    score = score.masked_fill(~mask, -math.inf).masked_fill(empty, 0)
    weights = normalise(score).masked_fill(~mask, 0)
    return weights @ value, weights, score.logsumexp(-1).masked_fill(empty.squeeze(-1), -math.inf)


NAMES = ("context", "weights", "log_sum_exp")


def results(case: Case, args: dict[str, Tensor | None], how, names=NAMES) -> dict[str, Tensor]:
    """Return the outputs of ``how(**args)`` and the gradients of a random sum of them."""
    outputs = dict(zip(names, every(how(**args))))
    g = torch.Generator().manual_seed(case.seed + 1)
    leaves = {k: v for k, v in args.items() if isinstance(v, Tensor) and v.requires_grad}
    upstream = []
    for name, x in outputs.items():
        noise = torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.device)
        noise = noise.bfloat16().double()  # the same numbers in every dtype
        if x.dim() > 2:  # non-contiguous
            noise = noise.transpose(-1, -2).contiguous().transpose(-1, -2)
        if name in ("log_sum_exp", "log_weights"):
            noise = noise.masked_fill(x == -math.inf, 0)
        upstream.append(noise.to(x.dtype))
    upstream = [g for x, g in zip(outputs.values(), upstream) if x.requires_grad]
    differentiable = [x for x in outputs.values() if x.requires_grad]
    grads = torch.autograd.grad(differentiable, list(leaves.values()), upstream, allow_unused=True)
    for (name, leaf), grad in zip(leaves.items(), grads):
        outputs[f"grad of {name}"] = torch.zeros_like(leaf) if grad is None else grad
    return {k: v.detach() for k, v in outputs.items()}


FEATURE_AXES = {"query": -1, "key": -1, "score_vector": -1, "coverage_weight": -1, "projection": -2}


def in_orders(how) -> list:
    """Return eager code that sums features, and in its gradients columns of values, in five orders.

    What it loses in one is a matter of luck, and of the library that a processor's products come
    from.
    """

    def ordered(seed: int):
        def run(**args):
            g = torch.Generator().manual_seed(seed)
            features = torch.randperm(args["key"].shape[-1], generator=g)
            columns = torch.randperm(args["value"].shape[-1], generator=g)
            for name, axis in FEATURE_AXES.items():
                if args.get(name) is not None:
                    args[name] = args[name].index_select(axis, features)
            args["value"] = args["value"].index_select(-1, columns)
            context, *rest = how(**args)
            return context.index_select(-1, columns.argsort()), *rest

        return run

    return [how, *(ordered(seed) for seed in range(1, 5))]


def doubled(args: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return the same numbers in float64."""
    return {
        k: _leaf(v.detach().double()) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in args.items()
    }


def nearby(args: dict[str, Tensor | None], run) -> Iterator[dict[str, Tensor]]:
    """Yield what eager code loses where inputs differ by a thousandth, on top of the oracle.

    In a single call that is luck too. ``run`` takes arguments of every dtype and returns results.
    """
    wanted = run(doubled(args))
    for seed in range(24):
        g = torch.Generator().manual_seed(seed)
        near = dict(args)
        for name, x in args.items():
            if isinstance(x, Tensor) and x.is_floating_point():
                noise = torch.randn(x.shape, generator=g, dtype=torch.float64)
                step = max(1e-3, torch.finfo(x.dtype).eps) * noise
                near[name] = _leaf((x.detach() * (1 + step)).to(x.dtype))
        plain, exact = run(near), run(doubled(near))
        yield {k: want + plain[k].double() - exact[k] for k, want in wanted.items()}


def devices() -> list[torch.device]:
    """Return where eager code may lose digits: the CPU, and the GPU if there is one."""
    return [CPU, torch.device("cuda")] if torch.cuda.is_available() else [CPU]


def losses(case: Case, how, names=NAMES) -> Iterator[dict[str, Tensor]]:
    """Yield the results of eager code in five orders, for :func:`check`; then those nearby."""
    args = inputs(case)
    yield from (results(case, args, run, names) for run in in_orders(how))
    yield from (results(case, inputs(case, x), how, names) for x in devices()[1:])
    yield from nearby(args, lambda near: results(case, near, how, names))


def oracle_of(case: Case, how, names=NAMES) -> dict[str, Tensor]:
    """Return the results of ``how`` in float64 on the CPU, from the case's own numbers."""
    return results(case, doubled(inputs(case)), how, names)


def exact(activation="tanh", **args):
    """Call the reference."""
    score = "dot" if args.get("score_vector") is None else activation
    return reference.attention(AttentionInputs(**args, score=score))


def oracle(case: Case) -> dict[str, Tensor]:
    """Return the reference's results in float64 on the CPU."""
    return oracle_of(case, exact)


def off(x: Tensor, want: Tensor) -> Tensor:
    """Return how far x is from what is wanted; the same infinity is not."""
    x = x.double().cpu()
    return (x - want).masked_fill(x == want, 0).abs()


def check(
    case: Case,
    got: dict[str, Tensor],
    wanted: dict[str, Tensor],
    plain: Iterable[dict[str, Tensor]],
):
    """Assert the project's one rule for numbers (see the constants above).

    ``plain`` are results of eager code, as many as it takes; the one that lost most counts.
    """
    plain = iter(plain)
    taken = [next(plain)]
    for name, want in wanted.items():
        result = got[name].double().cpu()
        assert result.shape == want.shape, f"{name} has shape {result.shape} in {case}"
        if want.numel() == 0:
            continue
        assert not (result.isnan() & ~want.isnan()).any(), f"{name} has NaN in {case}"
        error = off(result, want)
        finite = want.masked_fill(want.isinf(), 0)
        largest = float(finite.abs().max())
        if case.strict and name in OF_KEYS:
            largest = max(largest, float(wanted.get("grad of key", want).abs().max()))
        ulp = torch.finfo(case.dtype).eps * largest
        floor = max(FLOOR[case.dtype] * (not case.strict), FLOOR_ULPS[case.dtype] * ulp)
        size = float(finite.square().mean().sqrt())
        most, rms = float(error.max()), float(error.square().mean().sqrt())
        while True:
            lost = [off(x[name], want).nan_to_num(0) for x in taken]
            allowed = max(floor, FACTOR * max(float(x.max()) for x in lost))
            allowed_rms = max(RMS * size + floor, *(float(x.square().mean().sqrt()) for x in lost))
            if case.strict:  # a query's gradient is then a difference of larger numbers
                allowed_rms = math.inf
            within = most <= allowed and rms <= allowed_rms
            if within or (more := next(plain, None)) is None:
                break
            taken.append(more)
        assert most <= allowed, f"{name} is off by {most:.2e} > {allowed:.2e} in {case}"
        assert within, f"{name}: rms {rms:.2e} > {allowed_rms:.2e} of {size:.2e} in {case}"
