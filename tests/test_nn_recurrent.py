"""Recurrent layers that attend, the modules: parts and steps, what is one operator, errors."""

import math
import pickle

import pytest
import torch
from attention_cases import CPU
from torch import Tensor, nn

import attnfast
from attnfast import nn as attn
from attnfast.nn import _fused_rnn as layer_code
from attnfast.nn import recurrent as recurrent_module
from attnfast.nn.recurrent import RECURRENCES
from attnfast.ops.backends import unsupported_reason

COUPLED = RECURRENCES[:3]


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
    "location, coverage": lambda: attn.LocationAwareAttention(12, 10, 8, 5, 3, channels="coverage"),
    "location, both": lambda: attn.LocationAwareAttention(12, 10, 8, 5, 3, channels="both"),
    "content": lambda: attn.LocationAwareAttention(12, 10, 8, 0, bias=False),
    "forward": lambda: attn.ForwardAttention(12, 10, 8),
    "forward, location": lambda: attn.ForwardAttention(12, 10, 8, 5, 3, channels="both"),
    "window": lambda: attn.LocalAttention(12, 10, window=2),
    "gated": lambda: attn.GatedAttention(attn.BahdanauAttention(12, 10, 8), 12),
    "gated coverage": lambda: attn.GatedAttention(attn.CoverageAttention(12, 10, 8), 12),
    "gated twice": lambda: attn.GatedAttention(ATTENTIONS["gated coverage"](), 12),
    "heads": lambda: attn.MultiHeadAttention(12, 10, 10, 2),
}


def layer_and_inputs(kind, attention: str, **options):
    torch.manual_seed(0)
    size = 12 if attention == "dot" else 10
    layer = kind(6, 12, size, ATTENTIONS[attention](), **options).double()
    x = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    source = torch.randn(3, 9, size, dtype=torch.float64, requires_grad=True)
    return layer, x, source, torch.tensor([9, 4, 6])


# Not a relu, whose gradient jumps, nor what no operator runs.
@pytest.mark.parametrize(
    "attention", sorted(ATTENTIONS.keys() - {"fertility", "gated twice", "heads"})
)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_autocast_to_bfloat16_rounds_the_factors_of_products(recurrence, attention):
    """The operator's sums, states and gradients stay float32, and are near those without it."""
    layer, x, source, lengths = layer_and_inputs(
        attn.AttentionLSTM, attention, recurrence=recurrence
    )
    layer, x, source = layer.float(), x.detach().float(), source.detach().float()
    found = []
    for enabled in (False, True):
        given = [y.clone().requires_grad_() for y in (x, source)]
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            memory = layer.prepare(given[1], lengths)
            ran = str(attnfast.explain(layer, given[0], memory))
            result = layer(given[0], memory, need_weights=True)
            if enabled:
                assert layer(x.bfloat16(), memory).states.dtype == torch.float32
        assert "step by step" not in ran
        shown = tensors(result)
        if recurrence != "independent":  # whose attention is the functional
            assert {y.dtype for y in shown if y.is_floating_point()} == {torch.float32}
        torch.manual_seed(1)
        sum((y * torch.randn(y.shape)).sum() for y in shown[:4]).backward()
        grads = [*given, *layer.parameters()]
        found.append([*shown[:4], *(y.grad for y in grads if y.grad is not None)])
    for exact, near in zip(*found):
        assert (near - exact).norm() < 0.05 * exact.norm() + 1e-3
    assert not torch.equal(found[0][1], found[1][1])


def past(state) -> list[Tensor]:
    """Return all tensors of a state."""
    history = state.history if isinstance(state.history, attn.CumulativeState) else ()
    return [x for x in (*state, *history) if isinstance(x, Tensor)]


def tensors(result) -> list[Tensor]:
    """Return all that a layer gives."""
    return [result.output, result.states, result.contexts, result.weights, *past(result.state)]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("kind", [attn.AttentionGRU, attn.AttentionLSTM])
def test_in_one_call_in_parts_and_in_steps(kind, recurrence, attention, monkeypatch):
    in_one_call_in_parts_and_in_steps(kind, attention, monkeypatch, recurrence=recurrence)


