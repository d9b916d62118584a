"""Test the kernels for 64-bit Arm in an emulator; tests/aarch64.sh runs more cases.

Debian: apt install g++-aarch64-linux-gnu qemu-user-static
"""

import shutil
import subprocess
from pathlib import Path

import attention_cases
import pytest
import torch
from attention_cases import Case, check, inputs, losses, oracle, results

from attnfast.ops.arguments import SCORES

HERE = Path(__file__).parent
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # as in csrc/attention.h
FORWARD, BACKWARD, PRODUCT, PRODUCT_OF_BYTES = range(4)

if missing := [x for x in (COMPILER, EMULATOR) if not shutil.which(x)]:
    pytest.skip(f"{missing[0]} is missing", allow_module_level=True)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("aarch64") / "kernels"
    flags = ("-std=c++20", "-O2", "-static", "-DVARIANT=portable")
    subprocess.run([COMPILER, *flags, HERE / "aarch64.cpp", "-o", path], check=True)
    return path


def run(program: Path, call: int, given: list, outputs: list[tuple], cpu: str = "max") -> list:
    """Run a kernel with numbers and tensors; return tensors of these dtypes and shapes."""
    sent = [torch.tensor([x]) if isinstance(x, int) else x.detach() for x in (call, *given)]
    done = subprocess.run(
        [EMULATOR, "-cpu", cpu, program],
        input=b"".join(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for x in sent),
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    flat, start, tensors = bytearray(done.stdout), 0, []
    for dtype, shape in outputs:
        count = torch.Size(shape).numel()
        tensor = torch.frombuffer(flat, dtype=dtype, count=count, offset=start) if count else (
            torch.empty(0, dtype=dtype))  # fmt: skip
        tensors.append(tensor.view(shape))
        start += count * dtype.itemsize
    assert start == len(flat)
    return tensors


def optional(x: torch.Tensor | None) -> list:
    return [0] if x is None else [1, x]


class Attention(torch.autograd.Function):
    """Attention of [B, H, rows, columns] by the emulated kernels."""

    @staticmethod
    def forward(ctx, program, score, query, key, value, vector, bias, mask, lengths):
        B, H, Tq, A = query.shape
        Tk, Dv = value.shape[-2:]
        dtype, sums = query.dtype, torch.promote_types(query.dtype, torch.float32)
        numbers = [DTYPES.index(dtype), SCORES.index(score), 0, B, H, Tq, Tk, A, Dv]
        ctx.sent = [*numbers, query, key, value, *optional(vector), *optional(lengths)]
        context, weights, log_sum_exp = run(
            program, FORWARD, [*ctx.sent, *optional(bias), *optional(mask)],
            [(dtype, (B, H, Tq, Dv)), (sums, (B, H, Tq, Tk)), (sums, (B, H, Tq))],
        )  # fmt: skip
        ctx.program, ctx.weights, ctx.has_vector = program, weights, vector is not None
        ctx.shapes = [query.shape, key.shape, value.shape]
        return context, weights, log_sum_exp

    @staticmethod
    def backward(ctx, *grads):
        B, H, _, A = ctx.shapes[0]
        dtype, sums = grads[0].dtype, ctx.weights.dtype
        shapes = [(dtype, x) for x in ctx.shapes] + [(sums, ctx.weights.shape)]
        if ctx.has_vector:
            shapes.append((sums, (B, H, A)))
        got = run(ctx.program, BACKWARD, [*ctx.sent, ctx.weights, *grads], shapes)
        query, key, value, score, *vector = got
        vector = vector[0].to(dtype).sum(0) if vector else None
        bias = score.to(dtype) if ctx.needs_input_grad[6] else None
        return None, None, query, key, value, vector, bias, None, None


def make_emulated_attention(program: Path):
    """Return a function with the signature of the eager code."""

    def attend(
        query, key, value, score_vector=None, bias=None, mask=None, lengths=None, activation="tanh"
    ):  # fmt: skip
        heads = query.dim() == 4
        four = [x if heads else x.unsqueeze(1) for x in (query, key, value)]
        B, H, Tq, _ = four[0].shape
        shape = (B, H, Tq, key.shape[-2])
        expanded = [
            x if x is None else (x if heads else x.unsqueeze(1)).expand(shape) for x in (bias, mask)
        ]
        vector = None if score_vector is None else score_vector.expand(H, query.shape[-1])
        score = "dot" if vector is None else activation
        got = Attention.apply(program, score, *four, vector, *expanded, lengths)
        return got if heads else [x.squeeze(1) for x in got]

    return attend


TABLE = [x for x in attention_cases.cases() if x.elements <= 40_000] + attention_cases.small(
    Case("tanh", 2, 9, 33, 40, 24)
)


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_attention(case, program):
    got = results(case, inputs(case), make_emulated_attention(program))
    check(case, got, oracle(case), losses(case, attention_cases.eager))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("left_transposed", [0, 1])
@pytest.mark.parametrize("right_transposed", [0, 1])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 9, 5), (65, 33, 40), (130, 70, 300), (3, 8, 600)])
def test_product(dtype, left_transposed, right_transposed, sizes, program):
    M, N, K = sizes
    g = torch.Generator().manual_seed(0)
    left, right, bias = (torch.randn(x, generator=g).to(dtype) for x in ((M, K), (K, N), (N,)))
    given = [left.T if left_transposed else left, right.T if right_transposed else right, bias]
    numbers = [DTYPES.index(dtype), M, N, K, left_transposed, right_transposed]
    outputs = [(dtype, (M, N)), *([(dtype, (M,))] if left_transposed else [])]
    wanted = [bias.double() + left.double() @ right.double(), left.double().sum(1)]
    rounding = 4 * torch.finfo(dtype).eps * K**0.5
    for got, want in zip(run(program, PRODUCT, [*numbers, *given], outputs), wanted):
        torch.testing.assert_close(got.double(), want, rtol=rounding, atol=8 * rounding)


@pytest.mark.parametrize("cpu", ["max", "a64fx"])  # with and without dot products of bytes
@pytest.mark.parametrize("sizes", [(1, 8, 1), (9, 8, 4), (5, 3, 70), (12, 8, 515)])
def test_product_of_bytes_is_exact(cpu, sizes, program):
    M, N, K = sizes
    g = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-127, 128, (x, K), generator=g).float() for x in (M, N))
    left[:, 0], right[:, -1] = 127, -127  # a scale of 1
    (out,) = run(program, PRODUCT_OF_BYTES, [M, N, K, left, right], [(torch.float32, (M, N))], cpu)
    assert torch.equal(out, (left.double() @ right.double().T).float())
