"""Searches with other projects' decoders: their own modules, and their own searches."""

from __future__ import annotations

import copy
import random
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from integrations.common import real, serve
from integrations.reference_projects import (
    AttnDecoderRNN,
    Seq2SeqAttentionDecoder,
    bentrevett_model,
)
from torch import nn

import attnfast
from attnfast._utils.checks import InputError
from attnfast.decoding import beam_search, greedy_search, sample, search
from attnfast.integrations import make_search_model, search_model
from attnfast.ops import dispatch
from attnfast.ops.search import SEARCH

PIPELINE = ("ahocorasick", "configargparse", "fasttext", "pyonmttok", "rapidfuzz", "spacy", "yaml")
UNUSED = ("datasets", "importlib_metadata", "matplotlib", "pandas", "sacrebleu", "sentencepiece",
          "subword_nmt", "tensorboard", "torch.utils.tensorboard", "tqdm", "yaml")  # fmt: skip
V = 23
IDS = {"start": 2, "end": 3, "forbidden": (1, 2)}
SOURCE = torch.randint(4, V, (6, 7), generator=torch.Generator().manual_seed(3))
LENGTHS = torch.tensor([7, 2, 5, 1, 7, 3])
SOURCE = SOURCE.masked_fill(torch.arange(7) >= LENGTHS[:, None], 1)


def d2l_model(layers=1):
    d2l = real("d2l.torch", "IPython", "matplotlib", "matplotlib_inline", "pandas", "PIL",
               "requests", "scipy", "torchvision")  # fmt: skip
    attention = d2l.AdditiveAttention(10, 0.0)
    decoder = Seq2SeqAttentionDecoder(attention, V, 6, 10, layers)
    encoder = d2l.Seq2SeqEncoder(V, 6, 10, layers)
    source = torch.randn(1, 2, 10)
    attention(source[:, :1], source, source, None)
    attention.attention_weights = None
    return d2l.Seq2Seq(encoder, decoder, 1, 0.01)


class TutorialEncoder(nn.Module):
    """The encoder of PyTorch's translation tutorial."""

    def __init__(self):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(V, 10), nn.GRU(10, 10, batch_first=True)

    def forward(self, input):
        return self.gru(self.embedding(input))


def tutorial_model():
    return nn.ModuleList([TutorialEncoder(), AttnDecoderRNN(10, V)])


def onmt_model(kind="general", rnn="LSTM", layers=1, bridge=False, **more):
    decoders = real("onmt.decoders.decoder", *PIPELINE)
    encoders = real("onmt.encoders.rnn_encoder", *PIPELINE)
    words = real("onmt.modules.embeddings", *PIPELINE).Embeddings
    tables = [words(12, V, word_padding_idx=1) for _ in range(2)]
    model = nn.Module()
    model.encoder = encoders.RNNEncoder(
        rnn, True, layers, 16, embeddings=tables[0], use_bridge=bridge
    )
    model.decoder = decoders.InputFeedRNNDecoder(
        rnn, True, layers, 16, kind, embeddings=tables[1], **more
    )
    model.generator = nn.Linear(16, V)
    return model


def eole_model(kind="general", layers=1, rnn="LSTM"):
    decoders = real("eole.decoders.rnn_decoder", "yaml", "pydantic")
    encoders = real("eole.encoders.rnn_encoder", "yaml", "pydantic")
    words = real("eole.modules.embeddings", "yaml", "pydantic").Embeddings
    config = SimpleNamespace(
        encoder_type="brnn", hidden_size=16, rnn_type=rnn, layers=layers, bridge=False,
        src_word_vec_size=12, tgt_word_vec_size=12, bidirectional_encoder=True, coverage_attn=False,
        context_gate=None, global_attention=kind, global_attention_function="softmax",
    )  # fmt: skip
    model = nn.Module()
    model.src_emb, model.tgt_emb = (
        words(12, V, word_padding_idx=1, position_encoding_type=None) for _ in range(2)
    )
    model.encoder = encoders.RNNEncoder(config)
    model.decoder = decoders.InputFeedRNNDecoder(config)
    model.generator = nn.Linear(16, V)
    return model


def joeynmt_model(kind="bahdanau", **more):
    decoders, encoders, models, embeddings = (
        real(f"joeynmt.{x}", *UNUSED) for x in ("decoders", "encoders", "model", "embeddings")
    )
    encoder = encoders.RecurrentEncoder(hidden_size=7, emb_size=12, bidirectional=True)
    decoder = decoders.RecurrentDecoder(
        emb_size=12, hidden_size=10, encoder=encoder, attention=kind, vocab_size=V, **more
    )
    vocab = SimpleNamespace(
        pad_index=1, bos_index=2, eos_index=3, sep_index=None, unk_index=0, specials=[],
        lang_tags=[], lookup=None,
    )  # fmt: skip
    tables = [embeddings.Embeddings(12, x, V) for x in (False, True)]
    return models.Model(encoder, decoder, *tables, vocab, vocab)