@pytest.mark.parametrize("attention", ["bahdanau", "location", "gated", "heads"])
@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("kind", [attn.AttentionGRU, attn.AttentionLSTM])
def test_a_stack_in_one_call_in_parts_and_in_steps(kind, recurrence, attention, monkeypatch):
    in_one_call_in_parts_and_in_steps(
        kind, attention, monkeypatch, recurrence=recurrence, num_layers=3, query_layer="last"
    )


def in_one_call_in_parts_and_in_steps(kind, attention, monkeypatch, **options):
    layer, x, source, lengths = layer_and_inputs(kind, attention, **options)
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
        memory = layer.prepare(source, lengths)
        result = layer(x, memory, target_lengths=targets, need_weights=True)
        for i, count in enumerate(targets):
            this = torch.tensor([i])
            alone = layer(x[this, :count], memory.index_select(this)).state
            for got, want in zip(past(result.state.index_select(this)), past(alone)):
                torch.testing.assert_close(got, want)
        found = [y.nan_to_num(neginf=0) for y in tensors(result)]  # of log-weights
        total = sum((y * torch.linspace(0, 1, y.numel()).double().view_as(y)).sum() for y in found)
        found += torch.autograd.grad(total, [x, source, *layer.parameters()])
        assert all(y.isfinite().all() for y in found)
        return found

    served_so = run()
    monkeypatch.setattr(layer_code, "select_layer_backend", lambda *_, **__: (None, ""))
    torch.testing.assert_close(served_so, run())


@pytest.mark.cpu_library
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_which_attentions_are_one_operator(attention, monkeypatch):
    layer, x, source, lengths = layer_and_inputs(attn.AttentionGRU, attention)
    calls, run = [], layer_code.dispatch.run
    monkeypatch.setattr(
        layer_code.dispatch, "run", lambda *args: calls.append(args[0].name) or run(*args)
    )
    layer(x, layer.prepare(source, lengths))
    alone = attention not in ("heads", "gated twice")
    assert calls == ["recurrent"] if alone else "recurrent" not in calls


@pytest.mark.parametrize("in_one", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: attn.LocalAttention(12, 10, window=1),
        lambda: attn.LocalAttention(12, 10, window=1, slope=1.5),
        lambda: attn.LocalAttention(12, 10, window=2, sigma=1.0, gaussian_height=0.5),
        lambda: attn.StridedAttention(12, 10, 2, fixed=True),
        lambda: attn.HardMonotonicWindowAttention(12, 10, ahead=2),
        lambda: attn.CoverageAttention(12, 10, 5),
    ],
)
def test_a_state_goes_on_from_the_last_step_before_padding(make, in_one, monkeypatch):
    """In a batch of ragged targets as for each of them alone, in one operator or step by step."""
    torch.manual_seed(0)
    layer = attn.AttentionGRU(6, 12, 10, make()).double()
    first, x, more = (torch.randn(3, n, 6).double() for n in (2, 5, 2))
    source, ends = torch.randn(3, 9, 10).double(), torch.tensor([3, 5, 0])
    if not in_one:
        monkeypatch.setattr(layer_code, "select_layer_backend", lambda *_, **__: (None, ""))
    memory = layer.prepare(source)
    state = layer(x, memory, layer(first, memory).state, target_lengths=ends).state
    got = layer(more, memory, state).output
    for b, n in enumerate(ends.tolist()):
        alone = layer.prepare(source[b : b + 1])
        steps = torch.cat([first[b : b + 1], x[b : b + 1, :n]], 1)
        state = layer(steps, alone).state
        torch.testing.assert_close(got[b], layer(more[b : b + 1], alone, state).output[0])


def test_a_stride_cannot_go_on_from_steps_of_several_phases():
    layer = attn.AttentionGRU(6, 12, 10, attn.StridedAttention(12, 10, 2))
    x, memory = torch.randn(3, 5, 6), layer.prepare(torch.randn(3, 9, 10))
    _, state = layer(x, memory, target_lengths=torch.tensor([3, 5, 0]))
    with pytest.raises(ValueError, match=r"history.rows must be one number for all sequences"):
        layer(x, memory, state)


@pytest.mark.cpu_library
def test_a_history_that_does_not_fit():
    layer, x, source, lengths = layer_and_inputs(attn.AttentionGRU, "location")
    memory = layer.prepare(source, lengths)
    _, state = layer(x, memory)
    short = state.history._replace(coverage=state.history.coverage[:2])
    with pytest.raises(ValueError, match=r"coverage must be \[3, 9\], got \[2, 9\]"):
        layer(x, memory, state._replace(history=short))
    with pytest.raises(TypeError, match="history must be a CumulativeState or None"):
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


