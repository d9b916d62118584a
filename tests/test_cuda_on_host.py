"""CUDA without a GPU: the kernels run on the host against the oracle.

On a GPU the backend ``cuda`` takes part in test_attention.py like every other.
"""

import ctypes
import itertools
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import attention_cases
import invalid_calls
import pytest
import test_attention
import test_copying
import test_coverage
import test_cuda_graphs
import test_memory
import test_nn_recurrent
import test_recurrent
import test_scores
import test_span
import test_statistics
import torch
from attention_cases import Case, cases, fuzz

import attnfast
import attnfast.decoding.memory
import attnfast.functional
from attnfast.nn import _fused_rnn
from attnfast.ops.attention import ATTENTION
from attnfast.ops.recurrent import attention_of, runs_step_by_step

ROOT = Path(__file__).parent.parent
HOST = ROOT / "tests" / "cuda_host"
FMA = torch.backends.cpu.get_cpu_capability().startswith("AVX")


def compile_on_host(source: str, out: Path, *flags: str) -> Path:
    """Compile with g++ against the shim that stands in for CUDA's headers."""
    cxx = os.environ.get("CXX") or "g++"
    if not shutil.which(cxx):
        pytest.skip(f"there is no C++ compiler {cxx}")
    command = [cxx, "-std=c++20", "-O2", "-pthread", f"-I{HOST}", str(HOST / source)]
    command += ["-ffp-contract=fast", *(["-mfma"] if FMA else [])]  # as nvcc contracts
    subprocess.run([*command, *flags, "-o", str(out)], check=True)
    return out


def compile_library(folder: Path, *flags: str) -> Path:
    torch_folder = Path(torch.__file__).parent
    return compile_on_host(
        "library.cpp", folder / "library.so", "-shared", "-fPIC",
        "-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{torch_folder}/include",
        f"-L{torch_folder}/lib", "-ltorch_cpu", *flags,
    )  # fmt: skip


def load(path: Path | str) -> ctypes.CDLL:
    """Register the kernels for CPU tensors under the name that they have on a GPU."""
    torch.ops.load_library(str(path))
    return ctypes.CDLL(str(path))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return load(compile_library(tmp_path_factory.mktemp("cuda")))


@pytest.fixture
def host(library, monkeypatch):
    """Let backend="cuda" run on CPU tensors; return its name."""

    def chosen(backend, *_, **__):
        return "reference" if backend == "reference" else "cuda"  # the oracle is no kernel

    for module in (attnfast.functional, attnfast.decoding.memory):
        monkeypatch.setattr(module, "select_backend", chosen)
    monkeypatch.setitem(attention_cases.DEVICE, "cuda", attention_cases.CPU)
    return "cuda"


def tiles(case: Case) -> float:
    """Blocks of threads that a case takes, about."""
    return case.B * (case.H or 1) * (1 + case.Tq / 16) * (1 + case.Tk / 32)


SMALL = [case for case in cases() if tiles(case) < 45 and case.elements < 1e6]
#: With several slices of a context, or chunks of features for each warp.
WIDE = [
    Case("tanh", 1, 18, 66, 70, 530, terms=("mask",), layout="sliced"),
    Case("tanh", 1, 18, 40, 330, 8),
]


@pytest.mark.parametrize("case", [*SMALL, *WIDE], ids=test_attention.name)
def test_table(case, host):
    test_attention.judge(case, host)


@pytest.mark.parametrize("case", test_scores.CASES, ids=str)
def test_scores_alone(case, host):
    test_scores.judge(case, host)


def test_invalid_calls(host):
    draw = random.Random(2)
    assert not all(
        invalid_calls.judge(invalid_calls.Call(draw), host, only_invalid=True) for _ in range(500)
    )


@pytest.mark.parametrize("case", test_attention.NEAR_ZERO, ids=test_attention.name)
def test_inputs_near_zero(case, host, monkeypatch):
    monkeypatch.setattr(test_attention, "runnable", lambda *_: True)
    test_attention.test_inputs_near_zero(case, host)


