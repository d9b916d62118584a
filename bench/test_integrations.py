"""Times other projects' attention as it is and replaced by attnfast, with the same tensors.

`make integrations` installs the projects; those that are not installed are left out. Classes of
tests/integrations/reference_projects.py stand for code that is on no package index. A recurrent
decoder attends step by step, each state depending on the context before it; "whole target" is one
call. Memory kept for the backward is counted without the states, which belong to the caller (a
recurrent cell keeps its own), and without the result.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from compare import DEVICE, compare, timed
from integrations import common, reference_projects

import attnfast
from attnfast._utils.benchmark import memory_of

logging.disable(logging.WARNING)  # ESPnet warns at every step
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ESPNET = "espnet2.legacy.nets.pytorch_backend.rnn.attentions"
PIPELINE = ("ahocorasick", "configargparse", "fasttext", "pyonmttok", "rapidfuzz", "spacy", "yaml")
TOOLS = ("hyperpyyaml", "joblib", "ruamel", "scipy", "sentencepiece", "torchaudio", "yaml")
JOEY = ("importlib_metadata", "packaging", "torch.utils.tensorboard", "yaml")


class Case(NamedTuple):
    """A module made for D features, and its call: for one step ``(context, past)``."""

    sizes: tuple[int, int, int, int]  # B, T, S, D
    make: Callable
    call: Callable
    whole: bool = False  # one call for all states
    parts: Callable | None = None  # the projections around the fused op, as a bound


def onmt(kind):
    return lambda D: common.real("onmt.modules.global_attention", *PIPELINE).GlobalAttention(
        D, False, kind
    )


def onmt_parts(m, source, states):
    query, key = m.linear_query(states), m.linear_context(source)
    context, _ = attnfast.additive_attention(query, key, source, m.v.weight[0], need_weights=True)
    return m.linear_out(torch.cat([context, states], -1))


def gnmt_parts(m, source, states):
    weight = m.linear_att / m.linear_att.norm() * m.normalize_scalar
    query, key = m.linear_q(states) + m.normalize_bias, m.linear_k(source)
    return attnfast.additive_attention(query, key, source, weight, need_weights=True)[0]


def espnet(name, *more):
    return lambda D: getattr(common.real(ESPNET), name)(D, D, D, *more)


def espnet_step(m, source, state, past):
    if past is None:
        m.reset()
    return m(source, [source.shape[1]] * len(source), state, past)


def heads(name, *more):
    return lambda D: getattr(common.real(ESPNET), name)(D, D, 4, D // 4, D // 4, *more)


def joeynmt_step(m, source, state, past):
    if past is None:
        m.compute_proj_keys(source)
    mask = torch.ones(len(source), 1, source.shape[1], dtype=torch.bool)
    context, weights = m(state.unsqueeze(1), mask, source)
    return context.squeeze(1), weights


def joeynmt(D):
    return common.real("joeynmt.attention", *JOEY).BahdanauAttention(D, D, D)


def speechbrain(name, *more):
    module = "speechbrain.nnet.attention"
    return lambda D: getattr(common.real(module, *TOOLS), name)(D, D, D, D, *more)


def speechbrain_step(m, source, state, past):
    if past is None:
        m.reset()
    return m(source, torch.full((len(source),), source.shape[1]), state)


def tacotron(D):
    return reference_projects.Tacotron2Attention(D, D, 128, 32, 31)


def tacotron_step(m, source, state, past):
    if past is None:
        zeros = source.new_zeros(source.shape[:2])
        past = m.memory_layer(source), zeros, zeros
    processed, last, total = past
    context, weights = m(state, source, processed, torch.stack([last, total], 1), None)
    return context, (processed, weights, total + weights)


def coqui(D):
    module = common.alone("TTS.tts.layers.tacotron.attentions", "scipy")
    return module.OriginalAttention(
        D, D, 128, True, windowing=False, norm="softmax", forward_attn=False, trans_agent=False,
        forward_attn_mask=False, attention_location_n_filters=32,
        attention_location_kernel_size=31,
    )  # fmt: skip


def coqui_step(m, source, state, past):
    if past is None:
        m.init_states(source)
        past = m.preprocess_inputs(source)
    return m(state, source, past, None), past


def pointer(D):
    reference_projects.config.hidden_dim = D // 2
    return reference_projects.PointerAttention()


def pointer_step(m, source, state, past):
    ones = source.new_ones(source.shape[:2])
    past = torch.zeros_like(ones) if past is None else past
    context, _, coverage = m(state, source, source.flatten(0, 1), ones, past)
    return context, coverage


def weights_alone(weights_of):
    """Return the step of a project that leaves the context to its caller."""

    def step(m, source, state, past):
        past = source.transpose(0, 1).contiguous() if past is None else past
        return (weights_of(m, past, state).view(len(source), 1, -1) @ source).squeeze(1), past

    return step


def d2l(D):
    lazy = common.real(
        "d2l.torch", "IPython", "matplotlib", "matplotlib_inline", "pandas", "PIL", "requests",
        "scipy", "torchvision",
    ).AdditiveAttention(D, 0.0)  # fmt: skip
    x = torch.zeros(1, 1, D)
    with torch.no_grad():
        lazy(x, x, x, None)
    return lazy


WORDS = 100  # few, for the last layer is the same in both


def words(states):
    """Return a target of as many words as there are states."""
    B, T = states.shape[:2]
    return (torch.arange(T) + torch.arange(B).unsqueeze(1)) % WORDS


def tutorial_target(m, source, states):
    reference_projects.MAX_LENGTH = states.shape[1]
    return m(source, states[:, 0].unsqueeze(0), words(states))[0]


def d2l_decoder(D):
    return reference_projects.Seq2SeqAttentionDecoder(d2l(D), WORDS, D, D)


def d2l_target(m, source, states):
    return m(words(states), [source, states[:, 0].unsqueeze(0), None])[0]


def onmt_decoder(D, score="general"):
    embeddings = common.real("onmt.modules.embeddings", *PIPELINE).Embeddings(D, WORDS, 0)
    decoder = common.real("onmt.decoders.decoder", *PIPELINE).InputFeedRNNDecoder
    return decoder("LSTM", False, 1, D, score, embeddings=embeddings)


def onmt_target(m, source, states):
    h = states[:, 0].unsqueeze(0)
    m.init_state(None, None, (h, h))
    return m(words(states).unsqueeze(2), source)[0]


def captioning_decoder(D):
    return reference_projects.CaptionDecoder(D, D, D, WORDS, D, dropout=0.0)


def captioning_target(m, source, states):
    B, T, _ = states.shape
    captions = words(states[:, [0, *range(T)]])
    return m(source, captions, torch.full((B, 1), T + 1))[0]


def speechbrain_decoder(rnn, kind):
    return lambda D: common.real("speechbrain.nnet.RNN", *TOOLS).AttentionalRNNDecoder(
        rnn, kind, D, D, 1, enc_dim=D, input_size=D, channels=10, kernel_size=100
    )


def speechbrain_target(m, source, states):
    return m(states, source, torch.ones(len(source)))[0]


def espnet_decoder(atype, layers=1):
    def make(D):
        decoder = common.real("espnet2.asr.decoder.rnn_decoder").RNNDecoder
        return decoder(WORDS, D, "lstm", layers, D, att_conf={"atype": atype, "adim": D})

    return make


def joeynmt_decoder(D):
    module = common.real("joeynmt.decoders", *JOEY, "datasets", "matplotlib", "pandas")
    encoder = SimpleNamespace(output_size=D)
    return module.RecurrentDecoder("gru", D, D, encoder, vocab_size=WORDS)


def joeynmt_target(m, source, states):
    mask = torch.ones(len(source), 1, source.shape[1], dtype=torch.bool)
    return m(states, source, states[:, 0], mask, states.shape[1])[0]


def eole_decoder(D):
    config = SimpleNamespace(
        global_attention="general", global_attention_function="softmax", rnn_type="LSTM", layers=1,
        bidirectional_encoder=False, context_gate=None, coverage_attn=False, hidden_size=D,
        tgt_word_vec_size=D,
    )  # fmt: skip
    decoder = common.real("eole.decoders.rnn_decoder", "yaml").InputFeedRNNDecoder
    return decoder(config, SimpleNamespace())


def eole_target(m, source, states):
    h = states[:, 0].unsqueeze(0)
    m.init_state(enc_final_hs=(h, h))
    return m(states, source)[0]


def clovaai_target(m, source, states):
    return m(source, words(states) % m.num_classes, True, states.shape[1] - 1)


def yoyodyne(kind, cell):
    """Return how a model is made whose encoder, H wide in both directions, is not called."""

    def make(D):
        model = import_module("integrations.test_yoyodyne").model(
            kind, cell, layers=1, size=D, width=D, words=WORDS
        )
        model.source_encoder.requires_grad_(False)
        return model

    return make


def espnet_target(m, source, states):
    lengths = (torch.full((len(source),), x.shape[1]) for x in (source, states))
    return m(source, next(lengths), words(states), next(lengths))[0]


def torchaudio_decoder(D):
    return common.alone("torchaudio.models.tacotron2")._Decoder(
        n_mels=80, n_frames_per_step=1, encoder_embedding_dim=D, decoder_rnn_dim=D,
        decoder_max_step=1, decoder_dropout=0.0, decoder_early_stopping=True, attention_rnn_dim=D,
        attention_hidden_dim=128, attention_location_n_filter=32,
        attention_location_kernel_size=31, attention_dropout=0.0, prenet_dim=256,
        gate_threshold=0.5,
    )  # fmt: skip


def coqui_decoder(D):
    coqui = common.alone("TTS.tts.layers.tacotron.tacotron2", "scipy")
    return coqui.Decoder(
        in_channels=D, frame_channels=80, r=1, attn_type="original", attn_win=False,
        attn_norm="sigmoid", prenet_type="original", prenet_dropout=True, attn_K=1,
        separate_stopnet=True, max_decoder_steps=4, location_attn=True, forward_attn=False,
        trans_agent=False, forward_attn_mask=False,
    )  # fmt: skip


def torchaudio_target(m, source, states):
    frames = states[..., :80].transpose(1, 2)
    torch.manual_seed(0)  # of the prenet's dropout
    mel, gate, _ = m(source, frames, torch.full((len(source),), source.shape[1]))
    return torch.cat([mel, gate.unsqueeze(1)], 1)


def coqui_target(m, source, states):
    torch.manual_seed(0)  # of the dropouts
    mel, _, stop = m(source, states[..., :80], torch.ones(source.shape[:2]) > 0)
    return torch.cat([mel, stop.unsqueeze(1)], 1)


def espnet_tts_decoder(D):
    """ESPnet's defaults, with twice as many units as features."""
    module = "espnet2.legacy.nets.pytorch_backend.tacotron2.decoder"
    return common.real(module).Decoder(D, 80, common.real(ESPNET).AttLoc(D, 2 * D, D, 32, 15))