@pytest.mark.parametrize(
    ("kind", "of_torch"), [(attn.AttentionGRU, nn.GRU), (attn.AttentionLSTM, nn.LSTM)]
)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_a_stack_is_pytorchs_in_a_loop(recurrence, kind, of_torch):
    layer, x, source, lengths = layer_and_inputs(
        kind, "bahdanau", recurrence=recurrence, num_layers=3, query_layer="last"
    )
    stack = of_torch(layer.weight_ih_l0.shape[1], 12, 3, batch_first=True).double()
    layer.load_state_dict(stack.state_dict(), strict=False)
    memory, first = layer.prepare(source, lengths), torch.randn(3, 3, 12, dtype=torch.float64)
    h = (first, first.flip(0)) if kind is attn.AttentionLSTM else first
    result = layer(x, memory, h)
    f, outputs = x.new_zeros(3, layer.weight_ih_l0.shape[1] - 6), []
    for t in range(x.shape[1]):
        if recurrence == "attend_first":
            f = layer.attention((h if kind is attn.AttentionGRU else h[0])[-1], memory)[0]
        y, h = stack(torch.cat([x[:, t], f], -1).unsqueeze(1), h)
        y = y[:, 0]
        if recurrence in ("attend_last", "input_feeding"):
            f = layer.attention(y, memory)[0]
        if recurrence == "input_feeding":
            y = f = layer.output_proj(torch.cat([f, y], -1)).tanh()
        outputs.append(y)
    torch.testing.assert_close(result.output, torch.stack(outputs, 1))
    last = h if isinstance(h, tuple) else (h,)
    for a, b in zip(result.state, last):
        torch.testing.assert_close(a, b)


@pytest.mark.cpu_library
@pytest.mark.parametrize("zoneout", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_steps_drop_states_as_the_operator_does(layers, zoneout, monkeypatch):
    torch.manual_seed(0)
    rnn = nn.LSTM(6, 12, layers, batch_first=True).double()
    layer, x = layer_code.Layer.of(rnn), torch.randn(3, 7, 6, dtype=torch.float64)
    shape = (2, 3, 7, 12) if layers == 2 else (3, 7, 12)
    state = layer_code.RecurrentState(*x.new_ones(2, *shape[:-2], 12))
    masks = {n: 1.5 * x.new_empty(shape).bernoulli_() for n in ("dropout_state", "dropout_cell")}
    run = lambda: layer_code.run_layer(layer, x, state, zoneout=zoneout, **masks)  # noqa: E731
    whole = run()
    monkeypatch.setattr(layer_code, "select_layer_backend", lambda *_, **__: (None, ""))
    for one, other in zip(run()[:2], whole[:2]):
        torch.testing.assert_close(one, other)


@pytest.mark.cpu_library
def test_dropout_within_a_stack(monkeypatch):
    layer, x, source, lengths = layer_and_inputs(
        attn.AttentionGRU, "bahdanau", num_layers=2, query_layer="last", dropout=0.5,
        recurrent_dropout=0.3,
    )  # fmt: skip
    drawn, run = [], layer_code.dispatch.run
    monkeypatch.setattr(
        layer_code.dispatch, "run", lambda op, call, name: drawn.append(call) or run(op, call, name)
    )
    memory = layer.prepare(source, lengths)
    torch.manual_seed(1)
    dropped = layer(x, memory).output
    above, state = drawn[0].dropout_between, drawn[0].dropout
    assert above.shape == (1, 3, 7, 12)
    assert state.shape == (2, 3, 12)
    for mask, kept in ((above, 0.5), (state, 0.7)):
        assert set(mask.unique().tolist()) == {0.0, 1 / kept}
        assert mask.count_nonzero() / mask.numel() == pytest.approx(kept, abs=0.15)
    assert not torch.equal(above[0, :, 0], above[0, :, 1])
    monkeypatch.setattr(layer_code, "select_layer_backend", lambda *_, **__: (None, ""))
    torch.manual_seed(1)
    torch.testing.assert_close(layer(x, memory).output, dropped)
    layer.eval()
    torch.testing.assert_close(layer(x, memory).output, layer(x, memory).output)
    assert not torch.allclose(layer(x, memory).output, dropped)


@pytest.mark.cpu_library
@pytest.mark.parametrize("recurrence", COUPLED)
@pytest.mark.parametrize("kind", [attn.AttentionGRU, attn.AttentionLSTM])
@pytest.mark.parametrize("attention", ["bahdanau", "location", "gated"])
@pytest.mark.parametrize("layers", [1, 2])
def test_masks_of_steps_in_one_call_and_step_by_step(
    layers, attention, kind, recurrence, monkeypatch
):
    """Every mask of a step's dropout comes to the same in the operator and in the loop."""
    options = {"num_layers": layers, "query_layer": "last"} if layers > 1 else {}
    layer, x, source, lengths = layer_and_inputs(kind, attention, recurrence=recurrence, **options)
    memory, cell = layer.prepare(source, lengths), layer._layer(*range(layers))
    B, T, H, Dv = *x.shape[:2], layer.hidden_size, layer.context_size
    lead = (layers,) * (layers > 1)
    sizes = {"state": (*lead, B, T, H), "query": (B, T, H), "feed": (B, T, layer._fed)}
    if layers > 1:
        sizes["between"] = (layers - 1, B, T, H)
    if recurrence == "input_feeding":
        sizes |= {"joined": (B, T, Dv + H), "output": (B, T, layer.output_size)}
    masks = {f"dropout_{name}": torch.rand(size).double() for name, size in sizes.items()}
    state = layer_code.RecurrentState(
        *[torch.randn(*lead, B, H).double()] * (1 + (layer.mode == "lstm"))
    )

    def run(**given):
        return layer_code.run_layer(cell, x, state, layer.attention, memory, **given)

    whole = run(**masks)
    each = {name: run(**{name: mask}).output for name, mask in masks.items()}
    monkeypatch.setattr(layer_code, "select_layer_backend", lambda *_, **__: (None, ""))
    torch.testing.assert_close(run(**masks).states, whole.states)
    torch.testing.assert_close(run(**masks).contexts, whole.contexts)
    assert not any(torch.allclose(run().output, output) for output in each.values())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [attn.AttentionRNN, attn.AttentionGRU, attn.AttentionLSTM])