def masked_bentrevett():
    return bentrevett_model("", True, V)


MODELS = {
    "d2l": d2l_model,
    "d2l, two layers": lambda: d2l_model(2),
    "tutorial": tutorial_model,
    "OpenNMT": onmt_model,
    "OpenNMT, dot": lambda: onmt_model("dot", "GRU"),
    "OpenNMT, mlp, two layers": lambda: onmt_model("mlp", layers=2),
    "OpenNMT, bridge": lambda: onmt_model(rnn="GRU", layers=2, bridge=True),
    "OpenNMT, sparsemax": lambda: onmt_model(attn_func="sparsemax"),
    "eole": eole_model,
    "eole, GRU": lambda: eole_model(rnn="GRU"),
    "eole, mlp": lambda: eole_model("mlp", 2),
    "joeynmt": joeynmt_model,
    "joeynmt, Luong": lambda: joeynmt_model("luong", rnn_type="lstm", num_layers=2),
    "joeynmt, nothing fed": lambda: joeynmt_model(input_feeding=False),
    "bentrevett": masked_bentrevett,
    "bentrevett, 2018": lambda: bentrevett_model("2018", False, V),
}


def made(kind: str, dtype=torch.float64):
    """Return a model in evaluation mode, and its served copy."""
    torch.manual_seed(1)
    plain = MODELS[kind]()
    for p in plain.parameters():
        nn.init.normal_(p, std=3 * max(p.shape[-1:]) ** -0.5)
    plain = plain.to(dtype).eval()
    served = copy.deepcopy(plain)
    # two editions of bentrevett's model have the same parameters: comparing tells which it is
    (attnfast.replace if "bentrevett" in kind else serve)(served)
    return plain, served


def modules(model):
    return model.children() if type(model) is nn.ModuleList else [model]


@pytest.mark.parametrize("kind", MODELS)
def test_searches_are_one_operator(kind, monkeypatch):
    """Equal to the loop over single steps."""
    model = make_search_model(*modules(made(kind)[1]))
    calls = (
        lambda: greedy_search(model, SOURCE, LENGTHS, need_weights=True, **IDS),
        lambda: beam_search(model, SOURCE, LENGTHS, 4, n_best=3, need_weights=True, **IDS),
        lambda: sample(model, SOURCE, LENGTHS, 2, generator=torch.manual_seed(0), **IDS),
    )
    for name, call in zip(("greedy search", "beam search", "sampling"), calls):
        assert f"{name}: one operator on cpu" in str(attnfast.explain(call))
    found = [call() for call in calls]
    monkeypatch.setattr(search, "_run_operator", lambda *_, **__: None)
    for x, call in zip(found, calls):
        torch.testing.assert_close(x, call())
    assert len({tuple(words) for words in found[0].best}) > 2


def own_words(kind: str, model, steps: int) -> torch.Tensor:
    """Return the words [B, T] that a project's own single steps find, and the scores of each."""
    words = torch.full((len(SOURCE), 1), IDS["start"])
    order = LENGTHS.argsort(descending=True, stable=True)
    back = order.argsort()
    seen = torch.arange(SOURCE.shape[1]) < LENGTHS[:, None]
    if kind.startswith("OpenNMT"):
        source = SOURCE.unsqueeze(-1)
        states, final, _ = model.encoder(source, LENGTHS)
        model.decoder.init_state(source, states, final)
    elif kind.startswith("eole"):
        states, final = model.encoder(model.src_emb(SOURCE))
        model.decoder.init_state(enc_final_hs=final)
    elif kind.startswith("joeynmt"):
        states, final = model._encode(SOURCE[order], LENGTHS[order], seen[order].unsqueeze(1))
        states, hidden, vector = states[back], model.decoder._init_hidden(final[back]), None
        one = not isinstance(hidden, tuple)
        hidden = [x.transpose(0, 1) for x in ([hidden] if one else hidden)]
        hidden = hidden[0] if one else tuple(hidden)
    elif kind.startswith("bentrevett"):
        packed = [LENGTHS[order]] if hasattr(model, "create_mask") else []
        states, hidden = model.encoder(SOURCE[order].T, *packed)
        masks = [model.create_mask(SOURCE.T)] if packed else []
        states, hidden = states[:, back], hidden[back]
    elif kind.startswith("d2l"):
        state = model.decoder.init_state(model.encoder(SOURCE, LENGTHS), LENGTHS)
    else:
        states, hidden = model[0](SOURCE)
    for _ in range(steps):
        last = words[:, -1:]
        if kind.startswith("OpenNMT"):
            out, _ = model.decoder(last.unsqueeze(-1), states, src_len=LENGTHS)
            out = model.generator(out)
        elif kind.startswith("eole"):
            mask = ~seen.unsqueeze(1)
            out, _ = model.decoder(model.tgt_emb(last), states, src_pad_mask=mask)
            out = model.generator(out)
        elif kind.startswith("joeynmt"):
            out, hidden, _, vector = model._decode(
                states, None, seen.unsqueeze(1), last, 1, hidden, vector
            )
        elif kind.startswith("bentrevett"):
            out, hidden, *_ = model.decoder(last[:, 0], hidden, states, *masks)
            out = out.unsqueeze(1)
        elif kind.startswith("d2l"):
            out, state = model.decoder(last, state)
        else:
            out, hidden, _ = model[1].forward_step(last, hidden, states)
        out = out[:, -1].log_softmax(-1)
        out[:, IDS["forbidden"]] = -torch.inf
        words = torch.cat([words, out.argmax(-1, keepdim=True)], 1)
    return words[:, 1:]