def espnet_tts_target(m, source, states):
    torch.manual_seed(0)  # of dropout and zoneout
    lengths = torch.full((len(source),), source.shape[1])
    after, before, logits, _ = m(source, lengths, states[..., :80])
    return torch.cat([after, before, logits.unsqueeze(2)], -1)


def yoyodyne_target(m, source, states):
    padding = torch.zeros(source.shape[:2], dtype=torch.bool)
    inputs = [words(source)] * hasattr(m, "generation_probability") + [source, padding]
    return m.greedy_decode_train_validate(*inputs, target=words(states))


class Given(torch.nn.Module):
    """An encoder whose states are given, except when the model is compared."""

    given = None

    def __init__(self, D):
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, D).requires_grad_(False)

    def forward(self, src):
        states = self.embedding(src)
        return self.given or (states, states[-1])


def bentrevett_model(D):
    model = reference_projects.bentrevett_model("2024", False, WORDS, D, D // 2, D)
    model.encoder = Given(D)
    return model


def bentrevett_target(ratio):
    def call(m, source, states):
        random.seed(0)
        torch.manual_seed(0)
        m.encoder.given = source.transpose(0, 1), states[:, 0]
        return m(words(source).T, words(states[:, [0, *range(states.shape[1])]]).T, ratio)[1:]

    return call


SPEECH, TEXT = (32, 100, 400, 512), (32, 100, 100, 512)
TARGET, SHORT = (32, 50, 50, 512), (32, 20, 20, 256)  # of whole decoders
HEARD, SPOKEN = (16, 50, 200, 512), (16, 200, 100, 512)
CASES = {
    "OpenNMT mlp": Case(TEXT, onmt("mlp"), lambda m, h, q: m(q, h)[0], True, onmt_parts),
    "OpenNMT mlp, long": Case(
        (32, 200, 200, 512), onmt("mlp"), lambda m, h, q: m(q, h)[0], True, onmt_parts
    ),
    "GNMT normalised": Case(
        TEXT, lambda D: reference_projects.GNMTAttention(D, D, D, True, True),
        lambda m, h, q: m(q, h)[0], True, gnmt_parts,
    ),
    "d2l additive": Case(TEXT, d2l, lambda m, h, q: m(q, h, h, None), True),
    "OpenNMT mlp, steps": Case(TEXT, onmt("mlp"), lambda m, h, q, _: m(q, h)),
    "OpenNMT general, steps": Case(TEXT, onmt("general"), lambda m, h, q, _: m(q, h)),
    "joeynmt Bahdanau": Case(TEXT, joeynmt, joeynmt_step),
    "translation tutorial": Case(
        TEXT, lambda D: reference_projects.BahdanauAttention(D),
        lambda m, h, q, _: (m(q.unsqueeze(1), h)[0].squeeze(1), 0),
    ),
    "bentrevett": Case(
        TEXT, lambda D: reference_projects.bentrevett("2024", False, D, D),
        weights_alone(lambda m, source, state: m(state, source)),
    ),
    "fairseq": Case(
        SPEECH, lambda D: reference_projects.AttentionLayer(D, D, D),
        lambda m, h, q, past: m(q, h.transpose(0, 1), None),
    ),
    "sgrvinod": Case(
        (32, 20, 196, 512), lambda D: reference_projects.CaptionAttention(D, D, D),
        lambda m, h, q, _: m(h, q),
    ),
    "ESPnet AttDot": Case(SPEECH, espnet("AttDot"), espnet_step),
    "ESPnet AttAdd": Case(SPEECH, espnet("AttAdd"), espnet_step),
    "ESPnet AttLoc": Case(SPEECH, espnet("AttLoc", 10, 100), espnet_step),
    "ESPnet AttCov": Case(SPEECH, espnet("AttCov"), espnet_step),
    "ESPnet AttCovLoc": Case(SPEECH, espnet("AttCovLoc", 10, 100), espnet_step),
    "ESPnet AttForward": Case(SPEECH, espnet("AttForward", 10, 100), espnet_step),
    "ESPnet AttMultiHeadAdd": Case((8, 100, 400, 512), heads("AttMultiHeadAdd"), espnet_step),
    "SpeechBrain content": Case(SPEECH, speechbrain("ContentBasedAttention"), speechbrain_step),
    "SpeechBrain location": Case(
        SPEECH, speechbrain("LocationAwareAttention", 10, 100), speechbrain_step
    ),
    "Tacotron 2": Case((32, 400, 100, 512), tacotron, tacotron_step),
    "Coqui TTS": Case((32, 400, 100, 512), coqui, coqui_step),
    "pointer_summarizer": Case(
        (8, 100, 400, 512), pointer, pointer_step
    ),
    "d2l decoder": Case(TARGET, d2l_decoder, d2l_target, True),
    "d2l decoder, short": Case(SHORT, d2l_decoder, d2l_target, True),
    "translation tutorial's decoder": Case(
        TARGET, lambda D: reference_projects.AttnDecoderRNN(D, WORDS, 0.0), tutorial_target, True
    ),
    "translation tutorial's decoder, short": Case(
        SHORT, lambda D: reference_projects.AttnDecoderRNN(D, WORDS, 0.0), tutorial_target, True
    ),
    "OpenNMT input feeding": Case(TARGET, onmt_decoder, onmt_target, True),
    "OpenNMT input feeding, short": Case(SHORT, onmt_decoder, onmt_target, True),
    "SpeechBrain decoder, content": Case(
        HEARD, speechbrain_decoder("gru", "content"), speechbrain_target, True
    ),
    "SpeechBrain decoder, location": Case(
        HEARD, speechbrain_decoder("gru", "location"), speechbrain_target, True
    ),
    "SpeechBrain decoder, key-value": Case(
        HEARD, speechbrain_decoder("gru", "keyvalue"), speechbrain_target, True
    ),
    "ESPnet decoder, AttAdd": Case(HEARD, espnet_decoder("add"), espnet_target, True),
    "ESPnet decoder, AttAdd, 2 layers": Case(
        HEARD, espnet_decoder("add", 2), espnet_target, True
    ),
    "ESPnet decoder, AttLoc": Case(HEARD, espnet_decoder("location"), espnet_target, True),
    "ESPnet decoder, AttCov": Case(HEARD, espnet_decoder("coverage"), espnet_target, True),
    "ESPnet's Tacotron 2 decoder": Case(
        (16, 200, 60, 512), espnet_tts_decoder, espnet_tts_target, True
    ),
    "Tacotron 2 decoder": Case(SPOKEN, torchaudio_decoder, torchaudio_target, True),
    "Coqui's Tacotron 2 decoder": Case(SPOKEN, coqui_decoder, coqui_target, True),
    "sgrvinod's decoder": Case((32, 20, 196, 512), captioning_decoder, captioning_target, True),
}  # fmt: skip
WHOLE = {
    "OpenNMT input feeding, mlp": (lambda D: onmt_decoder(D, "mlp"), onmt_target),
    "joeynmt decoder": (joeynmt_decoder, joeynmt_target),
    "eole input feeding": (eole_decoder, eole_target),
    "clovaai's head, decoder": (
        lambda D: reference_projects.RecognitionHead(D, D, 38),
        clovaai_target,
    ),
    "yoyodyne soft attention, decoder": (yoyodyne("SoftAttention", "LSTM"), yoyodyne_target),
    "yoyodyne pointer-generator, decoder": (yoyodyne("PointerGenerator", "GRU"), yoyodyne_target),
    "bentrevett's model, forced, decoder": (bentrevett_model, bentrevett_target(1.0)),
    "bentrevett's model, half forced, decoder": (bentrevett_model, bentrevett_target(0.5)),
}
CASES |= {
    f"{name}{suffix}": Case(sizes, *how, True)
    for name, how in WHOLE.items()
    for suffix, sizes in (("", TARGET), (", short", SHORT))
}


@pytest.mark.parametrize("name", CASES)
def test_integration(benchmark, name):
    if DEVICE.type != "cpu":
        pytest.skip("its masks are made on the CPU")
    case = CASES[name]
    B, T, S, D = case.sizes
    torch.manual_seed(0)
    plain = case.make(D)
    for p in plain.parameters():
        torch.nn.init.uniform_(p, -(D**-0.5), D**-0.5)
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    unused = {"replaced": copy.deepcopy(served), "as it was": copy.deepcopy(plain)}
    source, states = torch.randn(B, S, D, requires_grad=True), torch.randn(B, T, D)

    def decode(module, call=case.call):
        """Return the contexts and what else the caller holds."""
        if case.whole:
            return call(module, source, states), []
        past, context, contexts, cells = None, 0, [], []
        for state in states.unbind(1):
            cells.append(state + 0.1 * context)
            context, past = call(module, source, cells[-1], past)
            contexts.append(context)
        return torch.stack(contexts, 1), cells

    def run(module, call=case.call):
        leaves = [source, *(p for p in module.parameters() if p.dim() > 1 and p.requires_grad)]
        return timed(lambda: decode(module, call)[0], leaves)

    calls = {"replaced": run(served), "as it was": run(plain)}
    for got, want in zip(*(call() for call in calls.values())):
        error = (got - want).detach().norm() / want.detach().norm()
        assert error < 1e-3, f"a result is off by {error:.1e}"  # a recurrence adds to rounding
    contexts, cells = decode(served)
    held = contexts.nbytes + sum(x.nbytes for x in cells)
    kept = {name: memory_of(lambda m=m: decode(m))[1] - held for name, m in unused.items()}
    if case.parts is not None:
        calls["its parts"] = run(served, case.parts)
    how = "a whole target at once" if case.whole else "step by step"
    compare(benchmark, how, name, case.sizes, "forward + backward", calls)
    benchmark.extra_info.update(size_names="B, T, S, D", kept=kept)
