"""Speech: reading recordings, log-mel features, normalisation, masking, and word errors.

Plain PyTorch and the standard library. Samples are numbers from −1 to 1, times are in seconds,
frequencies in hertz. An argument that does not fit raises ValueError or TypeError, and the message
names it.
"""

from __future__ import annotations

import io
import lzma
import tarfile
import wave
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnfast._utils.checks import (
    InputError,
    check_array,
    check_device,
    check_int,
    check_number,
    check_numbers,
    check_tensor,
    describe,
    first_line,
    is_finite,
    raise_type_error,
    raise_value_error,
    reason,
)
from attnfast._utils.module import Module
from attnfast._utils.representation import repr_fields
from attnfast.models._checks import check_lengths
from attnfast.nn.attention import check_sizes
from attnfast.ops.arguments import length_mask
from attnfast.ops.backends import HALF
from attnfast.ops.operators import accumulation_dtype

__all__ = [
    "FeatureNormalizer",
    "LogMel",
    "SpecAugment",
    "WordErrors",
    "mel_filters",
    "read_recordings",
    "read_wav",
    "word_errors",
]

#: Smaller energies are replaced by this before the logarithm.
SMALLEST = 1e-10
#: The length that a header may state, or exceed, if it was written before the length was known.
STREAMED = 2**31 - 2**16


def read_wav(content: bytes, rate: int, name: str = "recording") -> Tensor:
    """Return the samples ``[n]``, float32 from −1 to 1, of a WAV file of one channel and 16 bits.

    Args:
        content: the file's bytes.
        rate: the required number of samples a second.
        name: name of the recording in error messages.

    Raises:
        InputError: it is not such a file, has another rate, or is empty.

    Example:
        >>> import io, wave
        >>> content = io.BytesIO()
        >>> with wave.open(content, "wb") as file:
        ...     file.setparams((1, 2, 8000, 0, "NONE", ""))
        ...     file.writeframes(bytes(1600))  # 800 samples of silence
        >>> attnfast.speech.read_wav(content.getvalue(), rate=8000).shape
        torch.Size([800])
    """
    try:
        with wave.open(io.BytesIO(content)) as file:
            kind = file.getnchannels(), 8 * file.getsampwidth(), file.getframerate()
            size = file.getnframes() * file.getnchannels() * file.getsampwidth()
            frames = file.readframes(file.getnframes())
            if len(frames) < size < STREAMED or len(frames) % file.getsampwidth():
                raise EOFError
    except (EOFError, RuntimeError, wave.Error) as error:
        detail = str(error) or "it ends too early"
        raise InputError(f"{name}: expected a WAV file, got another: {detail}") from error
    if kind != (1, 16, rate):
        got = "{} of {} bits at {} Hz".format(*kind)
        raise InputError(f"{name}: expected 1 channel of 16 bits at {rate} Hz, got {got}")
    if not frames:
        raise InputError(f"{name}: expected samples, got an empty recording")
    samples = torch.frombuffer(bytearray(frames), dtype=torch.int16)
    return samples.float() / 2**15


def _is_recording(name: str) -> bool:
    """Return whether a file's name is a recording's; macOS stores metadata in ``._x.wav``."""
    return name.endswith((".wav", ".WAV")) and not name.startswith("._")


