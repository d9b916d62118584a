"""copy_distribution against the float64 oracle, and the oracle against the paper's formula."""

import itertools
import math
import random
from dataclasses import dataclass, replace

import attention_cases
import pytest
import torch
from attention_cases import CPU, DEVICE, LAYOUTS, size
from torch.autograd import gradcheck

import attnfast
from attnfast._utils.benchmark import peak_memory
from attnfast.ops.backends import HALF, unsupported_reason


@dataclass(frozen=True)
class Copy:
    B: int
    Tq: int
    Tk: int
    V: int
    X: int
    log: bool
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    scale: float = 1.0  # of the logits
    gate: float = 1.0  # spread of the gates
    words: int | None = None  # distinct words of a source, at most
    hidden: bool = False  # some logits are -inf, some weights 0
    seed: int = 0
    strict: bool = False


def copies() -> list[Copy]:
    """Return sizes about the kernels' edges, every dtype, repeated words, extremes."""
    sizes = [(2, 3, 5, 7, 0), (1, 1, 1, 1, 0), (2, 4, 17, 33, 3), (3, 2, 64, 257, 16)]
    sizes += [(1, 5, 100, 64, 1), (2, 2, 9, 1500, 40), (2, 0, 5, 8, 1), (0, 3, 5, 8, 1)]
    sizes += [(2, 3, 0, 8, 2), (2, 3, 4, 0, 3), (1, 2, 1100, 33, 1), (1, 2, 40, 9000, 5)]
    layouts = itertools.cycle(LAYOUTS)
    table = []
    for log in (False, True):
        table += [Copy(*s, log, layout=next(layouts), hidden=i % 2 == 1)
                  for i, s in enumerate(sizes)]  # fmt: skip
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            table.append(Copy(2, 3, 20, 70, 5, log, dtype, hidden=True))
        table.append(Copy(2, 3, 40, 70, 5, log, words=3))
        table.append(Copy(2, 3, 40, 70, 5, log, gate=40.0, hidden=True))
        table.append(Copy(2, 3, 40, 70, 5, log, scale=30.0, hidden=True))
    return table


def fuzz(seed: int, count: int) -> list[Copy]:
    draw = random.Random(seed)
    table = [
        Copy(
            B=size(draw, 3),
            Tq=size(draw, 1, 6),
            Tk=size(draw, 1, 10, 100),
            V=size(draw, 1, 40, 400),
            X=draw.choice((0, size(draw, 20))),
            log=draw.random() < 0.5,
            dtype=draw.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16)),
            layout=draw.choice(LAYOUTS),
            scale=draw.choice((0.1, 1.0, 1.0, 10.0)),
            gate=draw.choice((1.0, 1.0, 10.0)),
            words=draw.choice((None, None, 1, 4)),
            hidden=draw.random() < 0.3,
            seed=draw.randint(0, 2**31),
        )
        for _ in range(count)
    ]
    return [
        case if case.V + case.X else replace(case, Tk=0) for case in table
    ]  # no word, no source


def arguments(case: Copy, device: torch.device = CPU) -> dict:
    """Return the arguments of the case, leaves that require gradients where they can."""
    g = torch.Generator().manual_seed(case.seed)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    logits = floats(case.B, case.Tq, case.V) * case.scale
    weights = (2 * floats(case.B, case.Tq, case.Tk)).softmax(-1)
    words = max(case.V + case.X, 1)
    source = torch.randint(0, case.words or words, (case.B, case.Tk), generator=g) % words
    if case.hidden:
        logits = logits.masked_fill(floats(*logits.shape) > 1, -math.inf)
        logits[:1, :1] = -math.inf
        weights = weights.masked_fill(floats(*weights.shape) > 0.5, 0)
    gate = (floats(case.B, case.Tq) * case.gate).to(device, case.dtype)
    args = {
        "logits": attention_cases._laid_out(logits.to(device, case.dtype), case.layout),
        "weights": attention_cases._laid_out(weights.to(device, case.dtype), case.layout),
        "source": source.to(device),
        "gate": gate.T.contiguous().T,
    }
    return {k: attention_cases._leaf(v) for k, v in args.items()}


