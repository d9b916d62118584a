"""CUDA graphs of a recurrent layer, without a GPU: a replay runs the captured work again."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import test_recurrent
import torch

import attnfast
from attnfast._utils.checks import InputError
from attnfast.ops import cuda_graphs, reference, self_check
from attnfast.ops.backends import DispatchKey, unsupported_reason
from attnfast.ops.recurrent import GRAPHS, RECURRENT

pytestmark = pytest.mark.skipif(
    unsupported_reason("cpu", torch.device("cpu"), torch.float32) is not None, reason="no _C_cpu"
)
Case = test_recurrent.Case
EVERYTHING, PAST = test_recurrent.EVERYTHING, test_recurrent.PAST
CASES = [
    *(
        Case("gru", x, "tanh", terms=EVERYTHING, seed=seed)
        for seed, x in enumerate(test_recurrent.RECURRENCES)
    ),
    Case("tanh", None, terms=("targets", "dropout", "biases")),
    Case("gru", "attend_first", terms=("entmax15", *EVERYTHING)),
    Case("lstm", "input_feeding", "tanh", terms=(*EVERYTHING, *test_recurrent.STACK)),
    Case("lstm", "input_feeding", "relu", terms=(*EVERYTHING, *PAST, "gate"), seed=2),
    Case("gru", "attend_last", "dot", terms=("projection", *PAST, "unread"), dtype=torch.float64),
    Case("gru", "attend_first", "tanh", terms=("past", "sigmoid", "filters", "detached"), seed=1),
    Case(
        "lstm", "input_feeding", "tanh",
        terms=(*EVERYTHING, *test_recurrent.MASKS, "zoneout", "identity", "gate"),
    ),
]  # fmt: skip
#: Those that the CUDA library runs.
CUDA_CASES = [x for x in CASES if not {*test_recurrent.SPARSE} & {*x.terms}]


class Graph:
    """Work that runs again when it is replayed."""

    def __init__(self, work):
        self.work, self.replays = work, 0

    def replay(self):
        self.replays += 1
        self.work()


@pytest.fixture
def captured(monkeypatch):
    """Let every layer be captured; return the list of graphs."""
    made = []

    def capture(work, *_):
        made.append(Graph(work))
        return made[-1]

    current = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    fake = dict(
        Stream=lambda *_: None, graph_pool_handle=object, empty_cache=lambda: None,
        is_current_stream_capturing=lambda: False, current_stream=lambda _: current,
        get_allocator_backend=lambda: "native", device=lambda _: nullcontext(),
    )  # fmt: skip
    for name, stand_in in fake.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    resize = cuda_graphs._Stream.resize

    def resize_to_nan(stream, size):
        resize(stream, size)
        stream.arena.fill_(255)

    monkeypatch.setattr(cuda_graphs._Stream, "resize", resize_to_nan)
    monkeypatch.setattr(cuda_graphs, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(cuda_graphs, "capture", capture)
    graphs = cuda_graphs.Graphs(GRAPHS.axes, lambda _: True, GRAPHS.logarithms)
    for backend in ("cpu", "cuda"):
        monkeypatch.setitem(RECURRENT.runners, backend, graphs.run)
    return made


def arguments(T=9, Tk=17, **more):
    return test_recurrent.call(Case("gru", "attend_first", "tanh", T=T, Tk=Tk, **more))


def run(args):
    return RECURRENT.differentiable("cpu", args)


def judge(case, backend, captured):
    """The first call, the one that captures and a replay satisfy the rule, with padding."""
    with mock.patch.object(cuda_graphs, "bucket", lambda n: n + 3):
        for _ in range(3):
            test_recurrent.judge(case, backend)
    assert [x.replays for x in captured] == [2] * len(captured) and captured


@pytest.mark.parametrize("case", CASES, ids=str)
def test_table(case, captured):
    judge(case, "cpu", captured)


def test_buckets():
    lengths = range(1, 2000)
    buckets = [cuda_graphs.bucket(n) for n in lengths]
    assert all(n <= x <= 1.125 * n for n, x in zip(lengths, buckets))
    octave = [x for x in sorted(set(buckets)) if 32 <= x <= 64]
    assert octave == [32, 36, 40, 44, 48, 52, 56, 60, 64]


def test_replays_have_the_bits_of_the_first_call(captured):
    args = arguments()
    first, second, third = (run(args) for _ in range(3))
    for x, y, z in zip(first, second, third):
        assert torch.equal(x, y) and torch.equal(x, z)
        assert x.is_contiguous() and y.is_contiguous()
        assert y.data_ptr() != z.data_ptr() or not x.numel()
    (graph,) = captured
    assert graph.replays == 2


def test_a_bucket_has_one_graph(captured):
    for T, Tk in ((17, 33), (18, 36), (18, 34), (17, 36)):
        test_recurrent.judge(Case("gru", "attend_first", "tanh", T=T, Tk=Tk), "cpu")
    forward, backward = captured
    assert forward.replays == backward.replays == 3
    run(arguments(19, 33)), run(arguments(17, 37)), run(arguments(17, 33, dtype=torch.float64))
    run(arguments(17, 33)._replace(scale=0.3))
    assert len(captured) == 2


def test_lengths_beyond_the_longest(captured):
    """They are those of the longest, and do not reach into the padding."""
    args = arguments(T=17, Tk=33, terms=("projection", "biases"))
    long = {"target_lengths": torch.full((3,), 40), "lengths": torch.full((3,), 40)}
    wanted = run(args)
    for _ in range(2):
        found = run(args._replace(**long))
        for x, y in zip(found, wanted):
            assert torch.equal(x, y)


def test_results_outlive_the_next_call(captured):
    """Two forwards before the backward of the first."""
    first, second = arguments(seed=1), arguments(seed=2)
    for args in (first, second, first):
        run(args).states.sum().backward()
    wanted = torch.autograd.grad(run(first).states.square().sum(), first.input)[0]
    made = run(first).states
    run(second)
    torch.testing.assert_close(torch.autograd.grad(made.square().sum(), first.input)[0], wanted)


def test_inference_mode(captured):
    args = arguments()
    wanted = run(args).states
    for _ in range(2):
        with torch.inference_mode():
            found = RECURRENT("cpu", args).states
        assert torch.equal(found, wanted)
    assert torch.equal(run(args).states, wanted)


def test_layers_outside_graphs(captured, monkeypatch):
    layer = attnfast.nn.AttentionGRU(4, 6, 5, attnfast.nn.LuongAttention(6, 5))
    x, memory = torch.randn(2, 9, 4), layer.prepare(torch.randn(2, 7, 5))

    def reasons():
        return str(attnfast.explain(layer, x, memory))

    assert "launches: one by one\n    not a CUDA graph: these are the first" in reasons()
    assert "launches: a CUDA graph" in reasons()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "not a CUDA graph: a graph is being captured that contains them" in reasons()
    monkeypatch.setenv("ATTNFAST_CUDA_GRAPHS", "0")
    assert "not a CUDA graph: ATTNFAST_CUDA_GRAPHS=0" in reasons()
    monkeypatch.setenv("ATTNFAST_CUDA_GRAPHS", "off")
    with pytest.raises(InputError, match="ATTNFAST_CUDA_GRAPHS must be 0 or 1, got off"):
        layer(x, memory)


def test_an_invalid_capture(captured, monkeypatch):
    """One warning, and all calls run without graphs."""

    def fail(*_):
        raise cuda_graphs.InvalidCaptureError("CUDA error: operation not permitted\nmore")

    monkeypatch.setattr(cuda_graphs, "capture", fail)
    args = arguments()
    wanted = run(args)
    with pytest.warns(UserWarning, match="attnfast uses no CUDA graphs, the capture failed: CUDA "):
        found = run(args)
    found_again = attnfast.explain(run, args)
    for x, y, z in zip(wanted, found, found_again.output):
        torch.testing.assert_close(x, y)
        torch.testing.assert_close(x, z)
    assert "not a CUDA graph: the capture failed: CUDA error" in str(found_again)


CAUSES = {
    "operation failed due to a previous error": (None, cuda_graphs.InvalidCaptureError),
    "": (ValueError("what the work says"), cuda_graphs.InvalidCaptureError),
    "CUDA error: out of memory": (None, torch.OutOfMemoryError),
    "invalid": (KeyboardInterrupt(), KeyboardInterrupt),
}


@pytest.mark.parametrize("error", CAUSES)
def test_pytorch_recovers_from_an_invalid_capture(error, monkeypatch):
    """Its allocator leaves the pool, and a valid capture resets its generator."""
    said, (cause, raised) = [], CAUSES[error]

    class Cuda:
        def capture_begin(self, *pool, **_):
            said.append(("begin", *pool))

        def capture_end(self):
            said.append(("end",))
            if len(said) == 2:
                raise RuntimeError(error)

    def work():
        if cause is not None:
            raise cause

    stream = SimpleNamespace(device=torch.device("cpu"), wait_stream=lambda _: None)
    stand_ins = dict(
        CUDAGraph=Cuda, current_stream=lambda: stream, current_blas_handle=lambda: 0,
        device=lambda _: nullcontext(), stream=lambda _: nullcontext(),
    )  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(cuda_graphs, "end_allocation_to_pool", lambda *x: said.append(x))
    with pytest.raises(raised, match="what the work says" if not error else None):
        cuda_graphs.capture(work, stream, "pool")
    assert said == [("begin", "pool"), ("end",), (stream.device, "pool"), ("begin",), ("end",)]


@pytest.mark.parametrize("failures", [1, 2])
def test_too_little_memory_for_a_capture(failures, captured, monkeypatch):
    """A second attempt begins with an empty cache; without success these calls have no graphs."""
    args, other = arguments(), arguments(T=12)
    wanted, make = run(args), cuda_graphs.capture
    attempts = []

    def capture(*rest):
        attempts.append(1)
        if len(attempts) <= failures:
            raise RuntimeError("API call failed")  # what the library makes of it
        return make(*rest)

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    for _ in range(3):
        found = attnfast.explain(run, args)
        torch.testing.assert_close(found.output.states, wanted.states)
    said = "not a CUDA graph: there was too little memory for one"
    assert (said in str(found)) is (failures == 2)
    run(other), run(other)
    assert len(attempts) == 3 and len(captured) == 3 - failures


def test_too_little_memory_for_the_arena(captured, monkeypatch):
    args = arguments()

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(cuda_graphs._Stream, "allocate", fail)
        found = attnfast.explain(run, args)
    assert "not a CUDA graph: there is too little memory for one" in str(found)
    torch.testing.assert_close(found.output.states, reference.recurrent(args).states)


def test_wrong_arguments(captured):
    """The error names the argument, and graphs remain."""
    args = arguments()
    run(args), run(args)
    with pytest.raises(ValueError, match="weight_hh must be"):
        run(args._replace(weight_hh=args.weight_hh[:, 1:]))
    run(args)
    assert [x.replays for x in captured] == [2]


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = attnfast.nn.AttentionGRU(4, 6, 5, attnfast.nn.LuongAttention(6, 5))

    def forward(self, x, source):
        return self.layer(x, self.layer.prepare(source)).output


@pytest.mark.filterwarnings("ignore")
def test_a_trace(captured):
    """A replay would not be traced."""
    decoder, inputs = Decoder(), (torch.randn(2, 9, 4), torch.randn(2, 7, 5))
    with torch.no_grad():
        traced = torch.jit.trace(decoder, inputs)
        torch.testing.assert_close(traced(*inputs), decoder(*inputs))


def test_first_results_can_be_changed_in_place(captured):
    """A single sequence's results without padding would be contiguous views."""
    args = arguments(T=17, Tk=33, B=1)
    for _ in range(3):
        run(args).states.add_(1)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (torch.backends.cuda, "preferred_blas_library", lambda: "another"),
        (torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="another")),
        (torch, "are_deterministic_algorithms_enabled", lambda: "another"),
    ],
)
def test_settings_of_products_have_their_own_graphs(owner, name, value, captured, monkeypatch):
    run(arguments()), run(arguments())
    monkeypatch.setattr(owner, name, value)
    assert "these are the first of their shapes" in str(attnfast.explain(run, arguments()))


