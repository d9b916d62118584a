"""Speech: features against sums by hand, the pyramid and the decoder against loops, CTC in the
search against all paths."""

import io
import itertools
import math
import struct
import tarfile
import warnings
import wave

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnfast import speech
from attnfast._utils.checks import InputError
from attnfast.analysis import diagnostics, plots
from attnfast.decoding import beam_search
from attnfast.models import (
    BOS,
    EOS,
    CTCPrefixScorer,
    EncodedSpeech,
    FixedContext,
    LASOutput,
    ListenAttendSpell,
    PyramidEncoder,
    hybrid_loss,
    scheduled_sampling,
    sequence_loss,
)
from attnfast.models.las import BLANK, join_frames
from attnfast.nn import (
    BahdanauAttention,
    ForwardAttention,
    LocalAttention,
    LocationAwareAttention,
    LuongAttention,
)

RATE = 8000
#: For texts that do not fit into the one state of a recording.
UNFIT = pytest.mark.filterwarnings("ignore:texts with more labels")


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---- recordings ---------------------------------------------------------------------------------


def wav(samples, rate=RATE, channels=1, width=2):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(b"".join(int(x).to_bytes(width, "little", signed=True) for x in samples))
    return file.getvalue()


def test_samples_are_those_written():
    got = speech.read_wav(wav([0, 1, -1, 2**15 - 1, -(2**15)]), RATE)
    assert got.dtype == torch.float32
    assert (got * 2**15).tolist() == [0, 1, -1, 2**15 - 1, -(2**15)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (wav([1], rate=16000), "x: expected 1 channel of 16 bits at 8000 Hz, got 1 of 16 bits at"),
        (wav([1, 1], channels=2), "got 2 of 16 bits at 8000 Hz"),
        (wav([1], width=3), "got 1 of 24 bits at 8000 Hz"),
        (wav([]), "x: expected samples, got an empty recording"),
        (b"RIFF", "x: expected a WAV file, got another: it ends too early"),
        (b"no recording at all", "x: expected a WAV file, got another: file does not start"),
    ],
)
def test_what_is_no_recording(content, said):
    with pytest.raises(InputError, match=said) as error:
        speech.read_wav(content, RATE, "x")
    assert "\n" not in str(error.value)


def chunks(*parts, size=None):
    """A WAV file of chunks, by name, content and a length that may be wrong."""
    body = b"".join(name + struct.pack("<I", n) + content for name, content, n in parts)
    form = b"fmt " + struct.pack("<IHHIIHH", 16, 1, 1, RATE, 2 * RATE, 2, 16)
    size = 12 + len(body) if size is None else size
    return b"RIFF" + struct.pack("<I", size) + b"WAVE" + form + body


@pytest.mark.parametrize(
    "content",
    [
        wav(range(100))[:-1],
        wav(range(100))[:-50],
        chunks((b"LIST", b"abcd", 4000), (b"data", bytes(40), 40)),
        chunks((b"data", bytes(41), 2**32 - 1), size=2**32 - 1),
    ],
    ids=["in a sample", "samples", "a chunk", "a stream"],
)
def test_recordings_that_end_too_early(content):
    with pytest.raises(InputError, match=r"^x: expected a WAV file, got .*: it ends too early$"):
        speech.read_wav(content, RATE, "x")


@pytest.mark.parametrize("size", [2**32 - 1, 2**31 - 1, 2**31 - 2**12])
def test_recordings_of_unknown_length(size):
    content = chunks((b"LIST", b"abcd", 4), (b"data", bytes(40), size), size=2**32 - 1)
    assert speech.read_wav(content, RATE).tolist() == [0] * 20


def archive(path, members, mode="w:gz"):
    with tarfile.open(path, mode) as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
            else:
                member.type, member.linkname = tarfile.SYMTYPE, content
                file.addfile(member)


def test_recordings_of_an_archive(tmp_path):
    """Files that are recordings by their names; no links, nor what macOS puts beside them."""
    members = [("s/a.wav", wav([1])), ("s/._a.wav", b"of macOS"), ("b.WAV", wav([2]))]
    members += [("l.wav", "l.wav"), ("README", "gone"), ("gone.wav", "nothing")]
    archive(tmp_path / "x.tar.gz", members)
    (tmp_path / "._c.wav").write_bytes(b"of macOS")
    (tmp_path / "C.WAV").write_bytes(wav([3]))
    found = speech.read_recordings(tmp_path, RATE)
    assert {name: int(x * 2**15) for name, x in found.items()} == {"C": 3, "a": 1, "b": 2}
    (tmp_path / "y.tar.gz").write_bytes((tmp_path / "x.tar.gz").read_bytes())
    said = r"y\.tar\.gz: s/a\.wav: expected a name of its own, got that of .*x\.tar\.gz: s/a\.wav"
    with pytest.raises(InputError, match=said):
        speech.read_recordings(tmp_path, RATE)