@pytest.mark.parametrize("kind", MODELS)
def test_words_are_those_of_a_projects_own_steps(kind):
    plain, served = made(kind)
    model = make_search_model(*modules(served))
    with torch.no_grad():
        wanted = own_words(kind, plain, 9).tolist()
    found = greedy_search(model, SOURCE, LENGTHS, max_length=9, **IDS)
    assert len({tuple(words) for words in found.best}) > 2
    for words, own in zip(found.best, wanted):
        end = own.index(3) if 3 in own else 9
        assert words == own[:end]


# ---- a project's own calls ----------------------------------------------------------------------


def found_in_one(call) -> bool:
    """Return whether a call searches in one operator."""
    with mock.patch.object(search_model.dispatch, "run", wraps=dispatch.run) as run:
        call()
    return any(x.args[0] is SEARCH for x in run.call_args_list)


def test_the_tutorials_decoder_without_a_target():
    plain, served = made("tutorial")
    inputs = plain[0](SOURCE)
    want, got = (model[1](*inputs) for model in (plain, served))
    torch.testing.assert_close(got, want)
    assert found_in_one(lambda: served[1](*inputs))
    served[1].train()
    assert not found_in_one(lambda: served[1](*inputs))


@pytest.mark.parametrize("kind", ["d2l", "d2l, two layers"])
def test_d2l_predicts_words(kind):
    plain, served = made(kind)
    target = torch.full((6, 4), 2)
    batch = SOURCE, target, LENGTHS, target
    for args in ((5,), (4, True), (1, True)):
        (words, weights), (own, own_weights) = (
            model.predict_step(batch, torch.device("cpu"), *args) for model in (served, plain)
        )
        assert torch.equal(words, own)
        torch.testing.assert_close(weights, own_weights)
        torch.testing.assert_close(
            served.decoder.attention_weights[-1], plain.decoder.attention_weights[-1]
        )
    assert found_in_one(lambda: served.predict_step(batch, torch.device("cpu"), 3))
    different = batch[0], torch.arange(24).view(6, 4), *batch[2:]
    for rows, is_one in ((6, False), (1, True)):
        args = [x[:rows] for x in different], torch.device("cpu"), 3
        assert torch.equal(*(m.predict_step(*args)[0] for m in (served, plain)))
        assert found_in_one(partial(served.predict_step, *args)) is is_one


def test_d2l_model_is_compared():
    model = made("d2l")[0].float()
    report = attnfast.replace(model)
    assert [x.path for x in report.replaced] == ["", "decoder", "decoder.attention"], report


@pytest.mark.parametrize("ratio", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["bentrevett", "bentrevett, 2018"])
def test_bentrevetts_models_feed_their_own_words(kind, ratio):
    plain, served = made(kind)
    order = LENGTHS.argsort(descending=True)
    sizes = [LENGTHS[order]] if kind == "bentrevett" else []
    target = torch.randint(4, V, (9, 6))
    target[0] = 2
    results = []
    for model in (plain, served):
        random.seed(1)
        results.append(model(SOURCE[order].T, *sizes, target, ratio))
    torch.testing.assert_close(*results)
    assert found_in_one(lambda: served(SOURCE[order].T, *sizes, target, ratio))
    served.train()
    assert not found_in_one(lambda: served(SOURCE[order].T, *sizes, target, ratio))