def test_a_layer_without_attention_by_pytorchs_function(kind, bias, monkeypatch):
    """Which a GPU takes: the states and the last state and cell are those of the operator."""
    layer, x, source, lengths = layer_and_inputs(
        kind, "bahdanau", recurrence="independent", num_layers=2, bias=bias
    )
    memory = layer.prepare(source, lengths)
    start = torch.randn(2, 2, 3, 12).double()
    hx = attn.RecurrentState(start[0], start[1] if layer.mode == "lstm" else None)
    expected, calls = layer(x, memory, hx), []

    def spied(part, input, state, *_, **__):
        calls.append(part.mode)
        return layer_code.run_torch(part, input, state)

    monkeypatch.setattr(recurrent_module, "run_layer", spied)
    found = layer(x, memory, hx)
    assert calls == [layer.mode] * 2
    for a, b in zip(past(found.state), past(expected.state)):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(found.output, expected.output)


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


@pytest.mark.cpu_library
@pytest.mark.parametrize(
    ("gate", "found"),
    [
        (nn.Linear(12, 3), "torch.float32 of 12 to 3"),
        (nn.Linear(8, 1), "torch.float32 of 8 to 1"),
        (nn.Linear(12, 1).double(), "torch.float64 of 12 to 1"),
    ],
)
def test_a_gate_that_does_not_fit(gate, found):
    layer, x, source, _ = layer_and_inputs(attn.AttentionGRU, "gated")
    layer, x, memory = layer.float(), x.float(), layer.float().prepare(source.float())
    layer.attention.gate = gate
    expected = rf"attention.gate must be torch.float32 of 12 features to 1 or 10, got {found}"
    with pytest.raises(ValueError, match=expected):
        layer(x, memory)


@pytest.mark.parametrize("lengths", [None, torch.tensor([7, 1, 4])])
@pytest.mark.parametrize(("layers", "both_ways"), [(1, False), (1, True), (3, True)])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_pytorchs_layers_in_the_operator(kind, layers, both_ways, lengths):
    if unsupported_reason("cpu", CPU, torch.float64, "recurrent"):
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


