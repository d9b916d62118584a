"""What only a GPU can show: CUDA graphs, streams, large grids, models that are trained there.

The numbers are every test's. tests/test_pretend_gpu.py runs this with what a CPU can pretend.
"""

from functools import partial
from unittest import mock

import pytest
import test_cuda_graphs
import test_recurrent
import torch

import attnfast
from attnfast._utils.checks import InputError
from attnfast.decoding import beam_search, greedy_search, sample
from attnfast.decoding import memory as memories
from attnfast.models import ATTENTIONS, Config, build
from attnfast.ops import cuda_graphs
from attnfast.ops.backends import unsupported_reason
from attnfast.ops.recurrent import GRAPHS, RECURRENT, RecurrentInputs
from attnfast.translate.data import Example, collate
from attnfast.translate.trainer import (
    Options,
    StepOptions,
    make_optimizer,
    train_step,
    validation_loss,
)

pytestmark = pytest.mark.gpu
B, Tq, Tk, A, Dv, K, V = 3, 7, 40, 24, 20, 4, 50


def leaf(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()


def memory(dtype=torch.float32, keys=Tk) -> list[torch.Tensor]:
    return [leaf(B, n, m, dtype=dtype) for n, m in ((Tq, A), (keys, A), (keys, Dv))]


def additive(leaves, backend, **options):
    return attnfast.additive_attention(*leaves, need_weights=True, backend=backend, **options)


def dot(leaves, backend):
    lengths = torch.full((B,), Tk - 3, device="cuda")
    return attnfast.dot_attention(*leaves, lengths=lengths, need_weights=True, backend=backend)


def window(leaves, backend):
    span = attnfast.Span(window=5, causal=True)
    return additive(leaves, backend, span=span, position="diagonal")


def spans_by_head(leaves, backend):
    spans = [attnfast.Span(window=5), attnfast.Span(stride=2)] * 2
    query, key, value = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in leaves)
    return attnfast.dot_attention(
        query, key, value, span=spans, need_weights="dense", backend=backend
    )


def step(leaves, backend):
    query, *rest = leaves
    return additive([query[:, :1], *rest], backend)


def prepared_steps(leaves, backend):
    query, *rest = leaves
    source = memories.prepare(*rest, backend=backend)
    return [memories.attend(q, source)[0] for q in query.split(1, 1)]


def location(leaves, backend):
    *rest, filters, projection = leaves
    result = attnfast.coverage_attention(
        *rest, filters=filters, projection=projection, penalty=0.5, backend=backend
    )
    return result.context, result.loss


def penalty(leaves, backend):
    result = attnfast.coverage_attention(*leaves, penalty=1.0, backend=backend)
    return result.context, result.loss


def copying(leaves, backend):
    logits, scores, gate = leaves
    words = torch.arange(B * Tk, device="cuda").view(B, Tk) * 7 % (V + 5)
    weights = scores.softmax(-1)
    return (
        attnfast.copy_distribution(
            logits, weights, words, gate, num_oov=5, log=True, backend=backend
        ),
    )


def recurrent(leaves, backend, reads_contexts=True, has_history=False):
    x, hidden, weight_ih, weight_hh, bias, key, value, weight, weight_query, output, *upper = leaves
    lengths = torch.arange(B, device="cuda") * 3  # of keys and of targets
    more = {"weight_ih_upper": upper[0]} if upper else {}
    if has_history:
        zeros = x.new_zeros(key.shape[:2])
        more |= {"coverage": zeros, "previous": zeros, "penalty": x.new_ones(1)}
    call = RecurrentInputs(
        x, hidden, weight_ih, weight_hh, bias_ih=bias, key=key, value=value, score_vector=weight,
        weight_query=weight_query, weight_output=output, lengths=lengths, target_lengths=lengths,
        dropout=torch.ones_like(hidden), attends_first=False, score="tanh", **more,
    )  # fmt: skip
    made = RECURRENT.differentiable(backend, call)
    return made.states, made.contexts if reads_contexts else None, made.attentional


