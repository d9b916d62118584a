"""Linear layers of many rows against the float64 oracle, and in place of PyTorch's."""

import math
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import attention_cases
import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.nn import functional as F

from attnfast.nn import BahdanauAttention
from attnfast.nn import _linear as code
from attnfast.ops import dispatch
from attnfast.ops.backends import unsupported_reason
from attnfast.ops.linear import LINEAR, LinearInputs
from attnfast.ops.operators import CHECKS

if reason := unsupported_reason("cpu", attention_cases.CPU, torch.float32):
    pytest.skip(f"cpu: {reason}", allow_module_level=True)

#: Rows, features, outputs: about panels, blocks of rows and the depth that is taken at a time.
SIZES = [
    (1, 1, 1), (2, 3, 5), (7, 8, 16), (64, 16, 32), (65, 33, 33), (130, 40, 70), (3, 600, 9),
    (129, 513, 31), (700, 7, 1), (1, 512, 64), (600, 1, 40), (0, 3, 5), (4, 0, 5), (4, 3, 0),
]  # fmt: skip
LAYOUTS = ("contiguous", "transposed", "sliced")


def arguments(sizes, dtype, layout="contiguous", seed=0, bias=True):
    g = torch.Generator().manual_seed(seed)
    M, K, N = sizes
    shapes = {"input": (M, K), "weight": (N, K), "bias": (N,) if bias else None}
    return {
        name: None
        if shape is None
        else attention_cases._leaf(
            attention_cases._laid_out(
                torch.randn(shape, generator=g, dtype=torch.float64).to(dtype),
                layout if len(shape) == 2 else "contiguous",
            )
        )
        for name, shape in shapes.items()
    }


def results(case, args, backend):
    def how(**given):
        return dispatch.run(LINEAR, LinearInputs(**given), backend)

    return attention_cases.results(case, args, how, ("output",))


def check(sizes, dtype, layout="contiguous", seed=0, bias=True):
    args = arguments(sizes, dtype, layout, seed, bias)
    case = SimpleNamespace(dtype=dtype, seed=seed, strict=False)
    got = results(case, args, "cpu")
    args = {name: x for name, x in args.items() if x is not None}
    plain = [results(case, args, "reference")]
    attention_cases.check(
        case, got, results(case, attention_cases.doubled(args), "reference"), plain
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_table(sizes, dtype):
    for i, layout in enumerate(LAYOUTS):
        check(sizes, dtype, layout, bias=i % 2 == 0)


@pytest.mark.parametrize("seed", range(4))
def test_fuzz(seed):
    draw = random.Random(seed)
    for _ in range(16):
        sizes = [attention_cases.size(draw, 9, 70, 700) for _ in range(3)]
        dtype = draw.choice((torch.float32, torch.float64))
        check(sizes, dtype, draw.choice(LAYOUTS), draw.randint(0, 999), draw.random() < 0.5)


def test_gradcheck():
    args = arguments((5, 3, 4), torch.float64)
    assert gradcheck(
        lambda *x: dispatch.run(LINEAR, LinearInputs(*x), "cpu")[0], tuple(args.values())
    )


def test_opcheck():
    args = tuple(arguments((5, 3, 4), torch.float32).values())
    torch.library.opcheck(torch.ops.attnfast_cpu.linear.default, args)
    grad = torch.randn(5, 4)
    call = (grad, *(x.detach() for x in args[:2]), True, True)
    torch.library.opcheck(torch.ops.attnfast_cpu.linear_backward.default, call)


CHANGES = {
    "fewer axes": lambda x: x[0],
    "more axes": lambda x: x[None],
    "transposed": lambda x: x.t(),
    "fewer rows": lambda x: x[:-1],
    "twice as many": lambda x: torch.cat([x, x]),
    "no columns": lambda x: x[..., :0],
    "float64": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16(),
    "bool": lambda x: x.bool(),
    "meta": lambda x: x.to("meta"),
}


def refuses(function, arguments):
    try:
        function(*arguments)
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return True
    return False


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["linear", "linear_backward"])
def test_invalid_calls(name, change):
    """What the operator's check refuses the compiled operator refuses, and nothing else."""
    x, weight, bias = (x.detach() for x in arguments((5, 3, 4), torch.float32).values())
    given, overload = (x, weight, bias), LINEAR.forwards["cpu"]
    if name == "linear_backward":
        given, overload = (torch.ones(5, 4), x, weight, True, True), LINEAR.backwards["cpu"]
    overload(*given)
    for i in range(3):
        wrong = (*given[:i], CHANGES[change](given[i]), *given[i + 1 :])
        assert refuses(CHECKS[name], wrong) == refuses(overload, wrong), i


def test_the_same_bits_for_any_number_of_threads():
    args = arguments((300, 90, 130), torch.float32)

    def run():
        return results(SimpleNamespace(dtype=torch.float32, seed=0), args, "cpu")

    threads, found = torch.get_num_threads(), run()
    try:
        torch.set_num_threads(1)
        alone = run()
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(x, alone[name]) for name, x in found.items())