@pytest.mark.parametrize("kind", ["gz", "xz", "bz2"])
def test_damaged_archives(tmp_path, kind):
    path = tmp_path / "x.tar.gz"
    archive(path, [(f"{i}.wav", wav(range(900))) for i in range(3)], f"w:{kind}")
    whole = path.read_bytes()
    assert list(speech.read_recordings(tmp_path, RATE)) == ["0", "1", "2"]
    middle, last = len(whole) // 2, len(whole) - 6
    damaged = [whole[:middle], whole[:last], b"", whole[:20]]
    for place in (middle, last):
        damaged.append(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"x\.tar\.gz: expected an archive, got") as error:
            speech.read_recordings(tmp_path, RATE)
        assert "\n" not in str(error.value)


def test_a_folder_without_recordings(tmp_path):
    with pytest.raises(InputError, match=r"expected recordings, .* got none"):
        speech.read_recordings(tmp_path, RATE)
    with pytest.raises(InputError, match=r"cannot read .*/none: No such file"):
        speech.read_recordings(tmp_path / "none", RATE)
    (tmp_path / "a.tar.gz").write_bytes(b"no archive")
    with pytest.raises(InputError, match=r"a\.tar\.gz: expected an archive, got a broken one"):
        speech.read_recordings(tmp_path, RATE)


# ---- features -----------------------------------------------------------------------------------


def triangle(m, mels, f):
    """The m-th triangle at a frequency, by its definition."""
    mel = lambda f: 2595 * math.log10(1 + f / 700)  # noqa: E731
    hertz = lambda m: 700 * (10 ** (m / 2595) - 1)  # noqa: E731
    low, middle, high = (hertz(mel(RATE / 2) * (m + i) / (mels + 1)) for i in range(3))
    if low <= f <= middle:
        return (f - low) / (middle - low)
    return (high - f) / (high - middle) if middle < f <= high else 0.0