@pytest.mark.parametrize("recurrence", COUPLED)
@pytest.mark.parametrize("kind", [attn.AttentionGRU, attn.AttentionLSTM])
@torch.no_grad()
def test_steps_of_a_search_pack_once(kind, recurrence):
    if unsupported_reason("cpu", CPU, torch.float64, "recurrent"):
        pytest.skip("no backend that packs")
    layer, x, source, lengths = layer_and_inputs(kind, "bahdanau", recurrence=recurrence)
    memory = layer.prepare(source, lengths)
    for _ in range(2):
        state, outputs, kept = None, [], []
        for part in x.split(1, 1):
            output, state = layer(part, memory, state)
            outputs.append(output)
            kept.append(state.packed[0].tensor)
        assert all(y is kept[0] for y in kept)
        torch.testing.assert_close(torch.cat(outputs, 1), layer(x, memory).output)
        layer.weight_hh_l0.mul_(0.5)
        changed, after = layer(x[:, :1], memory, state)  # packs again
        assert after.packed[0].tensor is not kept[0]
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
        made = layer(x, layer.prepare(source, lengths))
        past = made.state.history.loss.sum() if made.state.history else 0
        return made.output.sin().sum() + made.contexts.sin().sum() + made.state.hidden.sum() + past

    torch._dynamo.reset()  # the limit of recompilations counts those of other tests
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (7, 4):
        part = x[:, :T].detach().requires_grad_()
        leaves = [part, source, layer.weight_ih_l0, layer.attention.key_proj.weight]
        for a, b in zip(
            torch.autograd.grad(compiled(part, source), leaves),
            torch.autograd.grad(loss(part, source), leaves),
        ):
            torch.testing.assert_close(a, b)


@pytest.mark.cpu_library
@torch.no_grad()
@pytest.mark.parametrize("twice", [False, True])
def test_export(twice):
    """With sizes that are not known; the attention may have two names."""
    layer, x, source, _ = layer_and_inputs(attn.AttentionGRU, "bahdanau")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = layer.attention if twice else None
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


@pytest.mark.parametrize("attention", ["location", "heads"])
def test_what_no_attention_takes(attention):
    layer, x, source, lengths = layer_and_inputs(attn.AttentionGRU, attention)
    with pytest.raises(TypeError, match="memory must be a result of prepare"):
        layer(x, source)
    wide = attn.AttentionGRU(6, 12, 20, ATTENTIONS[attention]()).double()
    with pytest.raises(ValueError, match="memory must be of values of 20 features, got 10"):
        wide(x, layer.prepare(source, lengths))


def test_dropout_between_layers_wants_several():
    with pytest.warns(UserWarning, match="dropout is between layers: one layer has none"):
        attn.AttentionGRU(6, 12, 10, ATTENTIONS["general"](), dropout=0.1)


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
    of_contexts = torch.randn(3, 7, 10).to(dtype)

    def run(kind):
        layer.to(kind)
        inputs = [y.to(kind).requires_grad_() for y in (x, source)]
        memory = layer.prepare(inputs[1], lengths)
        made = layer(inputs[0], memory, target_lengths=targets, need_weights=True)
        found = [made.output, made.contexts, made.weights, made.state.hidden, made.state.cell]
        assert all(y.dtype == kind for y in found)
        leaves = [*inputs, *layer.parameters()]
        outputs, of_outputs = [made.output, made.contexts], [grad.to(kind), of_contexts.to(kind)]
        grads = torch.autograd.grad(outputs, leaves, of_outputs)
        assert all(y.dtype == kind for y in grads)
        return [y.detach().double() for y in (*found, *grads)]

    calls, original = [], layer_code.dispatch.run
    monkeypatch.setattr(
        layer_code.dispatch, "run", lambda *call: calls.append(call[0].name) or original(*call)
    )
    ours, exact = run(dtype), run(torch.float64)
    if not unsupported_reason("cpu", CPU, torch.float32, "recurrent"):
        assert calls.count("recurrent") == 2
    monkeypatch.setattr(layer_code, "select_layer_backend", lambda *_, **__: (None, ""))
    loop = run(dtype)
    for got, eager, want in zip(ours, loop, exact):
        ulp = torch.finfo(dtype).eps * float(want.abs().max())
        assert float((got - want).abs().max()) <= max(ulp, 2 * float((eager - want).abs().max()))


@pytest.mark.skipif(
    unsupported_reason("cpu", CPU, torch.float32, "recurrent") is not None, reason="no _C_cpu"
)
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
