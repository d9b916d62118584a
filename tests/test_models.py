"""The reference models: one computation for training and for decoding, and sound searches."""

import itertools
import math
import subprocess
import sys
from functools import partial

import pytest
import torch

from attnfast.decoding import beam_search, greedy_search
from attnfast.decoding._constraints import Constraints
from attnfast.models import (
    ATTENTIONS,
    BOS,
    EOS,
    UNK,
    Config,
    Encoder,
    FixedContext,
    Seq2Seq,
    TransformerEncoder,
    build,
)
from attnfast.models.config import COPY_GATES, NO_ATTENTION, USED_BY
from attnfast.models.decoders import READOUTS
from attnfast.models.encoders import POSITIONS
from attnfast.nn import BahdanauAttention, PointerGenerator
from attnfast.nn.recurrent import RECURRENCES
from attnfast.ops.backends import FLOATS
from attnfast.ops.copying import LOWEST

VOCAB = 23


#: Luong's decoder.
LUONG = {"recurrence": "input_feeding", "readout": "attentional"}


def make(attention="bahdanau", vocab_size=VOCAB, seed=0, **options):
    torch.manual_seed(seed)
    config = Config(vocab_size, attention, embed_dim=12, hidden_dim=9, layers=2, **options)
    model = build(config, backend="reference").eval()
    with torch.no_grad():  # words far apart, or an untrained model repeats one word for ever
        model.embedding.weight.mul_(4)
    return model


def make_source(batch=4, longest=7):
    torch.manual_seed(1)
    lengths = torch.tensor([longest, 1, 5, 3][:batch])
    source = torch.randint(4, VOCAB, (batch, longest))
    source[torch.arange(longest) >= lengths.unsqueeze(1)] = 0
    return source, lengths


@pytest.mark.parametrize("attention", ["bahdanau", "general"])
def test_keys_are_projected_once_per_sentence(attention):
    model = make(attention)
    calls = []
    model.decoder.attention.key_proj.register_forward_hook(lambda *_: calls.append(1))
    beam_search(model, *make_source(), beam=3)
    assert len(calls) == 1


@pytest.mark.parametrize("encoder", ["rnn", "transformer"])
@pytest.mark.parametrize("self_attention", [False, True])
def test_padding_has_no_state_and_no_word(self_attention, encoder):
    torch.manual_seed(0)
    config = Config(VOCAB, embed_dim=12, hidden_dim=8, self_attention=self_attention,
                    encoder=encoder)  # fmt: skip
    model = build(config, backend="reference").eval()
    source, lengths = make_source()
    states = model.encoder(model.embed(source), lengths)
    exists = torch.arange(source.shape[1]) < lengths.unsqueeze(1)
    assert (states != 0).any(-1).eq(exists).all()
    assert model.embedding.weight[0].eq(0).all()


def test_cells_of_an_lstm_are_used():
    model = make("general", cell="lstm")
    memory, state = model.encode(*make_source())
    words = torch.full((4, 1), BOS)
    first, _, _ = model.decode(words, state, memory)
    second, _, _ = model.decode(words, state._replace(cell=state.cell + 1), memory)
    assert (first - second).abs().max() > 1e-3


def test_input_feeding_by_hand():
    """The RNN reads the word and the vector before it, from zeros on; so does an LSTM's cell."""
    model = make("general", **LUONG, cell="lstm")
    source, _ = model.encode(*make_source())
    decoder, words, hidden = model.decoder, torch.randn(4, 3, 12), torch.randn(4, 18)
    got, _ = decoder(words, source.memory, decoder.initial(hidden))
    rnn = torch.nn.LSTM(12 + 12, 18, batch_first=True)
    rnn.load_state_dict(decoder.rnn.state_dict(), strict=False)
    feed, last = torch.zeros(4, 1, 12), (hidden.unsqueeze(0), torch.zeros(1, 4, 18))
    for t, word in enumerate(words.split(1, 1)):
        state, last = rnn(torch.cat([word, feed], -1), last)
        context, _ = decoder.attention(state, source.memory)
        feed = torch.tanh(decoder.rnn.output_proj(torch.cat([context, state], -1)))
        torch.testing.assert_close(got[:, t : t + 1], feed)