def test_log_mel_by_a_direct_transform():
    mels, N, hop, fft = 20, 200, 80, 256
    x = numbers(500, seed=1, dtype=torch.float64)
    got, lengths = speech.LogMel(RATE, mels)(x[None], torch.tensor([500]))
    assert lengths.tolist() == [1 + (500 - N) // hop] == [got.shape[1]]
    n, k = torch.arange(N, dtype=torch.float64), torch.arange(fft // 2 + 1, dtype=torch.float64)
    hann = 0.5 - 0.5 * torch.cos(2 * math.pi * n / N)
    angle = 2 * math.pi * k[:, None] * n / fft
    for t in range(got.shape[1]):
        frame = hann * x[t * hop : t * hop + N]
        energy = (angle.cos() @ frame) ** 2 + (angle.sin() @ frame) ** 2
        for m in range(mels):
            height = sum(triangle(m, mels, i * RATE / fft) * float(e) for i, e in enumerate(energy))
            assert float(got[0, t, m]) == pytest.approx(math.log(height), abs=1e-5)


def test_silence_and_padding():
    mel = speech.LogMel(RATE, 40)
    x, lengths = torch.zeros(3, 1000), torch.tensor([1000, 200, 399])
    x[0] = numbers(1000)
    x[2, :399] = x[0, :399]
    x[1:, 399:] = 1e3  # padding that would be encoded
    got, counts = mel(x, lengths)
    assert counts.tolist() == [11, 1, 3]
    assert got[1, 0].tolist() == pytest.approx([math.log(1e-10)] * 40)
    torch.testing.assert_close(got[2, :3], got[0, :3])
    assert got[1, 1:].eq(0).all() and got[2, 3:].eq(0).all()


def test_features_are_of_full_types():
    with pytest.raises(ValueError, match=r"dtype must be float32 or float64, got torch\.bfloat16"):
        speech.LogMel(RATE, 40).bfloat16()(torch.zeros(1, 400), torch.tensor([400]))


def test_padding_alone_and_lengths_in_evaluation():
    norm, augment, x = speech.FeatureNormalizer(4, 2), speech.SpecAugment(), torch.zeros(2, 5, 4)
    lengths = torch.tensor([5, 0])
    assert norm(x, lengths, torch.tensor([1, 0])).eq(0).all() and augment(x, lengths).eq(0).all()
    with pytest.raises(ValueError, match="lengths must be between 0 and 5 to fit features, got 6"):
        augment.eval()(x, lengths + 1)


def test_normalised_by_speaker():
    recordings = [3 * numbers(n, 4, seed=n) + n for n in (50, 30, 20)]
    norm = speech.FeatureNormalizer(4, speakers=2)
    norm.fit(recordings, [1, 0, 1])
    x = nn.utils.rnn.pad_sequence(recordings, batch_first=True, padding_value=torch.nan)
    got = norm(x, torch.tensor([50, 30, 20]), torch.tensor([1, 0, 1]))
    assert got[1, 30:].eq(0).all()
    for of_one in (got[1, :30], torch.cat([got[0], got[2, :20]])):
        torch.testing.assert_close(of_one.mean(0), torch.zeros(4), rtol=0, atol=1e-5)
        torch.testing.assert_close(of_one.var(0, correction=0), torch.ones(4))
    norm = speech.FeatureNormalizer(4)
    torch.testing.assert_close(norm(x[:1], torch.tensor([50]))[0], recordings[0])  # as it begins
    norm.fit(recordings)
    together = torch.cat([norm(r[None], torch.tensor([len(r)]))[0] for r in recordings])
    torch.testing.assert_close(together.var(0, correction=0), torch.ones(4))


def test_masks():
    """Bands of the widths that are asked for, nothing else, and nothing at all in evaluation."""
    torch.manual_seed(0)
    B, T, M = 400, 60, 12
    lengths = torch.tensor([60, 20] * (B // 2))
    x = torch.ones(B, T, M)
    augment = speech.SpecAugment(1, 5, 1, 9, share=0.2)
    hidden = augment(x, lengths) == 0
    rows, columns = hidden.all(2), hidden.all(1)
    assert hidden.eq(rows.unsqueeze(2) | columns.unsqueeze(1)).all()
    for band, most in ((rows[::2], 9), (rows[1::2], 4), (columns, 5)):
        widths = band.sum(1)
        assert widths.unique().tolist() == list(range(most + 1))
        assert (band[:, 1:] & ~band[:, :-1]).sum(1).max() == 1  # one piece
        assert float(widths.float().mean()) == pytest.approx(most / 2, rel=0.15)
    assert rows[1::2, 20:].sum() == 0 and rows[1::2, 19].any() and columns[:, -1].any()
    assert augment.eval()(x, lengths) is x
    assert speech.SpecAugment(0, 5, 2, 0)(x, lengths).eq(1).all()


@pytest.mark.parametrize(
    ("reference", "encoded", "errors"),
    [
        ("one two three", "one two three", (0, 0, 0)),
        ("one two three", "one three", (0, 1, 0)),
        ("one two three", "one too too three", (1, 0, 1)),
        ("one two", "", (0, 2, 0)),
        ("", "one", (0, 0, 1)),
        ("a b c d", "b c d e", (0, 1, 1)),
        ("a b", "b a", (2, 0, 0)),
    ],
)
def test_word_errors(reference, encoded, errors):
    words = reference.split()
    assert speech.word_errors(words, encoded.split()) == (*errors, len(words))


def test_word_errors_add_up():
    total = sum([speech.WordErrors(1, 2, 3, 10), speech.WordErrors(words=2)], speech.WordErrors())
    assert total == (1, 2, 3, 12) and total.rate == 0.5
    assert math.isnan(speech.WordErrors().rate)


# ---- the model ----------------------------------------------------------------------------------

FEATURES, DIM, VOCAB = 5, 8, 9
LENGTHS = torch.tensor([23, 4, 14])
ATTENTIONS = {
    "none": FixedContext,
    "dot": lambda: LuongAttention(16, 16, "dot"),
    "additive": lambda: BahdanauAttention(16, 16, 7),
    "location": lambda: LocationAwareAttention(16, 16, 7, num_filters=3, width=5),
    "forward": lambda: ForwardAttention(16, 16, 7),
}


def make(attention="location", layers=2, factor=2, vocab=VOCAB, seed=0, **options):
    torch.manual_seed(seed)
    encoder = PyramidEncoder(FEATURES, DIM, layers, factor=factor, **options)
    model = ListenAttendSpell(encoder, ATTENTIONS[attention](), vocab, 16, 6)
    with torch.no_grad():  # letters far apart
        model.output.weight.mul_(6)
        model.ctc.weight.mul_(6)
    return model.eval()


@pytest.fixture
def frames():
    """Frames whose padding would spoil any sum."""
    x = numbers(3, 23, FEATURES)
    return x.masked_fill((torch.arange(23) >= LENGTHS[:, None])[..., None], torch.nan)


def test_odd_frames_are_joined_with_zeros():
    x = torch.arange(1, 11.0).view(1, 5, 2)
    got, lengths = join_frames(x, torch.tensor([5]))
    assert got.tolist() == [[[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]]]
    assert lengths.tolist() == [3]


@pytest.mark.parametrize(("factor", "layers"), [(2, 2), (1, 2), (3, 1)])
def test_pyramid_by_a_loop(frames, factor, layers):
    """Each recording alone, without padding, by PyTorch's own layers."""
    torch.manual_seed(0)
    pyramid = PyramidEncoder(FEATURES, DIM, layers, factor=factor)
    got, counts = pyramid(frames, LENGTHS)
    for i, n in enumerate(LENGTHS.tolist()):
        x = frames[i : i + 1, :n]
        for layer in pyramid.layers:
            groups = []
            for t in range(0, x.shape[1], factor):
                group = [x[:, t + j] if t + j < x.shape[1] else torch.zeros_like(x[:, 0])
                         for j in range(factor)]  # fmt: skip
                groups.append(torch.cat(group, -1))
            x = layer.layers[0](torch.stack(groups, 1))[0]
        assert counts[i] == x.shape[1]
        torch.testing.assert_close(got[i, : x.shape[1]], x[0])
        assert got[i, x.shape[1] :].eq(0).all()


def test_speller_by_hand(frames):
    """The LSTM reads letter and last context; state and new context say the next letter."""
    model = make("dot")
    words = torch.randint(EOS + 1, VOCAB, (1, 4))
    got = model(frames[:1], LENGTHS[:1], words).logits
    h, _ = model.encoder(frames[:1], LENGTHS[:1])
    decoder, s, c = model.decoder, torch.zeros(1, 16), torch.zeros(1, 16)
    cell, names = nn.LSTMCell(6 + 16, 16), ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    cell.load_state_dict({x: getattr(decoder, f"{x}_l0") for x in names})
    memory = torch.zeros(1, 16)
    for t, word in enumerate(words.unbind(1)):
        s, memory = cell(torch.cat([model.embedding(word), c], -1), (s, memory))
        c = ((h @ s[0]).softmax(-1).unsqueeze(1) @ h).squeeze(1)
        read = torch.tanh(model.readout(torch.cat([s, c], -1)))
        torch.testing.assert_close(got[:, t], model.output(read))


@UNFIT
def test_every_parameter_learns_from_the_hybrid_loss(frames):
    model = make().train()
    words = torch.randint(EOS + 1, VOCAB, (3, 3))
    start, end = torch.full((3, 1), BOS), torch.full((3, 1), EOS)
    output = model(frames, LENGTHS, torch.cat([start, words], 1))
    hybrid_loss(output, torch.cat([words, end], 1), 0.3, 0.1).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@torch.no_grad()
def test_scheduled_sampling():
    torch.manual_seed(0)
    words = torch.tensor([[BOS, 5, 6, 7], [BOS, 8, 0, 0]]).repeat(3000, 1)
    logits = torch.randn(2, 4, 9).repeat(3000, 1, 1).requires_grad_()
    assert scheduled_sampling(words, logits, 0.0) is words
    mixed = scheduled_sampling(words, logits, 0.4)
    assert torch.equal(mixed[:, 0], words[:, 0]) and torch.equal(mixed == 0, words == 0)
    assert mixed[:, 1:][words[:, 1:] > 0].min() > EOS and not mixed.requires_grad
    for row, place in ((0, 1), (0, 3), (1, 1)):
        chances = torch.zeros(9)
        chances[4:] = 0.4 * logits[row, place - 1, 4:].detach().softmax(-1)
        chances[words[row, place]] += 0.6
        found = torch.bincount(mixed[row::2, place], minlength=9) / 3000
        torch.testing.assert_close(found, chances, atol=0.03, rtol=0)


def test_hybrid_loss(frames):
    """Between the decoder's loss and that of all paths of CTC, both a letter."""
    model = make()
    words = torch.tensor([[4, 4, 5, EOS], [6, EOS, 0, 0], [7, 8, EOS, 0]])
    spelled = model(frames, LENGTHS, torch.cat([torch.full((3, 1), BOS), words[:, :-1]], 1))
    own = sequence_loss(spelled.logits, words, 0.1)
    paths = sum(
        float(text_probability(p[:n].double(), [x for x in row if x > EOS]).log().detach())
        for p, n, row in zip(spelled.frame_log_probs, spelled.lengths, words.tolist())
    )
    for weight in (0.0, 0.3, 1.0):
        wanted = (1 - weight) * own - weight * paths / 6
        torch.testing.assert_close(hybrid_loss(spelled, words, weight, 0.1), wanted.float())
    long = torch.tensor([[4] * 9 + [EOS]] * 3)  # more letters than states
    with pytest.warns(UserWarning, match="texts with more labels, .* count 0 in the CTC loss"):
        lost = hybrid_loss(spelled._replace(logits=numbers(3, 10, VOCAB)), long, 1.0)
    assert lost.detach() == 0


@pytest.mark.parametrize(("text", "fits"), [("4565", True), ("4556", False), ("45645", False)])
def test_hybrid_loss_warns_of_a_text_that_does_not_fit(text, fits):
    """Into four states: its letters, and a blank between two that are the same."""
    words = torch.tensor([[*map(int, text), EOS, 0, 0]])
    log_probs = numbers(1, 4, VOCAB).log_softmax(-1)
    spelled = LASOutput(numbers(*words.shape, VOCAB), log_probs, torch.tensor([4]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            loss = hybrid_loss(spelled, words, 1.0)
    assert len(caught) == (not fits) and bool(loss > 0) == fits
    assert all(x.filename == __file__ for x in caught)


@UNFIT
def test_hybrid_loss_of_labels_alone(frames):
    """Other ids and padding between labels are none of CTC's; nor does int32 change it."""
    spelled = make()(frames, LENGTHS, torch.full((3, 6), BOS))
    words = torch.tensor([[4, 5, 6, EOS, 0, 0]] * 3)
    wanted = hybrid_loss(spelled, words, 1.0)
    for row in ([4, 0, 5, 1, 6, EOS], [2, 4, 5, EOS, 6, 0]):
        assert hybrid_loss(spelled, torch.tensor([row] * 3), 1.0) == wanted
    assert hybrid_loss(spelled, words.int(), 0.3) == hybrid_loss(spelled, words, 0.3)


@UNFIT
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hybrid_loss_of_half_types(frames, dtype):
    """CTC's part is taken in float32, and so are the logarithms that it is of."""
    model, words = make().to(dtype), torch.tensor([[4, 5, EOS]] * 3)
    spelled = model(frames.to(dtype), LENGTHS, torch.tensor([[BOS, 4, 5]] * 3))
    assert spelled.frame_log_probs.dtype == torch.float32
    half = spelled._replace(frame_log_probs=spelled.frame_log_probs.to(dtype))
    wide = half._replace(frame_log_probs=half.frame_log_probs.float())
    assert hybrid_loss(half, words, 1.0) == hybrid_loss(wide, words, 1.0)
    assert hybrid_loss(half, words, 0.3).isfinite()


def test_no_recordings():
    none = torch.zeros(0, dtype=torch.long)
    frames, lengths = speech.LogMel(RATE, FEATURES)(torch.zeros(0, 900), none)
    assert frames.shape == (0, 9, FEATURES) and lengths.shape == (0,)
    joined, lengths = join_frames(frames, lengths)
    assert joined.shape == (0, 5, 2 * FEATURES) and lengths.shape == (0,)


def test_a_window_of_keys(frames):
    """The decoder may attend within a span; its weights are dense."""
    torch.manual_seed(0)
    local = LocalAttention(16, 16, window=1, slope=0.5)
    model = ListenAttendSpell(PyramidEncoder(FEATURES, DIM, 2), local, VOCAB, 16, 6)
    words = torch.randint(EOS + 1, VOCAB, (3, 4))
    weights = model(frames, LENGTHS, words, need_weights=True).weights
    assert (weights[0] > 0).sum(-1).tolist() == [2, 2, 3, 2]


# ---- CTC in the search --------------------------------------------------------------------------


def collapsed(path):
    return [x for x, _ in itertools.groupby(path) if x != BLANK]


def text_probability(log_p, text, prefix=False):
    """Sum over all paths of ``log_p [T, V]`` that spell the text, or begin with it."""
    T, V = log_p.shape
    total = torch.zeros((), dtype=torch.float64)
    labels = sorted({BLANK, *text}) if not prefix else range(V)
    for path in itertools.product(labels, repeat=T):
        said = collapsed(path)
        if (said[: len(text)] if prefix else said) == text:
            total = total + log_p[torch.arange(T), torch.tensor(path)].sum().exp()
    return total


def encoded(log_probs, lengths):
    return EncodedSpeech(None, log_probs, torch.tensor(lengths))


@pytest.mark.parametrize("text", [[], [4], [4, 4], [4, 5, 4], [5, 4, 4]])
def test_prefix_scores_by_all_paths(text):
    """In a batch, beside a recording whose padding would spoil the sums."""
    V, T = 6, 4
    logits = 3 * numbers(2, T + 2, V, seed=len(text), dtype=torch.float64)
    log_p = logits.log_softmax(-1)
    of = encoded(log_p, [T, T + 2])
    scorer, state, total = CTCPrefixScorer(), None, torch.zeros(2)
    for word in [BOS, *text]:
        if state is not None:
            total = total + gain[:, word]  # noqa: F821
        gain, state = scorer.score(torch.full((2, 1), word), state, of)
    p = log_p[0, :T]
    for label in (4, 5):
        wanted = float(text_probability(p, [*text, label], prefix=True).log())
        assert float(total[0] + gain[0, label]) == pytest.approx(wanted, abs=1e-5)
    wanted = float(text_probability(p, text).log())
    assert float(total[0] + gain[0, EOS]) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("mask", [-math.inf, -1e18, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("masked", [[(0, 4)], [(1, 0), (3, 0)], [(1, 4), (1, 5), (2, 0)], "all 5"])
def test_prefix_scores_with_masks_by_all_paths(mask, masked):
    """States that cannot say a label, or not a blank, beside one that says all."""
    V, T = 6, 5
    log_p = 2 * numbers(2, T, V, seed=3, dtype=torch.float64)
    for t, label in [(t, 5) for t in range(T)] if masked == "all 5" else masked:
        log_p[0, t, label] = mask
    log_p = log_p.log_softmax(-1)
    paths = list(itertools.product(range(V), repeat=T))
    sums = log_p[:, torch.arange(T), torch.tensor(paths)].sum(-1)  # [2, paths]
    texts = [collapsed(path) for path in paths]

    def probability(text, prefix):
        of = [(x[: len(text)] if prefix else x) == text for x in texts]
        return sums[:, torch.tensor(of)].logsumexp(-1).tolist()

    for text in ([], [4], [4, 4], [5, 4], [4, 5, 4]):
        scorer, state = CTCPrefixScorer(), None
        for word in [BOS, *text]:
            gain, state = scorer.score(torch.full((2, 1), word), state, encoded(log_p, [T, T]))
        assert not gain.isnan().any()
        for label in (4, 5):
            wanted = probability([*text, label], True)
            assert state.scores[:, label].tolist() == pytest.approx(wanted, rel=1e-9)
        assert state.scores[:, EOS].tolist() == pytest.approx(probability(text, False), rel=1e-9)


def test_prefix_scores_of_long_recordings():
    """What begins with a text ends there or goes on: 1,500 states, in which sums underflow."""
    V, T = 12, 1500
    logits = 5 * numbers(1, T, V, dtype=torch.float64)
    logits[..., EOS] = -1e9  # what the scores of the end stand for
    of = encoded(logits.log_softmax(-1), [T])
    scorer, state, word = CTCPrefixScorer(), None, BOS
    draw = torch.Generator().manual_seed(0)
    for _ in range(40):
        gain, state = scorer.score(torch.full((1, 1), word), state, of)
        ways = torch.cat([gain[:, 1:EOS], gain[:, EOS:]], 1)  # all but the blank
        assert float(ways.double().logsumexp(-1)) == pytest.approx(0, abs=1e-5)
        word = int(torch.randint(EOS + 1, V, (), generator=draw))


def test_prefix_scores_are_taken_in_float64():
    log_p, gains = (5 * numbers(1, 300, 8)).log_softmax(-1), []
    for of in (encoded(log_p, [300]), encoded(log_p.double(), [300])):
        scorer, state = CTCPrefixScorer(), None
        for word in (BOS, 4, 5, 5):
            gain, state = scorer.score(torch.full((1, 1), word), state, of)
        gains.append(gain)
    assert [x.dtype for x in gains] == [torch.float32, torch.float64]
    assert gains[0].equal(gains[1].float())


def test_impossible_hypotheses_stay_so():
    of = encoded(numbers(1, 2, 6).log_softmax(-1), [2])
    scorer, state = CTCPrefixScorer(), None
    for word in (BOS, 4, 4):  # two alike need a blank between them: three states
        gain, state = scorer.score(torch.full((1, 1), word), state, of)
    assert gain.eq(-math.inf).all()


def every_text(most, letters=(4, 5)):
    for count in range(most + 1):
        yield from map(list, itertools.product(letters, repeat=count))


def exhaustive(model, frames, lengths, i, weight, bonus):
    """Return the best text of all, by the scores' definition."""
    encoded, _ = model.encode(frames, lengths)
    states = int(encoded.lengths[i])
    log_p = encoded.frame_log_probs[i, :states].double()

    def score(text):
        words = torch.tensor([[BOS, *text]])
        logits = model(frames[i : i + 1], lengths[i : i + 1], words).logits[0]
        logits[:, :EOS] = -math.inf
        own = logits.log_softmax(-1)[range(len(text) + 1), [*text, EOS]].sum()
        if not weight:
            return float(own) + bonus * len(text)
        paths = -F.ctc_loss(log_p, torch.tensor(text), [states], [len(text)], reduction="sum")
        own = 0 if weight == 1 else (1 - weight) * own
        return float(own + weight * paths) + bonus * len(text)

    return max(every_text(states), key=score)


@pytest.mark.parametrize(("weight", "bonus"), [(0.0, 1.0), (0.3, 0.0), (0.3, 1.0), (1.0, 0.5)])
@torch.no_grad()
def test_a_wide_search_finds_the_best_of_all(weight, bonus):
    x, lengths, said = numbers(3, 10, FEATURES), torch.tensor([10, 7, 4]), set()
    for seed in range(3):
        model = make(layers=1, vocab=6, seed=seed)
        options = dict(scorer=CTCPrefixScorer(), scorer_weight=weight, length_bonus=bonus)
        got = beam_search(model, x, lengths, beam=70, length_penalty=0.0, **options).best
        assert got == [exhaustive(model, x, lengths, i, weight, bonus) for i in range(3)]
        said |= {tuple(text) for text in got}
    assert len(said) > 2


def test_without_its_share_a_scorer_changes_nothing(frames):
    model = make("additive")
    assert model.output_limit(LENGTHS).tolist() == [7, 2, 5]
    plain = beam_search(model, frames, LENGTHS, beam=4).best
    scored = [beam_search(model, frames, LENGTHS, 4, scorer=CTCPrefixScorer(), scorer_weight=w).best
              for w in (0.0, 0.9)]  # fmt: skip
    assert scored[0] == plain != scored[1]


def test_numbers_that_are_not(frames):
    model = make()
    with torch.no_grad():
        model.ctc.bias[4] = math.nan
    with pytest.raises(InputError, match="the model's scores must be finite numbers, got NaN"):
        beam_search(model, frames, LENGTHS, scorer=CTCPrefixScorer())


# ---- what is seen of it -------------------------------------------------------------------------


def test_monotonicity():
    rows = torch.eye(4)[torch.tensor([[0, 1, 1, 3], [3, 1, 2, 0]])]
    assert diagnostics.monotonicity(rows).tolist() == pytest.approx([1, 1 / 3])
    lengths = torch.tensor([4, 4]), torch.tensor([1, 3])
    assert diagnostics.monotonicity(rows, *lengths).tolist() == pytest.approx([1, 1 / 2])
    heads = diagnostics.monotonicity(rows.unsqueeze(1), *lengths)
    assert heads.tolist() == [[1.0], [0.5]]


def test_picture():
    pytest.importorskip("matplotlib")
    drawn = plots.draw_listening(numbers(30, 8), torch.rand(3, 7), ["a", " ", "b"], 0.01)
    assert drawn.startswith(b"\x89PNG")