def recurrent_masks(leaves, backend):
    x, hidden, weight_ih, weight_hh, bias, key, value, weight, weight_query, output, upper = leaves
    (T, H), full = (x.shape[1], hidden.shape[-1]), x.new_full
    call = RecurrentInputs(
        x, hidden, weight_ih, weight_hh, bias_ih=bias, key=key, value=value, score_vector=weight,
        weight_query=weight_query, weight_output=output, weight_ih_upper=upper, score="tanh",
        weight_gate=full((Dv, H), 0.1), dropout_state=full((2, B, T, H), 0.5), zoneout=True,
        dropout_between=full((1, B, T, H), 2.0), dropout_query=full((B, T, H), 2.0),
        dropout_joined=full((B, T, Dv + H), 0.5), dropout_feed=full((B, T, 6), 2.0),
        dropout_output=full((B, T, 6), 0.5), output_activation="identity", attends_first=False,
    )  # fmt: skip
    made = RECURRENT.differentiable(backend, call)
    return made.states, made.contexts, made.attentional


def masked_queries(leaves, backend):
    x, hidden, weight_ih, weight_hh, key, value = leaves
    mask = x.new_full((B, x.shape[1], hidden.shape[-1]), 0.5)
    call = RecurrentInputs(
        x, hidden, weight_ih, weight_hh, key=key, value=value, dropout_query=mask, scale=0.3
    )
    made = RECURRENT.differentiable(backend, call)
    return made.states, made.contexts, made.queries


def recurrent_leaves(keys=Tk, layers=()):
    x, _, value = memory(keys=keys)
    shapes = [
        (*layers, B, 9), (27, A + 6), (*layers, 27, 9), (*layers, 27), (B, keys, A), (A,), (A, 9),
        (6, Dv + 9), *((n - 1, 27, 9) for n in layers),
    ]  # fmt: skip
    made = [(0.3 * leaf(*shape)).detach().requires_grad_() for shape in shapes]
    return [x, *made[:5], value, *made[5:]]


CALLS = {
    "additive": ("attention", additive, lambda: [*memory(), leaf(A)]),
    "additive, bfloat16": (
        "attention", additive, lambda: [*memory(torch.bfloat16), leaf(A, dtype=torch.bfloat16)],
    ),
    "a step": ("attention", step, lambda: [*memory(keys=150), leaf(A)]),
    "prepared steps": ("attention", prepared_steps, lambda: [*memory(keys=150), leaf(A)]),
    "window": ("attention", window, lambda: [*memory(), leaf(A)]),
    "dot": ("attention", dot, memory),
    "spans by head": ("attention", spans_by_head, memory),
    "penalty": ("coverage_attention", penalty, lambda: memory(keys=150)),
    "location": (
        "coverage_attention", location,
        lambda: [*memory(keys=150), leaf(A), leaf(K, 1, 5), leaf(A, K)],
    ),
    "copying": (
        "copy_distribution", copying, lambda: [leaf(B, Tq, V), leaf(B, Tq, Tk), leaf(B, Tq)],
    ),
    "recurrent": ("recurrent", recurrent, recurrent_leaves),
    "recurrent, values projected": (
        "recurrent", partial(recurrent, reads_contexts=False), lambda: recurrent_leaves(keys=20),
    ),
    "recurrent, penalty": ("recurrent", partial(recurrent, has_history=True), recurrent_leaves),
    "recurrent, two layers": ("recurrent", recurrent, lambda: recurrent_leaves(layers=(2,))),
    "recurrent, masks": ("recurrent", recurrent_masks, lambda: recurrent_leaves(layers=(2,))),
    "recurrent, masked queries": (
        "recurrent", masked_queries,
        lambda: [leaf(B, Tq, A), leaf(B, 9), leaf(27, A + Dv), leaf(27, 9), leaf(B, Tk, 9),
                 leaf(B, Tk, Dv)],
    ),
}  # fmt: skip


@pytest.fixture(params=CALLS)
def call(request, backend):
    """A function that returns outputs and gradients, and the tensors that it reads."""
    operator, attend, make = CALLS[request.param]
    reason = unsupported_reason(backend, torch.device("cuda"), torch.float32, operator)
    if reason or backend in ("reference", "cpu"):
        pytest.skip(reason or "the kernels of a GPU are meant")
    torch.manual_seed(0)
    leaves = make()

    def run():
        outputs = [x for x in attend(leaves, backend) if x is not None]
        grads = torch.autograd.grad(sum(x.float().square().sum() for x in outputs), leaves)
        return [x.detach() for x in (*outputs, *grads)]

    return run, leaves