@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_readouts_by_hand(recurrence, readout):
    """Every recurrence has both readouts; Luong's of a vector that is fed is that vector."""
    model = make("general", recurrence=recurrence, readout=readout)
    source, state = model.encode(*make_source())
    words = torch.randn(4, 3, 12)
    found = model.decoder(words, source.memory, state)
    read = [found.states, found.contexts] + [words] * (readout == "deep")
    if (recurrence, readout) == ("input_feeding", "attentional"):
        weight, bias = model.decoder.rnn.output_proj.weight, None
        read = read[::-1]
    else:
        weight, bias = model.decoder.readout.parameters()
    expected = torch.tanh(torch.nn.functional.linear(torch.cat(read, -1), weight, bias))
    torch.testing.assert_close(found.output, expected)


def test_a_long_translation_is_waited_for():
    """However many shorter ones have ended: one that goes on with more than they have may win."""
    text = [4, 5, 6, 7, 8, 9, 10, EOS]

    class Sure:
        """Says the text's words in turn, each with a probability of 0.92; its state is the step."""

        def encode(self, source, lengths):
            return Kept(source), Kept(torch.zeros(len(source), dtype=torch.long))

        def decode(self, words, state, memory):
            logits = torch.zeros(len(words), 1, VOCAB)
            logits[..., EOS] = 2
            sure = torch.tensor(text)[state.x.clamp_max(len(text) - 1)]
            return logits.scatter(-1, sure.view(-1, 1, 1), 5.8), Kept(state.x + 1), None

    class Kept:
        def __init__(self, x):
            self.x = x

        def index_select(self, index):
            return Kept(self.x[index])

    for length_penalty in (0.0, 1.0):
        found = beam_search(Sure(), *make_source(2), beam=3, length_penalty=length_penalty).best
        assert found == [text[:-1]] * 2


def score(model, source, lengths, words, length_penalty):
    target = torch.tensor([[BOS, *words, EOS]])
    logits, _ = model(source, lengths, target[:, :-1])
    logits[..., :3] = -math.inf
    total = logits.log_softmax(-1).gather(-1, target[:, 1:, None]).sum().item()
    return total / ((5 + len(words) + 1) / 6) ** length_penalty


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0])
def test_wide_beam_finds_the_best_of_all_translations(length_penalty):
    source, lengths = torch.tensor([[4, 5, 6, 3]]), torch.tensor([4])
    best = set()
    for seed in range(4):
        model = make("bahdanau", vocab_size=7, seed=seed)
        every = [words for n in range(4) for words in itertools.product((4, 5, 6), repeat=n)]
        expected = max(every, key=lambda w: score(model, source, lengths, w, length_penalty))
        found = beam_search(
            model, source, lengths, 40, length_penalty=length_penalty, max_length=3
        ).best
        assert tuple(found[0]) == expected
        best.add(expected)
    assert len(best) > 2


class Rows(list):
    """A state or a memory of nothing."""

    words = ()

    def index_select(self, _):
        return self


class Scripted:
    """Ends at once with log P = −1, or says the word 4 and ends then, log P of both ``longer``."""

    def __init__(self, longer):
        self.ends = {BOS: -1.0, 4: longer - math.log1p(-math.exp(-1.0))}  # after a word

    def output_limit(self, lengths):
        return torch.full_like(lengths, 2)

    def encode(self, source, lengths):
        return Rows(), Rows()

    def decode(self, words, state, memory):
        logits = torch.full((len(words), 1, 5), -math.inf)
        for row, word in zip(logits[:, 0], words[:, 0].tolist()):
            row[EOS] = self.ends.get(word, -1.0)  # a hypothesis without a chance may hold any word
            row[4] = math.log1p(-math.exp(row[EOS].item()))
        return logits, state, None

    def found(self, **options):
        source = torch.tensor([[4, EOS]])
        return beam_search(self, source, torch.tensor([2]), 2, **options).best


@pytest.mark.parametrize(("longer", "wins"), [(-1.155, True), (-1.18, False)])
def test_the_length_penalty_is_gnmts(longer, wins):
    """((5 + n) / 6)^α; with 4 or 6 in the place of 5 the other translation would be the best."""
    assert Scripted(longer).found() == [[4] if wins else []]
    # twice the penalty, for which both are long enough
    assert Scripted(longer).found(length_penalty=2.0) == [[4]]
    assert Scripted(longer).found(length_penalty=0.0) == [[]]


@pytest.mark.parametrize(("longer", "wins"), [(-2.1, True), (-2.2, False)])
def test_the_end_has_no_length_bonus(longer, wins):
    """(−1 + 0) / 1 or (log P + 1) / (7 / 6); a bonus of the end would favour the shorter."""
    assert Scripted(longer).found(length_bonus=1.0) == [[4] if wins else []]