def _contents(path: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield path, name and content of a WAV file, or of every WAV file in an archive."""
    try:
        if _is_recording(path.name):
            yield str(path), path.stem, path.read_bytes()
        elif path.name.endswith(".tar.gz"):
            with tarfile.open(path) as archive:
                for member in archive:
                    inside = Path(member.name)
                    if member.isfile() and _is_recording(inside.name):
                        content = archive.extractfile(member).read()  # type: ignore[union-attr]
                        yield f"{path}: {member.name}", inside.stem, content
                while archive.fileobj.read(2**20):  # type: ignore[union-attr]
                    pass  # the checksum at its end is verified when it is read
    except (EOFError, OSError, ValueError, lzma.LZMAError, tarfile.TarError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(f"cannot read {path}: {reason(error)}") from error
        detail = first_line(error)
        raise InputError(f"{path}: expected an archive, got a broken one ({detail})") from error


def read_recordings(folder: str | Path, rate: int) -> dict[str, Tensor]:
    """Return the samples of every WAV file of a folder, and of the archives ``*.tar.gz`` in it.

    Names are those of the files, without folder and ``.wav``, in alphabetical order.

    Raises:
        InputError: as :func:`read_wav`; or the folder or an archive cannot be read, it has no
            recordings, or two of one name.

    Example:
        >>> import tempfile, wave
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with wave.open(f"{folder}/seven.wav", "wb") as file:
        ...         file.setparams((1, 2, 8000, 0, "NONE", ""))
        ...         file.writeframes(bytes(1600))
        ...     recordings = attnfast.speech.read_recordings(folder, rate=8000)
        >>> recordings["seven"].shape
        torch.Size([800])
    """
    folder, found, places = Path(folder), dict[str, Tensor](), dict[str, str]()
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise InputError(f"cannot read {folder}: {reason(error)}") from error
    for path in paths:
        for place, name, content in _contents(path):
            if name in found:
                raise InputError(f"{place}: expected a name of its own, got that of {places[name]}")
            found[name], places[name] = read_wav(content, rate, place), place
    if not found:
        raise InputError(f"{folder}: expected recordings, *.wav or in a *.tar.gz, got none")
    return dict(sorted(found.items()))


def mel_filters(mels: int, fft: int, rate: int) -> Tensor:
    r"""Return the triangles H ``[mels, fft // 2 + 1]`` of :class:`LogMel`, float32.

    Their corners :math:`f_0, …, f_{M+1}` stand at equal distances from 0 to half the rate on the
    mel scale, :math:`m(f) = 2595 \log_{10}(1 + f / 700)`:

    .. math:: H_{mk} = \max\left(0, \min\left(\frac{f_k - f_{m-1}}{f_m - f_{m-1}},
              \frac{f_{m+1} - f_k}{f_{m+1} - f_m}\right)\right), \quad f_k = k \cdot rate / fft

    Raises:
        ValueError: a size is not an integer of at least 1, or a triangle contains no frequency
            because there are too many.

    Example:
        >>> attnfast.speech.mel_filters(mels=8, fft=512, rate=16000).shape
        torch.Size([8, 257])
    """
    check_sizes(mels=mels, fft=fft, rate=rate)
    top = 2595 * torch.tensor(1 + rate / 1400, dtype=torch.float64).log10()
    corners = 700 * (10 ** (torch.linspace(0, 1, mels + 2, dtype=torch.float64) * top / 2595) - 1)
    low, middle, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    f = torch.arange(fft // 2 + 1, dtype=torch.float64) * rate / fft
    filters = torch.minimum((f - low) / (middle - low), (high - f) / (high - middle)).clamp_min(0)
    if not filters.sum(-1).all():
        raise_value_error(
            "mels", f"fewer for {fft} samples at {rate} Hz: some see no frequency", mels
        )
    return filters.float()


class LogMel(Module):
    r"""Log-mel features of recordings.

    .. math:: |X_{tk}| = \left|\sum_{n < N} w_n x_{ts + n} e^{-2 \pi i k n / F}\right|, \quad
              y_{tm} = \ln \max\left(10^{-10}, \textstyle\sum_k H_{mk} |X_{tk}|^2\right)

    w is Hann's window of N samples, s the hop, F the smallest power of two of at least N, and H are
    the triangles of :func:`mel_filters`; w and H are rounded to float32. A frame reads only its N
    samples, so that n samples have 1 + ⌊(n − N) / s⌋ frames, independently of the batch.

    Args:
        rate: samples a second.
        mels: M, features.
        window, hop: of a frame and between two, in seconds.

    Paper: Davis and Mermelstein, "Comparison of Parametric Representations for Monosyllabic Word
    Recognition", IEEE TASSP 28(4), 1980; they go on to a cosine transform.

    Example:
        >>> log_mel = attnfast.speech.LogMel(rate=8000, mels=40)
        >>> features, lengths = log_mel(torch.randn(2, 8000), torch.tensor([8000, 8000]))
        >>> features.shape, lengths
        (torch.Size([2, 98, 40]), tensor([98, 98]))
    """

    window: Tensor
    filters: Tensor

    def __init__(self, rate: int = 16000, mels: int = 80, window: float = 0.025, hop: float = 0.01):
        super().__init__()
        check_sizes(rate=rate, mels=mels)
        for name, x in (("window", window), ("hop", hop)):
            if not is_finite(x) or not is_finite(x * rate) or round(x * rate) < 1:
                raise_value_error(name, "seconds, of a sample at least", describe(x))
        self.mels = mels
        self.rate, self.samples, self.hop = rate, round(window * rate), round(hop * rate)
        self.fft = 1 << (self.samples - 1).bit_length()
        weights = torch.hann_window(self.samples, dtype=torch.float32)
        self.register_buffer("window", weights, persistent=False)
        filters = mel_filters(mels, self.fft, rate)
        self.register_buffer("filters", filters, persistent=False)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return repr_fields(self, ("rate", "mels", "samples", "hop"))

    def forward(self, samples: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return features ``[B, T, M]``, 0 in padding, and their lengths ``[B]``.

        Args:
            samples: ``[B, n]``, float32 or float64.
            lengths: ``[B]``, in samples, each at least one window.

        Raises:
            ValueError, TypeError: an argument does not fit, or a sample is not finite.
        """
        check_tensor("samples", samples)
        if samples.dim() != 2 or samples.dtype not in (torch.float32, torch.float64):
            raise_value_error("samples", "float32 or float64 [B, n]", describe(samples))
        check_device("samples", samples, self.window, "the module")
        if not samples.isfinite().all():
            raise_value_error("samples", "finite numbers", "NaN or infinity")
        if samples.shape[1] < self.samples:
            raise_value_error(
                "samples", f"at least {self.samples} for each recording", samples.shape[1]
            )
        check_lengths(lengths, samples, whose="samples")
        if len(lengths) and int(lengths.min()) < self.samples:
            raise_value_error("lengths", f"at least {self.samples}, a window", int(lengths.min()))
        if self.filters.dtype in HALF:
            raise_value_error("the module's dtype", "float32 or float64", self.filters.dtype)
        counts = 1 + (lengths - self.samples) // self.hop
        if not len(lengths):
            frames = 1 + (samples.shape[1] - self.samples) // self.hop
            return samples.new_zeros(0, frames, len(self.filters)), counts
        spare = self.fft - self.samples  # the window is centred in F samples
        spectrum = torch.stft(
            nn.functional.pad(samples, (spare // 2, spare - spare // 2)), self.fft, self.hop,
            self.samples, self.window.to(samples.dtype), center=False, return_complex=True,
        )  # fmt: skip
        energy = spectrum.abs().square().transpose(1, 2)
        features = (energy @ self.filters.to(energy.dtype).T).clamp_min(SMALLEST).log()
        return _cut(features, counts), counts


def _cut(features: Tensor, lengths: Tensor) -> Tensor:
    """Return ``features [B, T, F]`` with 0 in padding."""
    exists = length_mask(lengths, features.shape[1], features)
    return features.masked_fill(~exists.unsqueeze(-1), 0)


def _listed(name: str, x: Any) -> list[Any]:
    """Return the elements of an iterable in a list; raise if x is not iterable."""
    try:
        return list(x)
    except TypeError:
        raise_type_error(name, "an iterable", describe(x))


class FeatureNormalizer(Module):
    r"""Normalise features by mean and deviation of all recordings, or of each speaker's.

    .. math:: (x_{tm} - \mu_{sm}) / \sigma_{sm}

    Initially μ = 0 and σ = 1; :meth:`fit` computes them from recordings. They are buffers.

    Args:
        features: M.
        speakers: S; 1 for statistics of all recordings.

    Paper: Viikki and Laurila, "Cepstral domain segmental feature vector normalization for noise
    robust speech recognition", Speech Communication 25, 1998, of which this is the version for
    whole recordings, also known as CMVN.

    Example:
        >>> normalizer = attnfast.speech.FeatureNormalizer(features=40)
        >>> features, lengths = 3 + torch.randn(2, 50, 40), torch.tensor([50, 30])
        >>> normalizer.fit([x[:n] for x, n in zip(features, lengths)])
        >>> normalizer(features, lengths)[0].mean().abs().item() < 0.1
        True
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, features: int, speakers: int = 1):
        super().__init__()
        check_sizes(features=features, speakers=speakers)
        self.features, self.speakers = features, speakers
        self.register_buffer("mean", torch.zeros(speakers, features))
        self.register_buffer("deviation", torch.ones(speakers, features))

    def extra_repr(self) -> str:
        """Return the sizes."""
        return repr_fields(self, ("features", "speakers"))

    @torch.no_grad()
    def fit(self, recordings: Iterable[Tensor], speakers: Iterable[int] | None = None) -> None:
        """Compute mean and deviation over all frames of ``recordings``, each ``[T, M]``.

        Args:
            speakers: the speaker's index of each recording, below S; None means 0.

        Raises:
            ValueError, TypeError: an argument does not fit, an element is not finite, or a speaker
                has no recording.
        """
        S, M = self.mean.shape
        sums = self.mean.new_zeros(3, S, M, dtype=torch.float64)  # of 1, x and x²
        recordings = _listed("recordings", recordings)
        numbers = [0] * len(recordings) if speakers is None else _listed("speakers", speakers)
        if len(numbers) != len(recordings):
            raise_value_error(
                "speakers", f"{len(recordings)}, one of each of the recordings", len(numbers)
            )
        for x, speaker in zip(recordings, numbers):
            check_array("recordings", x, "floating-point", ("T", M))
            if not x.isfinite().all():
                raise_value_error("recordings", "finite numbers", "NaN or infinity")
            check_int("speakers", speaker, 0)
            if speaker >= S:
                raise_value_error("speakers", f"below {S}", speaker)
            x = x.double()
            sums[:, speaker] += torch.stack([torch.ones_like(x).sum(0), x.sum(0), (x * x).sum(0)])
        count, first, second = sums
        if not count.all():
            raise_value_error(
                "recordings", "one at least of every speaker", f"{len(recordings)} in all"
            )
        mean = first / count
        self.mean.copy_(mean)
        self.deviation.copy_((second / count - mean.square()).clamp_min(SMALLEST).sqrt())

    def forward(self, features: Tensor, lengths: Tensor, speaker: Tensor | None = None) -> Tensor:
        """Return ``features [B, T, M]`` normalised, 0 in padding; ``speaker [B]``, None for 0.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_array("features", features, "floating-point", ("B", "T", self.mean.shape[-1]))
        check_device("features", features, self.mean, "the module")
        check_lengths(lengths, features, 0, whose="features")
        number = torch.zeros_like(lengths) if speaker is None else speaker
        check_numbers("speaker", number, len(lengths), 0, len(self.mean) - 1)
        number = number.to(self.mean.device)
        mean, deviation = self.mean[number].unsqueeze(1), self.deviation[number].unsqueeze(1)
        return _cut((features - mean) / deviation, lengths)


class SpecAugment(Module):
    r"""In training, replace some neighbouring features and some neighbouring frames by 0.

    A mask of features is :math:`f \sim U[0, F]` wide, one of frames
    :math:`t \sim U[0, \min(T, p\tau)]` long, τ the recording's length; their first index is uniform
    too. After a :class:`FeatureNormalizer` 0 is the mean. The paper's time warping, which according
    to the paper adds little, is omitted.

    Args:
        feature_masks, feature_width: number of masks, and F.
        frame_masks, frame_width: number of masks, and T.
        share: p.

    Paper: Park et al., "SpecAugment", Interspeech 2019, arXiv:1904.08779.

    Example:
        >>> augment = attnfast.speech.SpecAugment(feature_width=4).train()
        >>> augment(torch.ones(2, 50, 40), torch.tensor([50, 30])).shape
        torch.Size([2, 50, 40])
    """

    def __init__(
        self,
        feature_masks: int = 2,
        feature_width: int = 8,
        frame_masks: int = 2,
        frame_width: int = 20,
        share: float = 0.2,
    ):
        super().__init__()
        for name, x in (
            ("feature_masks", feature_masks), ("feature_width", feature_width),
            ("frame_masks", frame_masks), ("frame_width", frame_width),
        ):  # fmt: skip
            check_int(name, x, 0)
        check_number("share", share, 0, 1)
        self.feature_masks, self.feature_width = feature_masks, feature_width
        self.frame_masks, self.frame_width, self.share = frame_masks, frame_width, share

    def extra_repr(self) -> str:
        """Return the numbers and sizes of masks."""
        return repr_fields(
            self, ("feature_masks", "feature_width", "frame_masks", "frame_width", "share")
        )

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Return ``features [B, T, M]``, with ``lengths [B]`` frames, masked.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_array("features", features, "floating-point", ("B", "T", "M"))
        check_lengths(lengths, features, 0, whose="features")
        if not self.training:
            return features
        B, T, M = features.shape
        n = lengths.to(features.device).unsqueeze(1)  # [B, 1]
        dtype = accumulation_dtype(features.dtype)
        longest = (self.share * n.to(dtype)).clamp_max(self.frame_width)
        hidden = torch.zeros(B, T, M, dtype=torch.bool, device=features.device)
        for count, most, total, size, axis in (
            (self.feature_masks, torch.full_like(n, min(self.feature_width, M)), M, M, 1),
            (self.frame_masks, longest, n, T, 2),
        ):
            drawn = torch.rand(2, B, count, dtype=dtype, device=features.device)
            width = (drawn[0] * (most.floor() + 1)).floor()  # an integer from 0 to the most
            begin = (drawn[1] * (total - width + 1)).floor()
            place = torch.arange(size, device=features.device).view(-1, 1, 1)
            inside = ((place >= begin) & (place < begin + width)).any(-1).T  # [B, size]
            hidden |= inside.unsqueeze(axis)
        return features.masked_fill(hidden, 0)


class WordErrors(NamedTuple):
    """Word errors against a reference; they add up over texts with ``+``.

    Attributes:
        substitutions: words of the reference replaced by others.
        deletions: words of the reference that are missing.
        insertions: words that the reference does not have.
        words: words of the reference.

    Example:
        >>> from attnfast.speech import word_errors
        >>> errors = word_errors(["the", "cat"], ["a", "cat"]) + word_errors(["no"], ["oh", "no"])
        >>> errors.words, round(errors.rate, 2)  # of both sentences
        (3, 0.67)
    """

    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    words: int = 0

    def __add__(self, other: object) -> WordErrors:  # type: ignore[override]
        """Return the errors of both texts together."""
        if not isinstance(other, WordErrors):
            return NotImplemented
        return WordErrors(*map(sum, zip(self, other)))

    @property
    def rate(self) -> float:
        """The word error rate, (S + D + I) / N; NaN without words."""
        return sum(self[:3]) / self.words if self.words else float("nan")


def word_errors(reference: Sequence[str], hypothesis: Sequence[str]) -> WordErrors:
    r"""Count the fewest substitutions, deletions and insertions that turn one text into the other.

    .. math:: d_{ij} = \min(d_{i-1,j-1} + [r_i \ne h_j],\; d_{i-1,j} + 1,\; d_{i,j-1} + 1), \quad
              \mathrm{WER} = d_{NM} / N

    with N words r of the reference and M words h of the hypothesis.

    Among several ways with equally few errors it takes one with the most substitutions.

    Raises:
        TypeError: a text is not a sequence of strings.

    Paper: Levenshtein, "Binary codes capable of correcting deletions, insertions and reversals",
    Soviet Physics Doklady 10(8), 1966.

    Example:
        >>> attnfast.speech.word_errors("the cat sat".split(), "the bat".split())
        WordErrors(substitutions=1, deletions=1, insertions=0, words=3)
    """
    for name, x in (("reference", reference), ("hypothesis", hypothesis)):
        if not isinstance(x, Sequence) or not all(isinstance(word, str) for word in x):
            raise_type_error(name, "a sequence of words", describe(x))
    # errors of the words so far against every beginning of the hypothesis: total, then S, D, I
    row = [(j, 0, 0, j) for j in range(len(hypothesis) + 1)]
    for i, word in enumerate(reference, 1):
        above, row = row, [(i, 0, i, 0)]
        for j, other in enumerate(hypothesis, 1):
            ways = [(above[j - 1], (int(word != other), 0, 0)), (above[j], (0, 1, 0)),
                    (row[j - 1], (0, 0, 1))]  # fmt: skip
            row.append(min(
                ((t + sum(e), s + e[0], d + e[1], n + e[2]) for (t, s, d, n), e in ways),
                key=lambda x: (x[0], -x[1]),
            ))  # fmt: skip
    return WordErrors(*row[-1][1:], len(reference))