def test_what_is_near_zero_everywhere(host, monkeypatch):
    for module in (test_attention, test_coverage, test_memory):
        monkeypatch.setattr(module, "unsupported_reason", lambda *_: None, raising=False)
        monkeypatch.setattr(module, "runnable", lambda *_: True, raising=False)
    for dtype in (torch.float32, torch.float64):
        for rows in (1, 2, 20):
            test_attention.test_tanh_near_zero(dtype, rows, host)
    for by in ("keys", "features"):
        test_attention.test_blocks_near_zero_beside_others(by, host)
    for case in test_coverage.NEAR_ZERO[::2]:
        test_coverage.check(case, host)
    for case in test_memory.NEAR_ZERO[1::2]:
        test_memory.judge(case, host)
    for case, span, position in test_span.NEAR_ZERO[::2]:
        test_span.judge(case, span, position, host)


@pytest.fixture(params=[1, 2, 8])
def blocks(request, library):
    """The most blocks of a cluster; 1 is what a GPU without clusters has."""
    library.set_most_together(request.param)
    yield request.param
    library.set_most_together(8)


@pytest.mark.parametrize("case", test_attention.STEPS, ids=test_attention.name)
def test_a_step_on_frozen_keys(case, host, blocks, library):
    library.take_launches()
    test_attention.judge_step(case, host)
    parts = -(-case.Tk // 64)  # launches: 1 + 1; 2 + 2 to join parts; 3 + 2 for more than 64
    assert library.take_launches() == (2 if parts <= blocks else 4 if parts <= 64 else 5)


@pytest.mark.parametrize(("case", "span", "position"), test_span.STEPS, ids=lambda x: None)
def test_a_step_within_a_span(case, span, position, host, blocks):
    test_span.judge(case, span, position, host, freeze=True)


@pytest.fixture(params=[1, 3, 1000])
def places(request, library):
    """Blocks that run at once; with 1 no tile's keys are cut into parts."""
    library.set_places(request.param)
    yield request.param
    library.set_places(8)


CUT = [case for case in SMALL if case.Tq > 1 and case.Tk > 32]


@pytest.mark.parametrize("together", [1, 8])
@pytest.mark.parametrize("case", [*CUT[::6], *WIDE], ids=test_attention.name)
def test_keys_in_parts(case, together, host, places, library, monkeypatch):
    """The blocks of a cluster join the parts, or a launch does."""
    library.set_most_together(together)
    test_attention.judge(case, host)
    if case in test_statistics.TABLE:
        monkeypatch.setattr(test_statistics, "runnable", lambda *_: True)
        test_statistics.judge(case, host)
    library.set_most_together(8)


@pytest.mark.parametrize("case", [Case("dot", 1, 1, 4300, 3, 2), Case("tanh", 1, 2, 2300, 3, 2)])
def test_more_parts_than_a_block_joins(case, host, library, monkeypatch):
    """64 at a time, and then what has come of them."""
    monkeypatch.setattr(test_statistics, "runnable", lambda *_: True)
    library.set_places(1000)
    test_attention.judge(case, host)
    test_statistics.judge(case, host)
    library.set_places(8)


def test_parts_are_joined_by_a_launch_of_their_own(host, library, places, blocks):
    query, key, value = (torch.randn(1, n, 8) for n in (20, 100, 100))
    library.take_launches()
    attnfast.dot_attention(query, key, value, backend=host)
    assert library.take_launches() == (1 if places == 1 or blocks == 8 else 2)


#: Products by PyTorch in every layout, where it takes them.
PRODUCTS = [
    Case(score, 2, 9, 40, 64, 72, H=3, terms=terms, layout=layout, dtype=dtype)
    for score, terms, dtype in (
        ("dot", (), torch.float32), ("dot", ("lengths", "mask", "bias"), torch.float64),
        ("tanh", ("lengths",), torch.float32),
    )
    for layout in (*attention_cases.LAYOUTS, "time first")
]  # fmt: skip
#: As large as the forward of an additive score must be; see library.cpp.
PRODUCTS += [
    Case(score, 2, 17, 40, 6, 72, H=3, terms=terms, layout=layout, dtype=dtype)
    for score, terms, layout, dtype in (
        ("tanh", ("lengths", "mask", "bias"), "contiguous", torch.float32),
        ("tanh", ("mask",), "time first", torch.float64),
        ("relu", ("lengths",), "contiguous", torch.float32),
    )
]  # fmt: skip


@pytest.mark.parametrize("case", PRODUCTS, ids=test_attention.name)
def test_products_in_every_layout(case, host, monkeypatch):
    test_attention.judge(case, host)
    monkeypatch.setattr(test_statistics, "runnable", lambda *_: True)
    test_statistics.judge(case, host)


def test_temperature_of_a_large_call(host):
    args = [torch.randn(1, 17, 6), torch.randn(1, 40, 6), torch.randn(1, 40, 120), torch.randn(6)]
    got, want = (
        attnfast.additive_attention(*args, temperature=0.5, need_weights=True, backend=backend)
        for backend in (host, "reference")
    )
    torch.testing.assert_close(got.weights, want.weights)
    torch.testing.assert_close(got.context, want.context)


def test_the_position_is_the_first_of_the_largest(host):
    test_statistics.test_the_position_is_the_first_of_the_largest(9, 64, host)


@pytest.mark.parametrize(
    ("score", "Tq", "A", "Dv", "forward", "backward"),
    [
        ("dot", 9, 64, 64, 4, 8), ("dot", 7, 64, 64, 1, 5), ("dot", 9, 63, 63, 1, 5),
        ("tanh", 9, 64, 64, 2, 6), ("tanh", 7, 64, 64, 2, 5), ("tanh", 20, 64, 64, 5, 6),
    ],
)  # fmt: skip
def test_products_by_pytorch(score, Tq, A, Dv, forward, backward, host, library):
    """From 8 rows and 64 features on, a launch each, and one that drops what is hidden."""
    sizes = (Tq, A), (20, A), (20, Dv)
    query, key, value = (torch.randn(2, *size, requires_grad=True) for size in sizes)
    library.set_places(1)
    library.take_launches()
    if score == "dot":
        context = attnfast.dot_attention(query, key, value, backend=host).context
    else:
        weight = torch.randn(A, requires_grad=True)
        context = attnfast.additive_attention(query, key, value, weight, backend=host).context
    launches = [library.take_launches()]
    context.sum().backward()
    assert [*launches, library.take_launches()] == [forward, backward]
    library.set_places(8)


#: B, Tq, Tk, A, Dv of docs/performance.md, and one step.
SHAPES = {
    "S1": (32, 50, 50, 512, 512), "S2": (16, 100, 400, 256, 512), "S3": (1, 1000, 1000, 128, 128),
    "a step": (32, 1, 400, 512, 512), "a step of one sentence": (1, 1, 400, 512, 512),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("score", ["tanh", "dot"])
def test_blocks_fill_the_multiprocessors(score, shape, host, library):
    """At most a fifth of an H100's 132 are idle while the busiest works, in every launch.

    An exception is a step of one sentence, whose blocks are one cluster.
    """
    B, Tq, Tk, A, Dv = SHAPES[shape]
    library.recorded_blocks.restype = ctypes.c_int64
    library.set_places(132 * (4 if Dv <= 128 else 3))  # see BUDGETS of test_cuda_build.py
    query, key, value = (
        torch.zeros(B, *size, requires_grad=True) for size in ((Tq, A), (Tk, A), (Tk, Dv))
    )
    vector = torch.zeros(A, requires_grad=True)
    library.set_only_recorded(True)
    try:
        if score == "dot":
            context = attnfast.dot_attention(query, key, value, backend=host).context
        else:
            context = attnfast.additive_attention(query, key, value, vector, backend=host).context
        if Tq > 1:
            context.sum().backward()
        blocks = list(itertools.takewhile(bool, map(library.recorded_blocks, itertools.count())))
    finally:
        library.set_only_recorded(False)
        library.set_places(8)
    few = [7] if shape == "a step of one sentence" else []
    assert blocks[len(blocks) - len(few) :] == few
    for n in blocks[: len(blocks) - len(few)]:
        assert n / (132 * -(-n // 132)) >= 0.8, blocks


@pytest.mark.parametrize(("Tk", "blocks"), [(50, 4), (400, 7)])
def test_blocks_of_a_step_with_a_history(Tk, blocks, host, library):
    """On an H100 each of 32 sentences takes a cluster, whose blocks divide the keys."""
    library.recorded_blocks.restype = ctypes.c_int64
    library.set_places(132 * 3)
    query, key = torch.zeros(32, 1, 64), torch.zeros(32, Tk, 64)
    vector, penalty = torch.zeros(64), torch.ones(1)
    library.set_only_recorded(True)
    try:
        attnfast.coverage_attention(query, key, key, vector, penalty=penalty, backend=host)
        recorded = list(itertools.takewhile(bool, map(library.recorded_blocks, itertools.count())))
    finally:
        library.set_only_recorded(False)
        library.set_places(8)
    assert recorded == [32 * blocks]


@pytest.mark.parametrize(
    "case", [x for x in SMALL if x in test_statistics.TABLE][::2], ids=test_attention.name
)
def test_statistics_table(case, host, monkeypatch):
    monkeypatch.setattr(test_statistics, "runnable", lambda *_: True)
    test_statistics.judge(case, host)


@pytest.mark.parametrize("case", test_statistics.STEPS, ids=test_attention.name)
def test_statistics_of_a_step(case, host, blocks, monkeypatch):
    monkeypatch.setattr(test_statistics, "runnable", lambda *_: True)
    test_statistics.judge(case, host)


def test_what_statistics_owe(host, monkeypatch):
    monkeypatch.setattr(test_statistics, "runnable", lambda *_: True)
    for span, position in test_statistics.SPANS:
        test_statistics.test_spans(span, position, 2, host)
    test_statistics.test_the_position_is_the_first_of_the_largest(5, 4, host)
    for Tq in (1, 2):
        test_statistics.test_rows_that_see_nothing(Tq, host)
        for low, high in ((-100, -100), (test_statistics.LOW, 0.0), (-3e38, 3e38)):
            test_statistics.test_low_scores_before_high_ones(low, high, Tq, host)
        test_statistics.test_a_sharp_row_far_from_the_first_key_keeps_its_variance(Tq, host)


@pytest.mark.parametrize("seed", range(2))
def test_fuzz(seed, host):
    for case in [case for case in fuzz(seed, 32, 100_000) if tiles(case) < 20][:8]:
        test_attention.judge(case, host)


@pytest.mark.parametrize(("Tq", "Tk"), [(1, 40), (1, 200), (20, 40)])
@pytest.mark.parametrize("span", [False, True])
def test_a_row_that_has_diverged_is_nan(span, Tq, Tk, host, blocks):
    test_attention.test_a_row_that_has_diverged_is_nan(span, Tq, Tk, host)


@pytest.mark.parametrize("Tq", [1, 3])
def test_what_relu_may_not_see_may_be_infinite(Tq, host, monkeypatch):
    monkeypatch.setattr(test_attention, "runnable", lambda *_: True)
    test_attention.test_what_relu_may_not_see_may_be_infinite(Tq, host)


SPANS = [x for x in test_span.cases() if tiles(x[0]) < 20 and x[0].seed % 8 in (0, 2, 3)]


@pytest.mark.parametrize(
    ("case", "span", "position"),
    [x for x in SPANS if x[0].Tq > 1 and x[0].Tk > 32][::4],
    ids=test_span.name,
)
def test_keys_within_spans_in_parts(case, span, position, host, places):
    test_span.judge(case, span, position, host)


@pytest.mark.parametrize(("case", "span", "position"), SPANS, ids=test_span.name)
def test_spans(case, span, position, host):
    test_span.judge(case, span, position, host)


def test_a_row_ends_with_its_columns(host):
    test_span.test_a_row_ends_with_its_columns(host)


@pytest.mark.parametrize("case", test_copying.copies(), ids=str)
def test_copying_table(case, host):
    test_copying.check(case, host)


def test_copying_fuzz(host):
    for case in test_copying.fuzz(0, 24):
        test_copying.check(case, host)


HISTORIES = [x for x in test_coverage.histories() if x.B * (x.H or 1) * x.Tq <= 16]


@pytest.mark.parametrize("case", HISTORIES, ids=test_coverage.name)
def test_coverage_table(case, host):
    test_coverage.check(case, host)


LONG = [case for case in HISTORIES if case.Tk > 128]


@pytest.mark.parametrize("case", LONG, ids=test_coverage.name)
def test_coverage_by_fewer_blocks(case, host, blocks):
    test_coverage.check(case, host)


def test_coverage_of_no_rows(host):
    test_coverage.check(test_coverage.History("tanh", 2, 0, 3, 5, 4, filters=(2, 1, 3)), host)


@pytest.mark.parametrize("case", test_coverage.STEPS, ids=test_coverage.name)
def test_coverage_in_steps(case, host):
    test_coverage.check(case, host, test_coverage.in_steps)


@pytest.mark.parametrize("score", ["tanh", "dot"])
def test_coverage_in_steps_whose_keys_blocks_divide(score, host, blocks):
    """A step leaves the gradients of its scores as they are, for those of the keys."""
    case = test_coverage.History(score, 2, 3, 130, 8, 5, terms=("penalty", "lengths"))
    test_coverage.check(case, host, test_coverage.in_steps)


def test_coverage_fuzz(host):
    for case in [case for case in test_coverage.fuzz(0, 40) if case.Tq * case.B <= 8]:
        test_coverage.check(case, host)


def test_what_the_history_owes(host, monkeypatch):
    """The properties that test_coverage.py asks of every backend, by name."""
    monkeypatch.setattr(test_coverage, "skip_unless", lambda *_: None)
    for score in ("tanh", "dot"):
        test_coverage.test_steps_are_the_whole(score, "log_previous", host)
    for terms in (("penalty",), ("transition_prob", "coverage_weight", "location")):
        test_coverage.test_hidden_keys_change_nothing(terms, host)
    test_coverage.test_a_key_out_of_reach_may_have_any_score(host)
    for previous, bias in test_coverage.VANISHING:
        test_coverage.test_weights_that_vanish(previous, bias, host)
    for factor in (1e4, -5e4):
        test_coverage.test_large_scores(factor, host)
    test_coverage.test_empty_rows(host)


@pytest.mark.parametrize("case", test_memory.CASES, ids=str)
def test_recurrent_decoder(case, host):
    test_memory.judge(case, host)


@pytest.mark.parametrize("case", [x for x in test_memory.CASES if x.Tk > 64], ids=str)
def test_recurrent_decoder_whose_steps_are_in_parts(case, host, library):
    library.set_most_together(1)
    test_memory.judge(case, host)
    library.set_most_together(8)


def test_step_keys_divided_among_blocks(host, blocks):
    test_memory.test_log_sum_exp_of_steps(70, host)
    for score in ("tanh", "dot"):
        test_memory.test_what_no_step_may_see_changes_nothing(score, torch.float32)


@pytest.mark.parametrize("score", ["dot", "tanh"])
def test_what_every_backend_owes(score, host):
    """The properties that test_attention.py asks of every backend, by name."""
    for size in ((4, 70, 8, 8), (9, 70, 8, 64)):
        test_attention.test_empty_rows(score, size, host)
    for by in ("mask", "bias"):
        for size in ((1, 40, 16, 8), (5, 40, 16, 8), (9, 40, 64, 72)):
            test_attention.test_what_is_not_seen_changes_nothing(by, score, size, host)
    for size in ((3, 20, 16, 8), (9, 20, 72, 64)):
        test_attention.test_a_row_is_not_touched_by_what_others_see(score, size, host)
    test_attention.test_offsets_past_two_to_the_31(score, host)
    test_attention.test_results_do_not_depend_on_what_is_asked(600, host)
    test_attention.test_half_inputs_of_256(host)
    for size in ((3, 5, 8, 8), (9, 20, 64, 8)):
        test_attention.test_scale_multiplies_the_query(size, ("bias",), host)
    for scale in (0.0, 1e-50):
        test_attention.test_a_scale_of_0_hides_no_nan(scale, host)


@pytest.mark.parametrize("factor", [1e4, -5e4])
def test_large_scores(factor, host):
    test_attention.test_large_scores(factor, host)


@pytest.mark.parametrize(
    ("q", "k"), [(8.0, 8.0), (18.0, 18.0), (21.7, -21.7), (-300.0, 299.5), (1e30, 1.0)]
)
def test_factored_domain(q, k, host):
    test_attention.test_factored_domain(q, k, host)


@pytest.mark.parametrize("small", [slice(1, None, 2), slice(8, 32), slice(None)])
@pytest.mark.parametrize("factor", [0.0, 1e-8, 1e-30])
def test_weights_that_vanish(factor, small, host):
    for offset in (0.0, 10.0):
        test_attention.test_weights_that_vanish(factor, small, offset, host)


# ---- the recurrent layer ------------------------------------------------------------------------


@pytest.fixture
def recurrent(host, monkeypatch):
    monkeypatch.setattr(test_recurrent, "served", lambda *_: None)
    return host


FEEDS, EVERYTHING = "input_feeding", test_recurrent.EVERYTHING
STACK, PAST = test_recurrent.STACK, test_recurrent.PAST
SMALL_LAYERS = [
    x
    for x in test_recurrent.CASES
    if x.B * x.T * max(x.H, x.Tk) < 5e3 and not {"narrow", *test_recurrent.SPARSE} & {*x.terms}
]


@pytest.mark.parametrize("case", SMALL_LAYERS, ids=str)
def test_recurrent_table(case, recurrent):
    test_recurrent.judge(case, recurrent)


def test_recurrent_fuzz(recurrent):
    test_recurrent.test_fuzz(5, recurrent)


#: Multiprocessors, and bytes of shared memory of a block: enough for all; too few blocks to store
#: keys and values there; too little memory for the weights.
AT_ONCE = {"all": (7, 1 << 20), "few blocks": (2, 1 << 20), "weights outside": (5, 82_200)}


@pytest.fixture(params=AT_ONCE)
def at_once(request, library):
    """Let the blocks of one launch run all steps."""
    library.set_multiprocessors(*AT_ONCE[request.param])
    yield request.param
    library.set_multiprocessors(0, 0)


#: More features than are staged at a time; more outputs than a tile has, in forward and backward.
WIDE_LAYERS = [
    test_recurrent.Case(*start, *sizes, terms=terms)
    for start, sizes, terms in (
        (("gru", "attend_first", "tanh"), (3, 3, 5, 9, 7, 13, 600), ("projection",)),
        (("lstm", FEEDS, "dot"), (33, 2, 5, 20, 7, 40, 12, 150), ("projection", "feed", "biases")),
    )
]
LAYERS_AT_ONCE = [
    x
    for x in [*SMALL_LAYERS, *WIDE_LAYERS]
    if x.dtype == torch.float32
    and x.recurrence
    and 0 < x.B * x.T * (x.Tk + 1) < 600
    and not {"past", "stack", *test_recurrent.MASKS, *test_recurrent.OUTPUTS} & {*x.terms}
]


@pytest.mark.parametrize("case", LAYERS_AT_ONCE, ids=str)
def test_all_steps_at_once(case, recurrent, at_once):
    sample = LAYERS_AT_ONCE[1 :: 2 if at_once == "all" else 8]
    if case not in sample and case not in WIDE_LAYERS:
        pytest.skip("a sample of the cases suffices with this number of blocks")
    test_recurrent.judge(case, recurrent)


def judge_races(path: str) -> None:
    """Run layers whose steps run at once, with a library under ThreadSanitizer."""
    load(path).set_multiprocessors(3, 1 << 20)
    with mock.patch.object(test_recurrent, "served", return_value=None):
        for start, sizes, terms in (
            (("gru", "attend_first", "tanh"), (2, 2, 3, 5, 9, 6, 18), EVERYTHING),
            (("lstm", FEEDS, "dot"), (1, 3, 3, 4, 12, 6, 7, 8), ("projection", "feed", "unread")),
        ):
            test_recurrent.judge(test_recurrent.Case(*start, *sizes, terms=terms), "cuda")


def test_sanitizers_when_steps_run_at_once(tmp_path):
    flags = ("-O1", "-g1", "-fsanitize=thread")
    library = compile_library(tmp_path, *flags)
    sanitizer = subprocess.run(
        [os.environ.get("CXX") or "g++", "-print-file-name=libtsan.so"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    code = f"import test_cuda_on_host; test_cuda_on_host.judge_races({str(library)!r})"
    options = "ignore_noninstrumented_modules=1 report_signal_unsafe=0"
    done = subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
             "LD_PRELOAD": sanitizer, "TSAN_OPTIONS": options},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}{done.stderr[:4000]}"


@pytest.mark.parametrize("score", ["dot", "tanh"])
@pytest.mark.parametrize("recurrence", test_recurrent.RECURRENCES)
def test_launches_of_all_steps_at_once(recurrence, score, recurrent, at_once, library):
    if at_once != "all":
        pytest.skip("how much fits in shared memory changes no number of launches")
    counts = []
    for T in (2, 8):
        case = test_recurrent.Case("lstm", recurrence, score, T=T, terms=("lengths", "projection"))
        args = test_recurrent.call(case)
        library.take_launches()
        made = test_recurrent.RECURRENT(recurrent, args)
        counts.append([library.take_launches()])
        given = test_recurrent.backward_of(args, made)._replace(grad_contexts=None)
        assert not runs_step_by_step(args._asdict()) and not runs_step_by_step(given._asdict())
        test_recurrent.RECURRENT.backward(recurrent, given)
        counts[-1].append(library.take_launches())
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "change",
    [
        {"B": 129},
        {"dtype": torch.float64},
        {"Tk": 530},
        {"terms": ("past",)},
        {"terms": ("stack",)},
        *({"mode": "lstm", "recurrence": FEEDS, "terms": ("projection", x)}
          for x in (*test_recurrent.MASKS, *test_recurrent.OUTPUTS)),
    ],
)  # fmt: skip
def test_layers_that_run_step_by_step(change, recurrent, library):
    library.set_multiprocessors(1, 1 << 20)
    sizes = {"B": 3, "T": 8, "terms": ("projection",), **change}
    case = test_recurrent.Case(**{"mode": "gru", "recurrence": "attend_first", **sizes})
    args = test_recurrent.call(case)
    library.take_launches()
    test_recurrent.RECURRENT(recurrent, args)
    library.set_multiprocessors(0, 0)
    assert library.take_launches() > 3 * sizes["T"]
    assert runs_step_by_step(args._asdict()) or sizes.get("Tk")  # which only the library knows


captured = test_cuda_graphs.captured


@pytest.mark.parametrize("case", test_cuda_graphs.CUDA_CASES, ids=str)
def test_recurrent_layers_in_graphs(case, recurrent, captured):
    test_cuda_graphs.judge(case, recurrent, captured)


def test_repeated_launches_are_bitwise_equal(recurrent, library):
    library.set_multiprocessors(*AT_ONCE["all"])
    case = test_recurrent.Case("gru", "input_feeding", "tanh", 2, 5, terms=EVERYTHING)
    args = test_recurrent.call(case)
    made = [test_recurrent.RECURRENT(recurrent, args) for _ in range(2)]
    given = test_recurrent.backward_of(args, made[0])
    grads = [test_recurrent.RECURRENT.backward(recurrent, given) for _ in range(2)]
    library.set_multiprocessors(0, 0)
    for x, y in zip([*made[0], *grads[0]], [*made[1], *grads[1]]):
        assert torch.equal(x, y)


@pytest.mark.parametrize("recurrence", test_recurrent.RECURRENCES)
def test_what_the_recurrent_layer_owes(recurrence, recurrent):
    """The properties that test_recurrent.py asks of every backend, by name."""
    for terms in ((), ("unread",)):
        test_recurrent.test_what_no_step_reads_changes_nothing(recurrence, terms, recurrent)
    test_recurrent.test_a_sequence_that_has_diverged_is_alone(recurrence, recurrent)
    test_recurrent.test_layouts_change_nothing(recurrent)
    for mode in test_recurrent.GATES:
        test_recurrent.test_without_attention_it_is_pytorchs_layer(mode, recurrent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", ["bahdanau", "location"])
def test_layers_in_half_precision_run_in_float32(attention, dtype, recurrent, monkeypatch):
    monkeypatch.setattr(_fused_rnn, "try_select_backend", lambda *_: "cuda")
    test_nn_recurrent.test_half_types_are_summed_in_float32(
        "attend_last", attention, dtype, monkeypatch
    )


@pytest.mark.parametrize("attention", ["bahdanau", "location"])
def test_layers_run_under_autocast(attention, recurrent, monkeypatch):
    monkeypatch.setattr(_fused_rnn, "try_select_backend", lambda *_: "cuda")
    test_nn_recurrent.test_autocast_to_bfloat16_rounds_the_factors_of_products(
        "attend_last", attention
    )


def test_a_recurrent_layer_takes_no_packed_weights(recurrent):
    """What the CPU's launcher refuses this one does: they share the list of arguments."""
    args = test_recurrent.call(test_recurrent.Case("gru", "attend_first"))
    packed = args._replace(packed=torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="packed does not fit"):
        test_recurrent.RECURRENT(recurrent, packed)


@pytest.mark.parametrize("term", test_recurrent.SPARSE)
def test_a_softmax_alone_is_computed(term, recurrent):
    args = test_recurrent.call(test_recurrent.Case("gru", "attend_first", terms=(term,)))
    with pytest.raises(RuntimeError, match="normalisation does not fit"):
        test_recurrent.RECURRENT(recurrent, args)
    of_step = attention_of(args, args.key[:, :1], slice(0, 1))
    with pytest.raises(RuntimeError, match="normalisation does not fit"):
        ATTENTION(recurrent, of_step)


#: More keys than a block takes, or a cluster; with enough steps for so many, or not.
LONG_LAYERS = [
    test_recurrent.Case(mode, recurrence, score, B, T, 5, 9, Tk, 13, 12, 21, terms, dtype)
    for mode, recurrence, score, B, T, Tk, terms, dtype in (
        ("gru", FEEDS, "tanh", 2, 40, 150, (*EVERYTHING, "unread"), torch.float32),
        ("tanh", FEEDS, "relu", 1, 40, 150, ("projection", "unread"), torch.float64),
        ("lstm", FEEDS, "dot", 1, 40, 150, ("lengths",), torch.float32),
        ("lstm", FEEDS, "dot", 2, 4, 150, EVERYTHING, torch.float32),
        ("gru", FEEDS, "tanh", 1, 3, 530, ("lengths",), torch.float32),
        ("gru", FEEDS, "tanh", 2, 4, 150, ("projection",), torch.float64),
        ("gru", "attend_first", "tanh", 2, 4, 150, EVERYTHING, torch.float32),
        ("lstm", FEEDS, "tanh", 2, 4, 70, (*EVERYTHING, *STACK, *PAST), torch.float64),
        ("gru", FEEDS, "dot", 2, 40, 70, (*STACK, "lengths", "unread"), torch.float32),
    )
]


@pytest.mark.parametrize("case", LONG_LAYERS, ids=str)
def test_a_recurrent_layer_over_many_keys(case, recurrent, blocks):
    if blocks == 2 and case not in LONG_LAYERS[::3]:
        pytest.skip("a sample of the cases suffices with this number of blocks")
    test_recurrent.judge(case, recurrent)
    args = test_recurrent.call(case)
    for x, y in zip(*(test_recurrent.RECURRENT(recurrent, args) for _ in range(2))):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("recurrence", "sizes", "forward", "backward"),
    [
        ("attend_first", {}, 4, 4),
        ("attend_last", {}, 4, 4),
        ("input_feeding", {}, 4, 5),
        ("input_feeding", {"F": 21}, 5, 6),  # wider than two contexts
        ("input_feeding", {"Tk": 40}, 5, 6),  # more keys than four a step
        ("attend_first", {"terms": (*EVERYTHING, "past", "fertility")}, 4, 5),
        ("input_feeding", {"terms": (*EVERYTHING, "past", "transition")}, 5, 7),
        ("attend_last", {"terms": (*EVERYTHING, *PAST)}, 4, 4),
        ("attend_last", {"terms": (*EVERYTHING, "stack")}, 7, 7),
        ("attend_last", {"terms": (*EVERYTHING, "stack", "dropout above")}, 8, 8),
        ("attend_last", {"terms": (*EVERYTHING, "zoneout", "dropout of state")}, 4, 4),
        ("attend_first", {"terms": (*EVERYTHING, "dropout of query")}, 4, 4),
        ("attend_first", {"terms": ("dropout of query", "lengths")}, 4, 4),  # no projection
        ("attend_last", {"terms": (*EVERYTHING, "dropout of feed")}, 5, 5),
        ("attend_last", {"terms": (*EVERYTHING, "gate")}, 5, 5),
        ("input_feeding", {"terms": (*EVERYTHING, "dropout of output")}, 5, 5),
        ("input_feeding", {"terms": (*EVERYTHING, "dropout of joined")}, 6, 7),
        ("input_feeding", {"terms": (*EVERYTHING, "identity")}, 5, 6),
        ("input_feeding", {"terms": (*EVERYTHING, *test_recurrent.MASKS, "gate")}, 9, 9),
    ],
)
def test_launches_of_a_recurrent_step(
    recurrence, sizes, forward, backward, recurrent, blocks, library
):
    """Products and kernels, each a launch, whatever the terms; keys for one block of a cluster.

    Nothing reads contexts; a gradient of theirs is a product more where there was one less.
    """
    counts = []
    for T in (4, 9):
        terms = {"terms": EVERYTHING, **sizes}
        case = test_recurrent.Case("gru", recurrence, "tanh", T=T, **terms)
        args = test_recurrent.call(case)
        library.take_launches()
        made = test_recurrent.RECURRENT(recurrent, args)
        counts.append([library.take_launches()])
        given = test_recurrent.backward_of(args, made)
        for grad in (None, given.grad_contexts):
            test_recurrent.RECURRENT.backward(recurrent, given._replace(grad_contexts=grad))
            counts[-1].append(library.take_launches())
    read = max(backward, 6) if recurrence == FEEDS else backward
    assert [(b - a) / 5 for a, b in zip(*counts)] == [forward, backward, read]