def test_searches_end_and_never_emit_special_words():
    model = make("general")
    with torch.no_grad():
        model.bias[:3] = 50  # padding, unknown and start would win
        model.bias[EOS] = -50  # the end never comes by itself
    source, lengths = make_source()
    for find in (greedy_search, partial(beam_search, beam=3)):
        found = find(model, source, lengths).best
        assert [len(words) for words in found] == (2 * lengths + 9).tolist()
        assert min(min(words) for words in found) > 3


def test_a_limit_follows_the_longest_target_or_is_given():
    source, lengths = make_source()
    for options, limit in (
        ({}, 2 * lengths + 10),
        ({"length_ratio": 0.3, "longest_target": 11}, torch.tensor([12, 11, 11, 11])),
        ({"length_ratio": 5.5}, torch.tensor([48, 15, 37, 26])),
    ):
        model = build(Config(VOCAB, embed_dim=4, hidden_dim=4, **options), "reference").eval()
        with torch.no_grad():
            model.bias[EOS] = -1e4
        assert model.output_limit(lengths).tolist() == limit.tolist()
        for find in (greedy_search, partial(beam_search, beam=3)):
            assert [len(x) + 1 for x in find(model, source, lengths).best] == limit.tolist()
            found = find(model, source, lengths, max_length=2).best
            assert [len(words) for words in found] == [2] * 4


@pytest.mark.parametrize("beam", [1, 3])
def test_what_can_never_end_ends_at_its_limit(beam):
    """With the best words so far, whether the end or no word at all may come there."""
    model = make("general")
    with torch.no_grad():
        model.bias[EOS] = -math.inf
    source, lengths = make_source()
    found = beam_search(model, source, lengths, beam).best
    assert [len(words) for words in found] == (2 * lengths + 9).tolist()
    assert min(min(words) for words in found) > EOS
    if beam == 1:
        assert found == greedy_search(model, source, lengths).best

    class OneWord:
        def score(self, words, state, memory):
            """Let word 7 come first, and nothing after it."""
            said = torch.full((len(words), VOCAB), -math.inf)
            said[words[:, 0] == BOS, 7] = 0.0
            return said, Rows()

    assert beam_search(model, source, lengths, beam, scorer=OneWord()).best == [[7]] * 4


def test_search_of_no_sentence():
    source, lengths = torch.zeros(2, 3, dtype=torch.long), torch.tensor([3, 3])
    assert len(beam_search(make(), source, lengths).best) == 2


def test_a_config_reaches_its_attention():
    def attention(kind, **options):
        return build(Config(VOCAB, kind, hidden_dim=8, **options)).decoder.attention

    assert attention("strided", stride=3, fixed_stride=True).span.fixed
    assert not attention("strided", stride=3).span.fixed
    found = attention("local", sigma=2.0, gaussian_height=3.0)
    assert (found.sigma, found.gaussian_height) == (2.0, 3.0)
    assert attention("local").sigma is None
    assert attention("predictive", window=3).span.window == (3, 3)