def test_nan_is_left_to_its_own_code():
    plain, served = made("tutorial")
    for model in (plain, served):
        with torch.no_grad():
            model[1].out.bias[0] = torch.nan
    inputs = plain[0](SOURCE)
    assert served[1](*inputs)[0].isnan().all() and plain[1](*inputs)[0].isnan().all()


# ---- what cannot be searched with ---------------------------------------------------------------


def search_with(*modules):
    return greedy_search(make_search_model(*modules), SOURCE, LENGTHS, **IDS)


def test_bad_models_are_named():
    with pytest.raises(TypeError, match=r"modules must be torch\.nn\.Modules, got"):
        make_search_model("model")
    plain, served = made("OpenNMT")
    one = "modules must have one decoder that replace"
    for modules, got in (
        ([plain], "got none"),
        ([], "got none"),
        ([served, made("joeynmt")[1]], "got 2 beside OpenNMT-py's InputFeedRNNDecoder, joeynmt's"),
    ):
        with pytest.raises(InputError, match=f"{one}.*{got}"):
            make_search_model(*modules)
    encoder, decoder = made("tutorial")[1]
    for modules, expected in (
        ([served.decoder], "the model alone, got InputFeedRNNDecoder"),
        ([served.encoder, served.decoder], "the model alone, got RNNEncoder, InputFeedRNNDecoder"),
        ([nn.ModuleList([served])], "the model alone, got ModuleList"),
        ([decoder], "the encoder and the decoder, got AttnDecoderRNN"),
    ):
        with pytest.raises(InputError, match=f"modules must be {expected}"):
            make_search_model(*modules)
    assert search_with(decoder, encoder).best == search_with(encoder, decoder).best
    with pytest.raises(InputError, match=r"evaluation mode: call eval\(\) first"):
        search_with(served.train())


def test_bad_sources_are_named():
    model = make_search_model(made("OpenNMT")[1])
    for source, lengths, message in (
        (SOURCE.float(), LENGTHS, "source must be int64 or int32"),
        (SOURCE[:, 0], LENGTHS, r"source must be int64 or int32 of shape \[B, Tk\]"),
        (SOURCE, LENGTHS + 5, "lengths must be between 1 and 7 to fit source, got 12"),
        (SOURCE[:0], LENGTHS[:0], "source must be of one sentence at least, got none"),
    ):
        with pytest.raises((InputError, ValueError, TypeError), match=message):
            greedy_search(model, source, lengths)


def test_features_and_positions_are_refused():
    words = real("onmt.modules.embeddings", *PIPELINE).Embeddings
    _, served = made("OpenNMT")
    served.decoder.embeddings = words(12, V, word_padding_idx=1, position_encoding=True).eval()
    with pytest.raises(InputError, match="its words have features or positions"):
        search_with(served)
    _, served = made("eole")
    served.tgt_emb.normalize = True
    with pytest.raises(InputError, match="its words have positions, or are normalised"):
        search_with(served)


@pytest.mark.parametrize("kind", ["d2l", "tutorial", "OpenNMT, mlp, two layers", "eole", "joeynmt",
                                  "bentrevett"])  # fmt: skip
def test_no_hook_is_passed_over(kind):
    """A hook on any module of the decoder, or around its words, is refused."""
    _, served = made(kind)
    parts = modules(served)
    model, decoder = make_search_model(*parts), getattr(served, "decoder", None)
    decoder = served[1] if decoder is None else decoder
    words = [x for x in (getattr(served, "trg_embed", None), getattr(served, "tgt_emb", None)) if x]
    for module in (*decoder.modules(), *words):
        handle = module.register_forward_hook(lambda *_: None)
        with pytest.raises(InputError, match=r"model cannot be searched with: .*hooks"):
            greedy_search(model, SOURCE, LENGTHS, **IDS)
        handle.remove()
    greedy_search(model, SOURCE, LENGTHS, **IDS)


def test_other_parts_are_refused():
    _, served = made("d2l")
    model = make_search_model(served)
    served.decoder.embedding.max_norm = 0.1
    with pytest.raises(InputError, match="its embedding or output layer is no plain module"):
        greedy_search(model, SOURCE, LENGTHS, **IDS)
    served.decoder.embedding.max_norm = None
    nn.utils.parametrizations.spectral_norm(served.decoder.rnn, "weight_ih_l0")
    served.eval()
    with pytest.raises(InputError, match="its recurrent layer or cell is no plain module"):
        greedy_search(model, SOURCE, LENGTHS, **IDS)
    _, served = made("OpenNMT")
    model = make_search_model(served)
    served.generator = nn.Linear(16, V - 1).double().eval()
    with pytest.raises(InputError, match="it scores more or fewer words than it embeds"):
        greedy_search(model, SOURCE, LENGTHS, **IDS)
    served.generator = nn.Sequential(nn.Linear(16, V)).eval()
    with pytest.raises(InputError, match="output layer is no plain module"):
        greedy_search(model, SOURCE, LENGTHS, **IDS)