def test_a_pool_does_not_outlive_its_graphs(captured, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 1)
    pools = []
    make = cuda_graphs.capture
    monkeypatch.setattr(
        cuda_graphs, "capture", lambda work, side, pool: pools.append(pool) or make(work)
    )
    for scale in (1.0, 1.0, 2.0, 2.0):
        run(arguments()._replace(scale=scale))
    [streams] = RECURRENT.runners["cpu"].__self__._streams.values()
    [stream] = streams.values()
    stream.graphs.clear()
    run(arguments()._replace(scale=3.0)), run(arguments()._replace(scale=3.0))
    assert pools[0] is pools[1] is not pools[2]


def test_streams_have_their_own_arenas(captured, monkeypatch):
    graphs = RECURRENT.runners["cpu"].__self__
    for number in range(6):
        stream = SimpleNamespace(cuda_stream=number, synchronize=lambda: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, stream=stream: stream)
        run(arguments()), run(arguments())
    [streams] = graphs._streams.values()
    assert len(captured) == 6 and len(streams) == cuda_graphs.MAX_STREAMS
    assert len({x.arena.data_ptr() for x in streams.values()}) == cuda_graphs.MAX_STREAMS


def test_too_little_memory_for_a_replay(captured, monkeypatch):
    args = arguments()
    wanted = run(args)

    def fail(_):
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(Graph, "replay", fail)
        found = attnfast.explain(run, args)
    torch.testing.assert_close(found.output.states, wanted.states)
    assert "not a CUDA graph: there is too little memory for one" in str(found)