def test_importing_attnfast_is_cheap():
    program = (
        "import sys, attnfast; "
        "print([m for m in ('attnfast.models', 'sentencepiece', 'sacrebleu', 'matplotlib') "
        "if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "[]\n"


def make_pointer(attention="coverage", **options):
    torch.manual_seed(0)
    config = Config(VOCAB, attention, embed_dim=12, hidden_dim=9, pointer_generator=True, **options)
    model = build(config, backend="reference").eval()
    source, lengths = make_source()
    source[0], source[2, :2] = VOCAB, torch.tensor([VOCAB, VOCAB + 1])  # their own words
    return model, source, lengths


@pytest.mark.parametrize("attention", ["general", "coverage", "bahdanau"])
def test_a_pointer_generator_says_words_that_a_sentence_has(attention):
    model, source, lengths = make_pointer(attention)
    target = torch.randint(4, VOCAB + 2, (4, 6))
    expected, _ = model(source, lengths, target)
    assert expected.shape == (4, 6, VOCAB + 2)
    torch.testing.assert_close(expected.exp().sum(-1), torch.ones(4, 6))
    assert (expected[1, :, VOCAB:] < -80).all() and (expected[0, :, VOCAB] > -80).all()


def test_the_end_of_a_source_is_not_copied():
    """Its weight goes to the padding word, which no search writes."""
    model, source, lengths = make_pointer("bahdanau")
    source[0, -1] = 3
    with torch.no_grad():
        model.pointer.gate.bias.fill_(-40)  # copy always
    found = model(source, lengths, torch.randint(4, VOCAB, (4, 6)), need_weights=True)
    copied = found[0].exp()
    torch.testing.assert_close(copied[0, :, 0], found.weights[0, :, -1])
    assert (copied[..., 3] < 1e-6).all()


def test_what_the_gate_of_a_pointer_generator_reads():
    """State, context and word, or the output; there is nothing else to read."""
    for gate in COPY_GATES:
        model, source, lengths = make_pointer(copy_gate=gate)
        encoded, state = model.encode(source, lengths)
        target = torch.randint(4, VOCAB, (4, 6))
        found = model.decoder(
            model.embed(target), encoded.memory, state, need_weights=True,
            target_lengths=torch.full((4,), 6),
        )  # fmt: skip
        output, _ = found
        read = [output] if gate == "output" else [found.states, found.contexts, model.embed(target)]
        logits = output @ model.embedding.weight.T + model.bias
        expected = model.pointer(logits, found.weights, source, *read, num_oov=2)
        torch.testing.assert_close(model(source, lengths, target)[0], expected)
    pointer = PointerGenerator(13)
    with pytest.raises(ValueError, match=r"pointer must be of 48 or 12 features, got 13"):
        Seq2Seq(model.encoder, model.decoder, VOCAB, 12, pointer=pointer)


@pytest.mark.parametrize("options", [{}, LUONG])
def test_searches_say_words_that_the_vocabulary_lacks(options):
    model, source, lengths = make_pointer(**options)
    with torch.no_grad():
        model.pointer.gate.bias.fill_(-20)  # copy always
    for find in (greedy_search, partial(beam_search, beam=3)):
        found = find(model, source, lengths).best
        for words, sentence in zip(found, source.tolist()):
            assert words and set(words) <= set(sentence)
        assert any(word >= VOCAB for words in found for word in words)


@pytest.mark.parametrize("dtype", FLOATS)
def test_another_sentences_words_cannot_be_said(dtype):
    """Nor where forbidding the unknown word, almost certain, makes all others likelier."""
    logits = torch.full((1, VOCAB + 2), LOWEST, dtype=dtype)
    start, row = torch.tensor([[BOS]]), torch.tensor([0])
    constraints = Constraints(torch.tensor([9]))
    log_probs = constraints.log_probs(logits.clone(), start, row, None, 0.0)
    assert (log_probs == -math.inf).all()
    logits[0, UNK], logits[0, EOS] = math.log1p(-1e-20), -60.0
    log_probs = constraints.log_probs(logits, start, row, None, 0.0)
    assert log_probs[0, EOS] == 0
    assert log_probs.isneginf().sum() == VOCAB + 1


def test_export_of_any_batch():
    """A whole model's graph takes other numbers of sentences, words and steps."""
    torch.manual_seed(0)
    model = build(Config(30, embed_dim=8, hidden_dim=8)).eval()

    def example(B, Tk, T):
        lengths = torch.randint(1, Tk + 1, (B,))
        return torch.randint(4, 30, (B, Tk)), lengths, torch.randint(4, 30, (B, T))

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, source, lengths, target):
            return self.model(source, lengths, target)[0]

    sizes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO})
    graph = torch.export.export(
        Logits(), example(2, 5, 4), dynamic_shapes=(*sizes, sizes[0])
    ).module()
    for other in ((3, 5, 4), (2, 9, 4), (2, 5, 7)):
        x = example(*other)
        torch.testing.assert_close(graph(*x), model(*x)[0])


# Decoders of several layers


def make_stack(attention="bahdanau", backend=None, **options):
    torch.manual_seed(0)
    config = Config(VOCAB, attention, embed_dim=12, hidden_dim=9, decoder_layers=3, **options)
    model = build(config, backend).eval()
    with torch.no_grad():
        model.embedding.weight.mul_(4)
    source, lengths = make_source()
    return model, source, lengths, torch.randint(4, VOCAB, (4, 6))