@pytest.mark.parametrize("kind", ["joeynmt", "OpenNMT"])
def test_parameters_are_read_at_each_search(kind):
    _, served = made(kind, torch.float32)
    model = make_search_model(served)
    first = beam_search(model, SOURCE, LENGTHS, **IDS)
    int8 = beam_search(model, SOURCE, LENGTHS, int8=True, **IDS)
    assert int8.sequences.shape[:2] == first.sequences.shape[:2]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in served.decoder.rnn.parameters():
            p.mul_(-1)
    last = "generator" if kind == "OpenNMT" else "output_layer"
    owner = served if kind == "OpenNMT" else served.decoder
    setattr(owner, last, copy.deepcopy(getattr(owner, last)))
    second = beam_search(model, SOURCE, LENGTHS, **IDS)
    assert not torch.equal(first.scores, second.scores)
    fresh = beam_search(make_search_model(served), SOURCE, LENGTHS, **IDS)
    torch.testing.assert_close(second, fresh)
    torch.testing.assert_close(first, beam_search(twin, SOURCE, LENGTHS, **IDS))


def test_a_search_leaves_the_decoders_state_alone():
    _, served = made("OpenNMT")
    before = dict(served.decoder.state)
    search_with(served)
    assert served.decoder.state == before


def test_words_beyond_the_vocabulary_are_for_its_own_code():
    plain, served = made("bentrevett")
    order = LENGTHS.argsort(descending=True)
    for word in (V, -1, -100):
        target = torch.full((5, 6), 4)
        target[2, 1] = word
        for model in (plain, served):
            with pytest.raises(IndexError), mock.patch("random.random", return_value=0.1):
                model(SOURCE[order].T, LENGTHS[order], target, 0.5)
    plain, served = made("d2l")
    target = torch.full((6, 4), V)
    for model in (plain, served):
        with pytest.raises(IndexError):
            model.predict_step((SOURCE, target, LENGTHS, target), torch.device("cpu"), 3)


def test_half_precision_is_for_its_own_code():
    plain, served = made("tutorial", torch.bfloat16)
    inputs = plain[0](SOURCE)
    assert not found_in_one(lambda: served[1](*inputs))
    torch.testing.assert_close(
        served[1](*inputs)[0].exp().sum(-1), plain[1](*inputs)[0].exp().sum(-1)
    )


@pytest.mark.filterwarnings("ignore:The tensor attributes")
def test_a_graph_without_a_target_is_exported():
    _, served = made("tutorial", torch.float32)
    inputs = tuple(x.detach() for x in served[0](SOURCE))
    graph = torch.export.export(served[1], inputs, strict=False)
    torch.testing.assert_close(graph.module()(*inputs)[0], served[1](*inputs)[0])


@pytest.mark.parametrize("kind", ["joeynmt", "joeynmt, Luong", "joeynmt, nothing fed"])
def test_joeynmts_own_search(kind):
    """Its greedy search: the same words, scores and attention weights."""
    plain, served = made(kind)
    model = make_search_model(served)
    order = LENGTHS.argsort(descending=True, stable=True)
    source, lengths = SOURCE[order], LENGTHS[order]
    seen = (torch.arange(7) < lengths[:, None]).unsqueeze(1)
    with torch.no_grad():
        states, hidden = plain._encode(source, lengths, seen)
        words, scores, weights = real("joeynmt.search", *UNUSED).greedy(
            seen, 8, plain, states, hidden, return_prob="hyp"
        )
    found = greedy_search(
        model, source, lengths, max_length=8, min_length=1, need_weights=True, **IDS
    )
    # joeynmt's scores are of all words: forbidden ones have theirs
    same = {"prefix": found.best, "max_length": 8, **IDS, "forbidden": ()}
    of_all = greedy_search(model, source, lengths, **same)
    for b, best in enumerate(found.best):
        n, own = len(best), words[b].tolist()
        assert best == own[:n] and (n == 8 or own[n] == 3)
        torch.testing.assert_close(of_all.word_scores[b, 0, :n].float(), scores[b, :n])
        torch.testing.assert_close(found.weights[b, 0, :n].float(), weights[b, :n])