def same(got, want):
    for a, b in zip(got, want):
        assert torch.equal(a, b)


def test_a_graph_replays_on_new_numbers(call):
    run, leaves = call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    with torch.no_grad():
        for x in leaves:
            x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    same(got, run())


def test_work_waits_on_its_own_stream(call):
    run, leaves = call
    want, fresh = run(), [x.detach().clone() for x in leaves]
    with torch.no_grad():
        for x in leaves:
            x.fill_(float("nan"))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        torch.cuda._sleep(20_000_000)  # whatever runs elsewhere comes too early
        for x, numbers in zip(leaves, fresh):
            x.copy_(numbers)
    with torch.cuda.stream(side):
        got = run()
    side.synchronize()
    same(got, want)


class Decoder(torch.nn.Module):
    """A recurrent layer that prepares its own source; on a GPU a stack runs step by step."""

    def __init__(self, num_layers):
        super().__init__()
        attention = attnfast.nn.BahdanauAttention(12, 9, 8)
        self.layer = attnfast.nn.AttentionLSTM(
            6, 12, 9, attention, recurrence="attend_last", num_layers=num_layers, query_layer="last"
        )

    def forward(self, embedded, source):
        return self.layer(embedded, self.layer.prepare(source)).output


def judge_graphs(capture, num_layers):
    """Compare training steps of a decoder whose forward and backward replay graphs."""
    torch.manual_seed(0)
    plain, same = Decoder(num_layers).cuda(), Decoder(num_layers).cuda()
    same.load_state_dict(plain.state_dict())
    graphed = capture(same, lambda: (leaf(B, Tq, 6), leaf(B, Tk, 9)))
    for _ in range(3):
        inputs = leaf(B, Tq, 6), leaf(B, Tk, 9)
        found = []
        for model in (plain, graphed):
            output = model(*inputs)
            leaves = [*inputs, *model.parameters()]
            found.append([output.clone(), *torch.autograd.grad(output.square().sum(), leaves)])
        for got, want in zip(*found):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_layer_as_a_graphed_callable(num_layers):
    judge_graphs(lambda x, inputs: torch.cuda.make_graphed_callables(x, inputs()), num_layers)


def test_a_layer_captures_and_replays_its_steps(monkeypatch):
    """A stack, whose steps have launches of their own; its batches share a bucket of lengths."""
    torch.manual_seed(0)
    models = {"0": Decoder(2).cuda(), "1": Decoder(2).cuda()}
    models["1"].load_state_dict(models["0"].state_dict())
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(1) or replay(graph)
    )
    for T, Tk in ((17, 33), (18, 36), (17, 34), (18, 33)):
        inputs, found = (leaf(B, T, 6), leaf(B, Tk, 9)), []
        for setting, model in models.items():
            monkeypatch.setenv("ATTNFAST_CUDA_GRAPHS", setting)
            output = model(*inputs)
            leaves = [*inputs, *model.parameters()]
            found.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
        for got, want in zip(*found):
            torch.testing.assert_close(got, want)
    assert len(replays) == 6