def run(case: Copy, args: dict, backend: str) -> dict[str, torch.Tensor]:
    def how(**a):
        return (attnfast.copy_distribution(**a, num_oov=case.X, log=case.log, backend=backend),)

    return attention_cases.results(case, args, how, ("distribution",))


def check(case: Copy, backend: str) -> None:
    """Compare with the oracle by the project's one rule; the oracle in this dtype is eager code."""

    def results(args, backend="reference"):
        found = run(case, args, backend)
        if case.dtype in HALF:  # the gradient of a weight saturates
            found["grad of weights"] = found["grad of weights"].clamp(-65504, 65504)
        return found

    args = arguments(case)
    got = results(arguments(case, DEVICE[backend]), backend)
    plain = itertools.chain([results(args)], attention_cases.nearby(args, results))
    attention_cases.check(case, got, results(attention_cases.doubled(args)), plain)


def skip_unless(backend: str, dtype: torch.dtype = torch.float32) -> None:
    reason = unsupported_reason(backend, DEVICE[backend], dtype, "copy_distribution")
    if reason:
        pytest.skip(f"{backend}: {reason}")


@pytest.mark.parametrize("case", copies(), ids=lambda c: f"{'log' if c.log else 'p'}-{c.V}-{c.Tk}")
def test_table(case, backend):
    skip_unless(backend, case.dtype)
    check(case, backend)


@pytest.mark.parametrize("seed", range(4))
def test_fuzz(seed, backend):
    few = backend == "triton" and DEVICE[backend].type == "cpu"  # its interpreter is slow
    for case in fuzz(seed, 8 if few else 64):
        if unsupported_reason(backend, DEVICE[backend], case.dtype, "copy_distribution") is None:
            check(case, backend)