def test_a_row_is_touched_by_no_other():
    args = {name: x.detach() for name, x in arguments((70, 20, 40), torch.float32).items()}
    before = dispatch.run(LINEAR, LinearInputs(**args), "cpu").output
    args["input"][3] = math.nan
    after = dispatch.run(LINEAR, LinearInputs(**args), "cpu").output
    others = torch.arange(70) != 3
    assert after[3].isnan().all() and torch.equal(before[others], after[others])


# ---- in place of PyTorch's -----------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Take the operator whatever the processor and the sizes; list the calls of it."""
    monkeypatch.setattr(code, "LEAST_ROWS", 0)
    monkeypatch.setattr(code, "LEAST_WORK", 0)
    monkeypatch.setattr(
        code, "try_select_backend", lambda backend, *_: None if backend == "reference" else "cpu"
    )
    found, run = [], dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda *args: found.append(args[0].name) or run(*args))
    return found


def test_keys_are_projected_by_the_operator(calls):
    attention, source = BahdanauAttention(4, 6, 8), torch.randn(3, 5, 6, requires_grad=True)
    key = attention.prepare(source).key
    assert calls == ["linear"]
    torch.testing.assert_close(key, attention.key_proj(source))
    torch.testing.assert_close(
        torch.autograd.grad(key.sin().sum(), [source, *attention.key_proj.parameters()]),
        torch.autograd.grad(
            attention.key_proj(source).sin().sum(), [source, *attention.key_proj.parameters()]
        ),
    )


def hook(layer, _):
    layer.register_forward_hook(lambda *_: None)


def subclass(layer, _):
    layer.__class__ = type("Mine", (nn.Linear,), {})


def reference(_, attention):
    attention.backend = "reference"


@pytest.mark.parametrize("change", [hook, subclass, reference])
def test_a_layer_that_is_more_is_called(change, calls):
    attention = BahdanauAttention(4, 6, 8)
    change(attention.key_proj, attention)
    attention.prepare(torch.randn(3, 5, 6))
    assert not calls


def test_where_pytorch_does_more(calls):
    x, weight = torch.randn(6, 4), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert code.linear(x, weight).dtype == torch.bfloat16
    torch.func.vmap(lambda row: code.linear(row, weight))(x)
    torch.func.jvp(lambda y: code.linear(y, weight), (x,), (x,))
    torch.jit.trace(lambda y: code.linear(y, weight), (x,), check_trace=False)
    with pytest.raises(RuntimeError, match=r"size|shape"):
        code.linear(x, torch.randn(3, 5))
    assert not calls
    torch.testing.assert_close(code.linear(x[0], weight), F.linear(x[0], weight))
    assert calls == ["linear"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_other_dtypes_are_pytorchs(dtype, calls):
    x, weight = torch.randn(6, 4).to(dtype), torch.randn(3, 4).to(dtype)
    assert torch.equal(code.linear(x, weight), F.linear(x, weight)) and not calls
    assert dtype == torch.complex64 or unsupported_reason(
        "cpu", attention_cases.CPU, dtype, "linear"
    )


class Twice(torch.Tensor):
    """A weight that is more than its numbers."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result * 2 if function is F.linear else result


@pytest.mark.parametrize("weight", [Twice(3, 4).fill_(1), torch.ones(3, 4).to_sparse()], ids=type)
def test_weights_of_other_kinds_are_pytorchs(weight, calls):
    x = torch.randn(6, 4)
    torch.testing.assert_close(code.linear(x, weight), F.linear(x, weight))
    assert not calls


def test_what_needs_no_gradient_may_change(calls):
    """PyTorch does not save what no gradient needs: the operator would."""
    x, weight = torch.randn(6, 4, requires_grad=True) * 1, torch.randn(3, 4)
    y = code.linear(x, weight)
    with torch.no_grad():
        x.relu_()
    y.sum().backward()
    y = code.linear(x.detach(), weight.requires_grad_())
    with torch.no_grad():
        weight.zero_()
    y.sum().backward()
    assert not calls


@pytest.mark.parametrize("backend", ["cpuu", 5, ["cpu"]], ids=str)
def test_a_backend_that_is_none_is_named(backend, calls):
    attention = BahdanauAttention(4, 6, 8)
    attention.backend = backend
    with pytest.raises(ValueError, match="backend must be"):
        attention.prepare(torch.randn(3, 70, 6))


def test_an_instruction_set_that_is_none_is_named():
    code = "import torch, attnfast; a = attnfast.nn.BahdanauAttention(256, 256, 256); "
    code += "a(torch.randn(4, 256), a.prepare(torch.randn(4, 64, 256)))"
    environment = {**os.environ, "ATTNFAST_CPU_ISA": "avx9"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1, done.stderr
    assert "ATTNFAST_CPU_ISA must be portable, avx2 or avx512" in done.stderr


def test_few_rows_are_pytorchs(monkeypatch):
    monkeypatch.setattr(
        code, "try_select_backend", lambda *_: pytest.fail("it asked for a backend")
    )
    code.linear(torch.randn(63, 4096), torch.randn(4096, 4096))
    code.linear(torch.randn(1000, 8), torch.randn(8, 8))


def test_no_second_derivative(calls):
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(code.linear(x, weight).sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(grad.sum(), weight)