def test_dropout_after_an_invalid_capture():
    """PyTorch's generator and allocator are as before."""
    with pytest.raises(cuda_graphs.InvalidCaptureError):
        cuda_graphs.capture(lambda: torch.cuda.current_stream().synchronize())
    x = torch.nn.functional.dropout(leaf(100, 100))
    x.sum().backward()
    del x
    torch.cuda.empty_cache()
    graph = cuda_graphs.capture(lambda: torch.zeros(3, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("case", test_cuda_graphs.CUDA_CASES, ids=str)
def test_layers_in_graphs(case, monkeypatch):
    """The first call, the one that is captured and a replay satisfy the rule, with padding."""
    monkeypatch.setattr(GRAPHS, "has_many_launches", lambda _: True)
    monkeypatch.setattr(cuda_graphs, "bucket", lambda n: n + 3)
    for _ in range(3):
        test_recurrent.judge(case, "cuda")
    assert GRAPHS.failure is None


@pytest.mark.parametrize("score", ["additive", "dot"])
def test_more_sequences_than_a_grid_has_rows(score, backend):
    if backend in ("reference", "cpu"):
        pytest.skip("the kernels of a GPU are meant")
    query, key, value = (leaf(70_000, n, 8) for n in (2, 3, 3))
    weight = [leaf(8)] if score == "additive" else []
    attend = attnfast.additive_attention if weight else attnfast.dot_attention
    outputs = {}
    for name in (backend, "reference"):
        context = attend(query, key, value, *weight, backend=name)[0]
        grads = torch.autograd.grad(context.square().sum(), [query, key, value])
        outputs[name] = [context, *grads]
    for got, want in zip(*outputs.values()):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_translator_learns_and_translates(attention):
    more = {"pointer_generator": attention == "coverage"}
    more["self_attention"] = attention in ("coverage", "dot")
    config = Config(
        30, attention, embed_dim=16, hidden_dim=12, dropout=0.0, window=2, stride=2, **more
    )
    torch.manual_seed(0)
    model, options = build(config), Options()
    pairs = [Example([5, 6, 7, 8, 9], [8, 7, 6]), Example([9, 4], [4, 9, 5])]
    before = validation_loss(model, [pairs])
    model.to("cuda")
    assert validation_loss(model, [pairs]) == pytest.approx(before, rel=1e-2)  # cuDNN's are TF32
    batch, optimizer = collate(pairs).to("cuda"), make_optimizer(model, options)
    losses = [train_step(model, optimizer, batch, options, StepOptions(0.01)) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert len(beam_search(model.eval(), batch.source, batch.lengths).best) == len(pairs)


SEARCHES = {
    "greedy": lambda *args, **more: greedy_search(*args, **more),
    "beam": lambda *args, **more: beam_search(*args, 4, n_best=3, coverage_penalty=0.2, **more),
    "sampling": lambda *args, **more: sample(
        *args, 3, top_k=20, generator=torch.Generator(), **more
    ),
}


@pytest.mark.parametrize("how", SEARCHES)
@pytest.mark.parametrize("attention", ["bahdanau", "general", "local", "coverage", "copying"])
def test_a_search_is_one_graph(attention, how):
    """Steps after the first replay a graph; the words and numbers are those of the CPU's search."""
    torch.manual_seed(0)
    kind = "bahdanau" if attention == "copying" else attention
    model = build(
        Config(70, kind, "input_feeding" if attention == "general" else "attend_first",
               embed_dim=8, hidden_dim=8, pointer_generator=attention == "copying")
    ).double().eval()  # fmt: skip
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(2)
    source, lengths = torch.randint(4, 70, (2, 7)), torch.full((2,), 7)  # in one encoder of each
    more = {"need_weights": True, "min_length": 2, "no_repeat_ngram": 2, "max_length": 12}
    find, sources = SEARCHES[how], (source, lengths)
    want = find(model, *sources, **more)
    model.cuda()
    sources = tuple(x.cuda() for x in sources)
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    with mock.patch.object(
        torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(1) or replay(graph)
    ):
        done = attnfast.explain(find, model, *sources, **more)
    assert "one operator on triton" in str(done) and len(replays) > 5
    for x, y in zip(done.output, want):
        torch.testing.assert_close(x.cpu(), y)


def test_8_bits_are_for_cpus():
    model = build(Config(70, "bahdanau", embed_dim=8, hidden_dim=8)).eval().cuda()
    source, lengths = torch.full((2, 3), 5, device="cuda"), torch.full((2,), 3, device="cuda")
    with pytest.raises(
        InputError, match="int8 needs a search in one operator, but the model is on"
    ):
        greedy_search(model, source, lengths, int8=True)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_compiled_with_less_overhead(num_layers):
    """``torch.compile`` captures graphs of a layer, and replays them."""
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    with mock.patch.object(
        torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(1) or replay(graph)
    ):
        judge_graphs(
            lambda x, _: torch.compile(x, mode="reduce-overhead", fullgraph=True), num_layers
        )
    assert len(replays) > 1