def test_see_2017():
    """Equation 9, word by word."""
    case = Copy(2, 3, 6, 5, 2, False, torch.float64, words=7)
    args = arguments(case)
    got = attnfast.copy_distribution(**args, num_oov=2)
    logs = attnfast.copy_distribution(**args, num_oov=2, log=True)
    p, vocab = args["gate"].sigmoid(), args["logits"].softmax(-1)
    for b, t, w in itertools.product(range(2), range(3), range(7)):
        copied = sum(args["weights"][b, t, i] for i in range(6) if args["source"][b, i] == w)
        want = (p[b, t] * vocab[b, t, w] if w < 5 else 0) + (1 - p[b, t]) * copied
        torch.testing.assert_close(got[b, t, w], torch.as_tensor(want, dtype=torch.float64))
        if want > 0:
            torch.testing.assert_close(logs[b, t, w], want.log())
    torch.testing.assert_close(got.sum(-1), torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("log", [False, True])
def test_gradcheck(log, backend):
    skip_unless(backend, torch.float64)
    case = Copy(1, 2, 5, 3, 2, log, torch.float64)
    args = arguments(case, DEVICE[backend])
    args.pop("source")
    source = torch.tensor([[3, 4, 1, 1, 4]], device=DEVICE[backend])  # every word can come

    def function(*values):
        named = dict(zip(args, values))
        return attnfast.copy_distribution(
            source=source, **named, num_oov=2, log=log, backend=backend
        )

    assert gradcheck(function, tuple(args.values()))


def test_logarithms_survive_where_probabilities_do_not(backend):
    """Gates and logits far out: log P is finite and right, and so are its gradients."""
    skip_unless(backend)
    device = DEVICE[backend]
    logits = torch.tensor([[[0.0, -200.0, -50.0]]], device=device, requires_grad=True)
    weights = torch.tensor([[[1.0, 0.0]]], device=device, requires_grad=True)
    source = torch.tensor([[2, 3]], device=device)
    for value in (-120.0, 120.0):
        gate = torch.tensor([[value]], device=device, requires_grad=True)
        got = attnfast.copy_distribution(
            logits, weights, source, gate, num_oov=2, log=True, backend=backend
        )
        log_p, log_q = min(value, 0), min(-value, 0)
        copied = float(torch.logaddexp(torch.tensor(log_p - 50), torch.tensor(log_q)))
        wanted = [log_p, log_p - 200, copied, -87.33654, -87.33654]
        torch.testing.assert_close(got.detach().cpu().flatten(), torch.tensor(wanted))
        for grad in torch.autograd.grad(got.sum(), [logits, weights, gate]):
            assert grad.isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_is_not_lost(bad, backend):
    """A row of logits that has diverged says so, also at the words that are copied."""
    skip_unless(backend)
    device = DEVICE[backend]
    logits = torch.tensor([[[0.0, 1.0, bad, 2.0]]], device=device, requires_grad=True)
    ends = (torch.ones(1, 1, 1, device=device), torch.zeros(1, 1, dtype=torch.long, device=device))
    out = attnfast.copy_distribution(
        logits, *ends, torch.zeros(1, 1, device=device), log=True, backend=backend
    )
    assert not out[0, 0, 0].isfinite()
    assert not torch.autograd.grad(out[0, 0, 0], logits)[0].isfinite().all()


def test_the_slightest_weights_count_for_nothing(backend):
    skip_unless(backend)
    device = DEVICE[backend]
    logits = torch.tensor([[[0.0, -90.0, 0.0]]], device=device, requires_grad=True)
    weights = torch.tensor([[[1.5e-35, 1.0]]], device=device, requires_grad=True)
    gate = torch.zeros(1, 1, device=device, requires_grad=True)
    source = torch.tensor([[1, 0]], device=device)

    def results(backend):
        out = attnfast.copy_distribution(logits, weights, source, gate, log=True, backend=backend)
        return out, *torch.autograd.grad(out.sum(), [logits, weights, gate])

    for got, want in zip(results(backend), results("reference")):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gate", [-900.0, 900.0])
@pytest.mark.parametrize("log", [False, True])
def test_a_gate_that_is_certain(gate, log, backend):
    """Beyond what an exponential of float64 holds, on both sides."""
    skip_unless(backend)
    grads = []
    for name in (backend, "reference"):
        device = DEVICE[name]
        logits = torch.tensor([[[0.3, -0.2, 0.1, -math.inf]]], device=device, requires_grad=True)
        weights = torch.tensor([[[0.75, 0.25]]], device=device, requires_grad=True)
        p = torch.tensor([[gate]], device=device, requires_grad=True)
        source = torch.tensor([[1, 2]], device=device)
        ends = (logits, weights, source, p)
        out = attnfast.copy_distribution(*ends, log=log, backend=name)
        some = out[..., :3].clamp_min(-50) if log else out
        grads.append([out, *torch.autograd.grad(some.square().sum(), [logits, weights, p])])
    for got, want in zip(*grads):
        torch.testing.assert_close(got.cpu(), want.cpu())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gradient_of_a_half_weight_stops_at_float16s_largest(dtype, backend):
    skip_unless(backend, dtype)
    logits = torch.tensor([[[0.0, -math.inf]]], dtype=dtype, device=DEVICE[backend])
    weights = torch.tensor([[[1.0, 1e-7]]], dtype=dtype, device=logits.device, requires_grad=True)
    gate, source = logits[..., 0] * 0, torch.tensor([[0, 1]], device=logits.device)
    ends = (logits, weights, source, gate)
    out = attnfast.copy_distribution(*ends, log=True, backend=backend)
    for sign in (1.0, -1.0):
        (grad,) = torch.autograd.grad(sign * out[0, 0, 1].float(), weights, retain_graph=True)
        assert backend == "reference" or grad[0, 0, 1] == sign * torch.tensor(65504.0).to(dtype)


@pytest.mark.parametrize("log", [False, True])
def test_a_constant_added_to_the_logits_changes_nothing(log, backend):
    """Differences of large logits are exact, and log-sum-exp is not rounded to their size."""
    skip_unless(backend)
    case = Copy(2, 3, 10, 40, 3, log)
    args = arguments(case, DEVICE[backend])
    with torch.no_grad():
        args["logits"].copy_((args["logits"] * 1024).round() / 1024)
    wanted = run(case, args, backend)
    with torch.no_grad():
        args["logits"].add_(4096)
    for name, x in run(case, args, backend).items():
        torch.testing.assert_close(x, wanted[name], rtol=2e-6, atol=2e-6)


def test_a_word_that_cannot_come_has_no_gradient(backend):
    skip_unless(backend)
    case = Copy(1, 2, 4, 6, 3, True)
    args = arguments(case, DEVICE[backend])
    args["source"] = torch.tensor([[0, 1, 6, 6]], device=DEVICE[backend])  # 7 and 8 never come
    out = attnfast.copy_distribution(**args, num_oov=3, log=True, backend=backend)
    assert out[..., 7:].eq(math.log(torch.finfo(torch.float32).tiny)).all()
    leaves = [args[k] for k in ("logits", "weights", "gate")]
    for grad in torch.autograd.grad(out[..., 7:].sum(), leaves):
        assert grad.eq(0).all()


def test_runs_are_the_same_to_the_bit(backend):
    skip_unless(backend)
    case = Copy(4, 8, 300, 3000, 20, True, words=9)
    few = backend == "triton" and DEVICE[backend].type == "cpu"
    case = replace(case, B=1, Tq=2, Tk=50, V=100) if few else case
    args = arguments(case, DEVICE[backend])
    first = run(case, args, backend)
    for _ in range(2 if few else 20):
        for name, x in run(case, args, backend).items():
            assert torch.equal(x, first[name]), name


def test_opcheck(backend):
    skip_unless(backend)
    if backend == "reference":
        pytest.skip("not a registered op")
    args = [x.detach() for x in arguments(Copy(2, 3, 5, 9, 2, True), DEVICE[backend]).values()]
    ops = getattr(torch.ops, f"attnfast_{backend}")
    for log in (False, True):
        torch.library.opcheck(ops.copy_distribution.default, (*args, 2, log))
        out, lse = ops.copy_distribution(*args, 2, log)
        grad = torch.randn_like(out)
        torch.library.opcheck(ops.copy_distribution_backward.default, (grad, *args, lse, 2, log))


def test_compile():
    def loss(args, num_oov):
        return attnfast.copy_distribution(**args, num_oov=num_oov, log=True).sin().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for Tk, X in ((5, 2), (9, 4), (7, 3)):
        args = arguments(Copy(2, 3, Tk, 8, X, True))
        leaves = [args[k] for k in ("logits", "weights", "gate")]
        for a, b in zip(
            torch.autograd.grad(compiled(args, X), leaves),
            torch.autograd.grad(loss(args, X), leaves),
        ):
            torch.testing.assert_close(a, b)


def test_autocast_computes_in_float32():
    args = arguments(Copy(2, 3, 5, 9, 2, True, torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        got = attnfast.copy_distribution(**args, num_oov=2, log=True)
    wide = {k: v.float() if v.is_floating_point() else v for k, v in args.items()}
    assert torch.equal(got, attnfast.copy_distribution(**wide, num_oov=2, log=True))


def test_second_derivatives_raise(backend):
    skip_unless(backend)
    if backend == "reference":
        pytest.skip("PyTorch differentiates it")
    args = arguments(Copy(1, 2, 3, 4, 1, True), DEVICE[backend])
    out = attnfast.copy_distribution(**args, num_oov=1, log=True, backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), args["gate"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative|once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("log", [False, True])
def test_memory_is_that_of_the_result(log):
    """No one-hot of the source, no copy of the result: result, its gradient, that of the logits."""
    case = Copy(4, 30, 60, 5000, 10, log)
    args = arguments(case)
    leaves = [args[k] for k in ("logits", "weights", "gate")]

    def step():
        out = attnfast.copy_distribution(**args, num_oov=case.X, log=log, backend="cpu")
        torch.autograd.grad(out.sum(), leaves, retain_graph=False)

    skip_unless("cpu")
    step()
    assert peak_memory(step, CPU) < 3.3 * 4 * case.B * case.Tq * (case.V + case.X)