def test_subclasses_of_tensors(captured):
    class Mine(torch.Tensor):
        pass

    args = arguments()
    args = args._replace(value=args.value.as_subclass(Mine))
    with torch.no_grad():
        said = str(attnfast.explain(RECURRENT, "cpu", args))
    assert "an argument is on another device, or of a subclass of Tensor" in said


def test_the_oldest_graph_is_dropped(captured, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    for scale in (1.0, 1.0, 2.0, 2.0, 1.0, 3.0, 3.0, 1.0):  # 3 drops 2
        run(arguments()._replace(scale=scale))
    assert [x.replays for x in captured] == [3, 1, 1]
    run(arguments()._replace(scale=2.0))
    assert len(captured) == 3


def test_a_larger_call_has_a_larger_arena(captured):
    """The graphs of the smaller one are captured again."""
    small, large = arguments(), arguments(T=100)
    for args in (small, small, large, large, small, small, large):
        run(args)
    assert [x.replays for x in captured] == [1, 2, 2]


def test_the_self_check_compares_a_replay(captured, monkeypatch):
    request = DispatchKey(torch.device("cpu"), torch.float32, "recurrent")
    assert self_check.compare("cpu", request).failure is None and len(captured) == 2
    captured.clear()
    monkeypatch.setattr(Graph, "replay", lambda graph: None)  # nothing is written
    failure = self_check.compare("cpu", request).failure
    assert failure is not None and failure.startswith("states")


def test_every_axis_of_steps_and_keys_is_known():
    """An argument or result that the lists lack would not be padded with the others."""
    T, Tk = 17, 29
    found = {}
    for case in CASES:
        if not (case.T and case.Tk):
            continue
        args = test_recurrent.call(replace(case, B=3, E=9, H=13, A=11, Dv=10, F=6, T=T, Tk=Tk))
        for name, x in (args._asdict() | reference.recurrent(args)._asdict()).items():
            shape = x.shape if isinstance(x, torch.Tensor) else ()
            found |= {(name, n): i - len(shape) for i, n in enumerate(shape) if n in (T, Tk)}
    steps, keys = GRAPHS.axes["target_lengths"], GRAPHS.axes["lengths"]
    known = {(x, n): axis for n, axes in ((T, steps), (Tk, keys)) for x, axis in axes.items()}
    assert found == known