def test_another_attention_can_be_assigned():
    model = make("general", cell="lstm")
    attention = BahdanauAttention(18, 18, 5)
    model.decoder.attention = attention
    assert model.decoder.rnn.attention is model.decoder.attention is attention
    assert [name for name, x in model.decoder.named_modules() if x is attention] == [
        "rnn.attention"
    ]
    state = model.decoder.initial(torch.randn(2, 18))
    assert state.cell.shape == (1, 2, 18) and not state.cell.any()


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_a_stack_whose_first_layer_attends_by_hand(recurrence, cell):
    """The layers above read its context too; input feeding has no such stack."""
    if recurrence == "input_feeding":
        with pytest.raises(ValueError, match="query_layer must be last with input feeding"):
            make_stack(recurrence=recurrence, query_layer="first", cell=cell)
        return
    options = {"recurrence": recurrence, "query_layer": "first", "cell": cell}
    model, source, lengths, target = make_stack(**options)
    decoder, words = model.decoder, model.embed(target)
    encoded, start = model.encode(source, lengths)
    assert start.hidden.shape == (3, 4, 18)
    found = decoder(words, encoded.memory, start)
    read, kind = words, getattr(torch.nn, cell.upper())
    for i in range(3):
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        parameters = {f"{x}_l0": getattr(decoder.rnn, f"{x}_l{i}") for x in names}
        rnn = kind(parameters["weight_ih_l0"].shape[1], 18, batch_first=True)
        rnn.load_state_dict(parameters)
        hx = start.hidden[i : i + 1]
        hx = (hx, torch.zeros_like(hx)) if cell == "lstm" else hx
        states, contexts, context = [], [], torch.zeros(4, 1, 18)
        for word in read.split(1, 1):
            if i == 0 and recurrence == "attend_first":
                query = (hx[0] if cell == "lstm" else hx)[-1]
                context = decoder.attention(query, encoded.memory)[0].unsqueeze(1)
            fed = [context] if i == 0 and recurrence != "independent" else []
            state, hx = rnn(torch.cat([word, *fed], -1), hx)
            if i == 0 and recurrence != "attend_first":
                context = decoder.attention(state, encoded.memory)[0]
            states.append(state)
            contexts.append(context)
        if i == 0:
            of_first = torch.cat(contexts, 1)
        read = torch.cat([*states], 1)
        last, read = read, torch.cat([read, of_first], -1)
    torch.testing.assert_close(found.states, last)
    torch.testing.assert_close(found.contexts, of_first)


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize(
    ("attention", "options"), [("bahdanau", {}), ("local", LUONG), ("coverage", LUONG)]
)
def test_a_stack_of_decoder_layers_steps_and_searches(attention, options, cell, backend):
    model, source, lengths, target = make_stack(attention, backend, cell=cell, **options)
    expected, _ = model(source, lengths, target)
    memory, state = model.encode(source, lengths)
    for t, word in enumerate(target.split(1, 1)):
        logits, state, _ = model.decode(word, state, memory)
        torch.testing.assert_close(logits[:, 0], expected[:, t])
    greedy = greedy_search(model, source, lengths).best
    assert greedy == beam_search(model, source, lengths, beam=1, length_bonus=1e-30).best
    together = beam_search(model, source, lengths, beam=3).best
    assert together == [
        beam_search(model, source[i : i + 1, :n], lengths[i : i + 1], beam=3).best[0]
        for i, n in enumerate(lengths.tolist())
    ]
    model.train()
    logits, loss = model(source, lengths, target)
    (logits.logsumexp(-1).sum() + (0 if loss is None else loss.sum())).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("query_layer", ["first", "last"])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_states_between_decoder_layers_are_dropped_in_training(recurrence, query_layer):
    """Not those of the last layer: a decoder of one layer drops nothing."""
    for layers, drops in ((3, True), (1, False)):
        if (recurrence, query_layer, layers) == ("input_feeding", "first", 3):
            continue
        torch.manual_seed(0)
        config = Config(
            VOCAB, "general", recurrence, query_layer=query_layer if drops else "last",
            embed_dim=12, hidden_dim=9, dropout=0.5, decoder_layers=layers,
        )  # fmt: skip
        model = build(config).eval()
        encoded, state = model.encode(*make_source())
        words = torch.randn(4, 6, 12)

        def run(model=model, state=state, memory=encoded.memory, words=words):
            return model.decoder(words, memory, state)[0]

        plain = run()
        assert torch.equal(plain, run())
        model.train()
        assert torch.equal(run(), plain) is not drops
        assert torch.equal(run(), run()) is not drops


