"""Searches with whole decoders of other projects: equal to their own single steps."""

from __future__ import annotations

import copy
from functools import partial
from importlib import import_module

import pytest
import torch
from integrations.common import real, serve
from integrations.reference_projects import CaptionDecoder, RecognitionHead
from integrations.test_search_model import found_in_one
from torch import nn

import attnfast
from attnfast._utils.checks import InputError
from attnfast.decoding import beam_search, greedy_search, sample, search
from attnfast.integrations import make_search_model

UNUSED = ("hyperpyyaml", "joblib", "ruamel", "scipy", "sentencepiece", "torchaudio", "yaml")
V, B, TK, D = 23, 6, 7, 6
STATES = torch.randn(B, TK, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
WORDS = torch.randint(4, V, (B, TK), generator=torch.Generator().manual_seed(3))
ALL = torch.full((B,), TK)
LENGTHS = torch.tensor([7, 2, 5, 1, 7, 3])
WORDS = WORDS.masked_fill(torch.arange(TK) >= LENGTHS[:, None], V)  # padding is not read


def greedy(step, steps, words):
    """Return log-probabilities [B, T] and words after ``words``; a step returns scores [B, V]."""
    found = []
    for _ in range(steps):
        found.append(step(words).log_softmax(-1).max(-1))
        words = found[-1].indices
    return [torch.stack(x, 1) for x in zip(*found)]


# ---- how each project's decoder is made, and its own single steps --------------------------------


def clovaai(modules, source, lengths, steps):
    [head] = modules
    hidden = (torch.zeros(B, head.hidden_size),) * 2

    def step(words):
        nonlocal hidden
        read = head._char_to_onehot(words, onehot_dim=V)
        hidden, _ = head.attention_cell(hidden, source, read)
        return head.generator(hidden[0])

    return greedy(step, steps, torch.zeros(B, dtype=torch.long))


def speechbrain_modules(kind, rnn="gru", layers=1, plain=False):
    RNN, embedding, linear = (
        real(f"speechbrain.nnet.{x}", *UNUSED) for x in ("RNN", "embedding", "linear")
    )
    decoder = RNN.AttentionalRNNDecoder(
        rnn, kind, 8, 5, layers, enc_dim=D, input_size=4, nonlinearity="tanh", channels=3,
        kernel_size=2, scaling=1.3,
    )  # fmt: skip
    if plain:
        return [nn.Embedding(V, 4), decoder, nn.Linear(8, V, bias=False)]
    return [embedding.Embedding(V, 4), decoder, linear.Linear(V, input_size=8)]


def speechbrain(modules, source, lengths, steps):
    names = "embedding", "decoder", "linear"
    searcher = real("speechbrain.decoders.seq2seq", *UNUSED).S2SRNNGreedySearcher(
        **dict(zip(names, modules)), bos_index=0, eos_index=1, min_decode_ratio=0,
        max_decode_ratio=1,
    )  # fmt: skip
    memory = searcher.reset_mem(B, source.device)
    memory = memory[0], memory[1].to(source)

    def step(words):
        nonlocal memory
        scores, memory, _ = searcher.forward_step(words, memory, source, lengths)
        return scores

    return greedy(step, steps, torch.zeros(B, dtype=torch.long))


def espnet_modules(kind, *args, residual=False):
    make = import_module("integrations.test_espnet")
    decoder = make.decoders.RNNDecoder(V, D, *args, context_residual=residual)
    decoder.att_list[0] = getattr(make.espnet, kind)(D, 8, *make.KINDS[kind][0])
    return [decoder]


def espnet(modules, source, lengths, steps):
    """Find the words of each source alone, as ESPnet's searches do."""
    [decoder], rows = modules, []
    for states, n in zip(source, lengths):
        states, memory = states[:n], decoder.init_state(states[:n])

        def step(words, states=states):
            nonlocal memory
            scores, memory = decoder.score(words, memory, states)
            return scores.unsqueeze(0)

        rows.append(greedy(step, steps, torch.full((1,), V - 1)))
    return [torch.cat(x) for x in zip(*rows)]


def yoyodyne_modules(kind, cell, layers, extra=0, features=False):
    """Return a model; some words are of sources alone with ``extra``."""
    make = import_module("integrations.test_yoyodyne")
    model = make.model(kind, cell, features, layers=layers, size=8, words=V + extra)
    model.decoder.dropout_layer.p = 0.3
    model.classifier, model.target_vocab_size = nn.Linear(model.classifier.in_features, V), V
    return [model]


def yoyodyne(modules, source, lengths, steps):
    """Find the words by its own prediction, which ends once all of them have."""
    [model], data = modules, import_module("integrations.test_yoyodyne").data
    words = data.PaddedTensor([x[:n] for x, n in zip(source, lengths)])
    found = model(data.Batch(words)).log_softmax(1).max(1)
    assert found.indices.shape[1] == steps or (found.indices == 3).any(1).all()
    return found


def sgrvinod(modules, source, lengths, steps):
    """Take steps as its caption.py does."""
    [decoder] = modules
    h, c = decoder.init_hidden_state(source)

    def step(words):
        nonlocal h, c
        context, _ = decoder.attention(source, h)
        context = decoder.sigmoid(decoder.f_beta(h)) * context
        h, c = decoder.decode_step(torch.cat([decoder.embedding(words), context], 1), (h, c))
        return decoder.fc(h)

    return greedy(step, steps, torch.zeros(B, dtype=torch.long))


#: How the modules are made, the function that finds words by their own steps, the type in which
#: these run, and the lengths of the sources.
KINDS = {
    "clovaai": (lambda: [RecognitionHead(D, 8, V)], clovaai, torch.float32, ALL),
    "sgrvinod": (lambda: [CaptionDecoder(7, 4, 8, V, D)], sgrvinod, torch.float64, ALL),
    **{
        f"SpeechBrain, {', '.join(map(str, args))}": (
            partial(speechbrain_modules, *args),
            speechbrain,
            dtype,
            LENGTHS,
        )
        for dtype, *args in (
            (torch.float64, "content", "lstm", 2),
            (torch.float64, "keyvalue", "rnn", 1, True),
            (torch.float32, "location", "gru"),  # its first weights, whatever its parameters
            (torch.float32, "location", "lstm", 2),
        )
    },
    **{
        f"ESPnet, {kind}": (
            partial(espnet_modules, kind, rnn, 1, 8, residual=residual),
            espnet,
            dtype,
            LENGTHS,
        )
        for kind, rnn, residual, dtype in (
            ("AttAdd", "gru", False, torch.float64),
            ("AttLoc", "lstm", True, torch.float64),
            ("AttCov", "gru", True, torch.float32),  # as SpeechBrain's
            ("AttCovLoc", "lstm", False, torch.float32),
        )
    },
    **{
        f"yoyodyne, {kind}": (
            partial(yoyodyne_modules, kind, *args),
            yoyodyne,
            torch.float64,
            LENGTHS,
        )
        for kind, *args in (
            ("SoftAttention", "LSTM", 1, 3),
            ("PointerGenerator", "GRU", 2),
        )
    },
}


def ids(kind):
    """Return the ids of the start and the end, which are one word of ESPnet's."""
    start, end = {"ESPnet": (V - 1, V - 1), "yoyodyne": (2, 3)}.get(kind.split(",")[0], (0, 1))
    return {"start": start, "end": end, "forbidden": ()}


def made(kind, dtype=None):
    """Return modules in evaluation mode, their served copies, and the arguments of a search."""
    make, _, own_dtype, lengths = KINDS[kind]
    dtype = dtype or own_dtype
    torch.manual_seed(2)
    plain = nn.ModuleList(make()).double()
    for p in plain.parameters():
        nn.init.normal_(p, std=2 * max(p.shape[-1:]) ** -0.5)
    plain = plain.to(dtype).eval()
    served = copy.deepcopy(plain)
    serve(served)
    source = WORDS if kind.startswith("yoyodyne") else STATES.to(dtype)
    return plain, served, (source, lengths), ids(kind)


@pytest.mark.parametrize("kind", [x for x in KINDS if x != "sgrvinod"])
def test_searches_are_one_operator(kind, monkeypatch):
    """Equal to the loop over single steps."""
    _, served, source, words = made(kind, torch.float64)
    model = make_search_model(*served)
    calls = (
        lambda: greedy_search(model, *source, need_weights=True, **words),
        lambda: beam_search(model, *source, 4, n_best=3, need_weights=True, **words),
        lambda: sample(model, *source, 2, generator=torch.manual_seed(0), **words),
    )
    for name, call in zip(("greedy search", "beam search", "sampling"), calls):
        assert f"{name}: one operator on cpu" in str(attnfast.explain(call))
    found = [call() for call in calls]
    monkeypatch.setattr(search, "_run_operator", lambda *_, **__: None)
    for x, call in zip(found, calls):
        torch.testing.assert_close(x, call())
    assert len({tuple(best) for best in found[0].best}) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_words_are_those_of_a_projects_own_steps(kind):
    plain, served, source, words = made(kind)
    with torch.no_grad():
        scores, wanted = KINDS[kind][1](plain, *source, 9)
    found = greedy_search(make_search_model(*served), *source, max_length=9, **words)
    assert len({tuple(best) for best in found.best}) > 2
    for b, own in enumerate(wanted.tolist()):
        end = own.index(words["end"]) if words["end"] in own else 9
        assert found.best[b] == own[:end]
        n = min(end + 1, scores.shape[1])  # the end's score, too
        torch.testing.assert_close(found.word_scores[b, 0, :n], scores[b, :n])


@pytest.mark.parametrize("kind", KINDS)
def test_no_hook_is_passed_over(kind):
    """A hook on any module that is not called is refused."""
    _, served, source, words = made(kind)
    model, called = make_search_model(*served), []
    if kind.startswith("yoyodyne"):
        called = [served[0], served[0].loss_func, *served[0].source_encoder.modules()]
    for module in (x for part in served for x in part.modules() if x not in called):
        handle = module.register_forward_hook(lambda *_: None)
        with pytest.raises(InputError, match=r"model cannot be searched with: .*hooks"):
            greedy_search(model, *source, **words)
        handle.remove()
    greedy_search(model, *source, **words)


def test_a_gate_is_for_single_steps():
    """Images need not be flat."""
    _, served, (source, lengths), words = made("sgrvinod")
    model = make_search_model(*served)
    flat = beam_search(model, source[:, :6], lengths - 1, **words)
    images = source[:, :6].unflatten(1, (2, 3))
    torch.testing.assert_close(beam_search(model, images, lengths - 1, **words), flat)
    done = str(attnfast.explain(beam_search, model, source, lengths, **words))
    assert "beam search: step by step\n    the operator supports no gate on" in done


# ---- a project's own calls ----------------------------------------------------------------------


def test_clovaai_without_a_text():
    [plain], [served], (source, _), _ = made("clovaai")
    torch.testing.assert_close(served(source, None, False, 8), plain(source, None, False, 8))
    assert found_in_one(lambda: served(source, None, False, 8))


@pytest.mark.parametrize("limit", [3, 30])
@pytest.mark.parametrize(
    ("kind", "bias"), [("SoftAttention", 1), ("PointerGenerator", 2), ("PointerGenerator", 6)]
)
def test_yoyodyne_without_a_target(kind, bias, limit):
    """It stops once all rows have ended, some at the first step, or at its limit."""
    plain, served, (source, _), _ = made(f"yoyodyne, {kind}")
    states = torch.randn(B, TK, 6, dtype=torch.float64)
    mask = torch.arange(TK) >= LENGTHS[:, None]
    source = source.masked_fill(mask, 0)
    inputs, ends = [source, states, mask][kind == "SoftAttention" :], set()
    for [model] in (plain, served):
        model.max_target_length = limit
        with torch.no_grad():
            model.classifier.bias[3] += bias
    for name in ("greedy_decode_train_validate", "greedy_decode_predict_test"):
        for row in range(B):
            one = [x[row : row + 1] for x in inputs]
            got, want = (getattr(model, name)(*one) for [model] in (served, plain))
            torch.testing.assert_close(got, want)
            ends.add(got.shape[2])
        torch.testing.assert_close(*(getattr(m, name)(*inputs) for [m] in (served, plain)))
        assert found_in_one(lambda name=name: getattr(served[0], name)(*inputs))
    assert len(ends) > 1 or limit == 3
    served.train()
    assert not found_in_one(lambda: served[0].greedy_decode_train_validate(*inputs))


@pytest.mark.parametrize("kind", ["SpeechBrain, location, gru", "ESPnet, AttCovLoc"])
def test_an_attention_keeps_its_attributes(kind):
    _, served, (source, lengths), words = made(kind)
    attention = served[1].attn if len(served) > 1 else served[0].att_list[0]
    with torch.no_grad():
        KINDS[kind][1](served, source[:, :4], lengths.clamp(max=4), 2)
    before = dict(vars(attention))
    greedy_search(make_search_model(*served), source, lengths, **words)
    assert all(vars(attention)[name] is x for name, x in before.items())


# ---- what cannot be searched with ---------------------------------------------------------------


def test_bad_sources_are_named():
    _, served, (source, lengths), words = made("clovaai")
    model = make_search_model(*served)
    for states, ends, message in (
        (torch.zeros(6, 7).long(), lengths, r"source must be floating-point \[B, Tk, D\] or"),
        (source.double(), lengths, "source must be of the decoder's dtype torch.float32"),
        (source, LENGTHS, "its attention reads padding: lengths must be 7, got"),
        (source, lengths + 1, "lengths must be between 1 and 7 to fit source, got 8"),
    ):
        with pytest.raises((InputError, ValueError, TypeError), match=message):
            greedy_search(model, states, ends, **words)


def test_speechbrains_modules_are_named():
    _, (embedding, decoder, linear), source, words = made("SpeechBrain, location, gru")
    expected = "modules must be the embedding, the linear and the decoder, got Attentional"
    with pytest.raises(InputError, match=expected):
        make_search_model(decoder, linear)
    linear.max_norm = 1.0
    for modules, reason in (
        (
            (embedding, decoder, linear),
            "its linear layer is no plain nn.Linear, or has a maximum norm",
        ),
        ((embedding, decoder, nn.Sequential(linear.w)), "its linear layer is no plain nn.Linear"),
        ((nn.Sequential(embedding), decoder, linear.w), "its embedding or output layer is no"),
    ):
        with pytest.raises(InputError, match=f"model cannot be searched with: {reason}"):
            greedy_search(make_search_model(*nn.ModuleList(modules).eval()), *source, **words)


def test_espnets_higher_layers_are_refused():
    [decoder] = espnet_modules("AttAdd", "lstm", 2, 8)
    serve(decoder.eval())
    reason = "model cannot be searched with: its query is the state of the first of several layers"
    with pytest.raises(InputError, match=reason):
        greedy_search(make_search_model(decoder), STATES.float(), LENGTHS, **ids("ESPnet"))


def test_another_cell_is_refused():
    _, [head], source, words = made("clovaai")
    head.attention_cell.rnn.__class__ = type("LSTMCell", (nn.LSTMCell,), {})
    reason = "an inner layer of its AttentionCell has hooks or was exchanged"
    with pytest.raises(InputError, match=f"model cannot be searched with: {reason}"):
        greedy_search(make_search_model(head), *source, **words)


class LowRank(nn.Module):
    """A linear layer and a change of low rank, with the weight of the layer alone."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.change = layer, nn.Linear(layer.in_features, layer.out_features)

    @property
    def weight(self):
        return self.layer.weight

    @property
    def bias(self):
        return self.layer.bias

    def forward(self, x):
        return self.layer(x) + self.change(x)


def test_other_layers_are_refused():
    """A module with a weight need not compute with the weight alone."""
    _, modules, source, words = made("SpeechBrain, location, gru")
    model, [decoder] = make_search_model(*modules), [x for x in modules if hasattr(x, "proj")]
    decoder.proj = LowRank(decoder.proj).eval()
    with pytest.raises(
        InputError, match=r"its LowRank is no module of torch\.nn or of the project"
    ):
        greedy_search(model, *source, **words)
    _, [decoder], source, words = made("sgrvinod")
    model = make_search_model(decoder)
    decoder.sigmoid = nn.Tanh().eval()
    with pytest.raises(InputError, match=r"its gate is no nn\.Sigmoid"):
        greedy_search(model, *source, **words)
    decoder.sigmoid, decoder.attention.relu = nn.Sigmoid().eval(), nn.LeakyReLU().eval()
    with pytest.raises(InputError, match=r"an inner layer of its Attention .*was exchanged"):
        greedy_search(model, *source, **words)


def test_inner_modules_are_in_evaluation_mode():
    _, [decoder], source, words = made("sgrvinod")
    model = make_search_model(decoder)
    decoder.dropout.train()
    with pytest.raises(InputError, match="model must be in evaluation mode"):
        greedy_search(model, *source, **words)


def test_modules_that_do_not_fit_are_named():
    _, [decoder], (states, lengths), words = made("ESPnet, AttAdd")
    with pytest.raises(InputError, match="source and modules must fit each other: "):
        greedy_search(make_search_model(decoder), states[..., :-1], lengths, **words)


def test_yoyodynes_other_tables_are_refused():
    _, [model], source, words = made("yoyodyne, SoftAttention")
    model.embeddings.max_norm = 0.1
    with pytest.raises(InputError, match="model cannot be searched with: an inner layer has hooks"):
        greedy_search(make_search_model(model), *source, **words)
    [model] = yoyodyne_modules("SoftAttention", "GRU", 1, features=True)
    serve(model.eval())
    with pytest.raises(
        InputError, match="model cannot be searched with: it has an encoder of features"
    ):
        greedy_search(make_search_model(model), *source, **words)