def test_a_state_of_another_number_of_layers_is_refused():
    model, source, lengths, target = make_stack()
    memory, state = model.encode(source, lengths)
    for wrong in (state.hidden[0], state.hidden[:2]):
        with pytest.raises(ValueError, match=r"state.hidden must be .*\[3, (4|B), 18\]"):
            model.decode(target, state._replace(hidden=wrong), memory)
        with pytest.raises(ValueError, match=r"hx.hidden must be \[3, 4, 18\]"):
            model.decoder(model.embed(target), memory.memory, state._replace(hidden=wrong))


#: A value of each setting that changes an attention.
CHANGES = {
    "attention_temperature": 2.0, "gated": True, "hard": True, "attention_top_k": 2, "hops": 3,
    "heads": 3, "score": "dot", "slope": 0.5, "sigma": 2.0, "num_filters": 3, "filter_width": 3,
    "filter_channels": "both", "pointer_generator": True, "attention_penalty": 0.5,
    "fertility": 3.0, "fixed_stride": True,
}  # fmt: skip


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_with_every_setting(attention):
    """Each steps as it runs in one call, searches and has gradients; each setting has an effect."""
    changes = [{}, *({x: y} for x, y in CHANGES.items() if attention in USED_BY[x])]
    changes += [{"hard": True, "gated": True}] * (attention in USED_BY["hard"])
    first = {"num_filters": 4} if attention == "forward" else {}  # none by itself
    source, lengths = make_source()
    target, plain = torch.randint(4, VOCAB, (4, 6)), None
    for more in changes:
        torch.manual_seed(0)
        sizes = {"embed_dim": 12, "hidden_dim": 12, "window": 2, "stride": 2}
        more = {**first, **more}
        model = build(Config(VOCAB, attention, **sizes, **more)).eval()
        expected = model(source, lengths, target, need_weights=attention not in NO_ATTENTION)
        assert plain is None or not torch.equal(expected[0], plain), more
        plain = expected[0] if plain is None else plain
        memory, state = model.encode(source, lengths)
        for t, word in enumerate(target.split(1, 1)):
            logits, state, _ = model.decode(word, state, memory)
            torch.testing.assert_close(logits[:, 0], expected[0][:, t])
        weighted = {"need_weights": True} if attention not in NO_ATTENTION else {}
        found = beam_search(model, source, lengths, beam=2, **weighted)
        if weighted and attention != "predictive" and not more.get("attention_temperature"):
            sums = found.weights[:, 0, 0].sum(-1)
            torch.testing.assert_close(sums, torch.ones(4))
        model.train()
        made = model(source, lengths, target)
        made[0].logsumexp(-1).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_an_encoder_of_one_direction_with_residuals(cell):
    torch.manual_seed(0)
    encoder = Encoder(6, 5, cell, layers=3, bidirectional=False, residual=True)
    x, lengths = torch.randn(3, 7, 6), torch.tensor([7, 1, 4])
    states = encoder(x, lengths)
    for i, n in enumerate(lengths.tolist()):
        y = encoder.layers[0](x[i : i + 1, :n])[0]
        for layer in encoder.layers[1:]:
            y = y + layer(y)[0]
        torch.testing.assert_close(states[i, :n], y[0])
        assert not states[i, n:].any()
    context = FixedContext(bidirectional=False).prepare(states, lengths).value
    torch.testing.assert_close(context[:, 0], states[range(3), lengths - 1])
    config = Config(VOCAB, "none", unidirectional=True, cell=cell, embed_dim=12, hidden_dim=9)
    model = build(config).eval()
    source, lengths = make_source()
    last = model.encoder(model.embed(source), lengths)[range(4), lengths - 1]
    _, state = model.encode(source, lengths)
    torch.testing.assert_close(state.hidden[0], torch.tanh(model.bridge(last)))


@pytest.mark.parametrize("positions", POSITIONS)
def test_positions_of_a_transformer_encoder(positions):
    """A sentence in another order has other states, with each kind of position."""
    torch.manual_seed(0)
    encoder = TransformerEncoder(6, 4, layers=2, positions=positions, max_distance=9).eval()
    for name, x in encoder.named_parameters():
        if "positions" in name:
            torch.nn.init.normal_(x)
    x = torch.randn(1, 5, 6)
    states, other = encoder(x, torch.tensor([5])), encoder(x.flip(1), torch.tensor([5]))
    assert not torch.allclose(states, other.flip(1), atol=1e-3)
