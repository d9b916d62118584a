"""Features of words: a convolution over their characters; highway layers."""

from __future__ import annotations

from torch import Tensor, nn

from attnfast._utils.checks import check_array, check_like
from attnfast._utils.module import Module
from attnfast.models._checks import PAD, check_characters, check_share
from attnfast.nn.attention import check_sizes

#: Initial bias of the gates of highway layers: they first pass on most of their input.
GATE_BIAS = -1.0


class CharacterCNN(Module):
    r"""A convolution over the characters of each word, and its maximum over all positions.

    .. math:: y = \max_{1 \le i \le n} \mathrm{relu}\left(b + \sum_{j=1}^k
              W_j\, E\, c_{i + j - 1 - \lfloor k / 2 \rfloor}\right)

    The maximum is taken of each feature separately, over the n characters of the word. Characters
    outside the word are vectors of zeros; a word without characters has features of 0.

    Args:
        num_characters: size of the alphabet, with padding; 0 is padding.
        embed_dim: features of a character.
        output_dim: F, features of a word.
        kernel_size: k, the number of characters of a window.
        dropout: on the embedded characters.

    Papers: Kim, "Convolutional Neural Networks for Sentence Classification", EMNLP 2014,
    arXiv:1408.5882, over words; Seo et al., ICLR 2017, arXiv:1611.01603, over characters.

    Example:
        >>> cnn = attnfast.models.CharacterCNN(num_characters=30, embed_dim=4, output_dim=6)
        >>> characters = torch.tensor([[[3, 1, 20], [1, 14, 0], [0, 0, 0]]])  # "cat", "an", padding
        >>> cnn(characters).shape
        torch.Size([1, 3, 6])
    """

    def __init__(
        self,
        num_characters: int,
        embed_dim: int,
        output_dim: int,
        kernel_size: int = 5,
        dropout: float = 0.0,
    ):
        super().__init__()
        check_sizes(
            num_characters=num_characters, embed_dim=embed_dim, output_dim=output_dim,
            kernel_size=kernel_size,
        )  # fmt: skip
        check_share("dropout", dropout)
        self.output_dim = int(output_dim)
        self.embedding = nn.Embedding(num_characters, embed_dim, padding_idx=PAD)
        self.conv = nn.Conv1d(embed_dim, output_dim, kernel_size, padding=kernel_size // 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, characters: Tensor) -> Tensor:
        """Return ``[B, T, F]``, the features of T words in each sequence.

        Args:
            characters: ``[B, T, L]``, int64 or int32, the characters of each word; a shorter word
                is padded with 0 at its end.

        Raises:
            ValueError, TypeError: ``characters`` are not ids of the alphabet ``[B, T, L]`` with L
                at least 1.
        """
        check_characters("characters", characters, ("B", "T", "L"), self.embedding)
        words = characters.flatten(0, 1)
        embedded = self.dropout(self.embedding(words)).mT
        windows = self.conv(embedded)[..., : words.shape[1]].relu()  # an even kernel has one more
        features = (windows * (words != PAD).unsqueeze(1)).amax(-1)
        return features.unflatten(0, characters.shape[:2])


class HighwayNetwork(Module):
    r"""Layers that gate each feature between a transformation of their input and the input.

    .. math:: t = \sigma(W_t x + b_t), \quad
              y = t \circ \mathrm{relu}(W_h x + b_h) + (1 - t) \circ x

    The gate's bias :math:`b_t` starts at −1, so that a layer first passes on most of its input.

    Args:
        dim: features of the input and of the output.
        layers: number of layers.

    Paper: Srivastava, Greff and Schmidhuber, "Highway Networks", 2015, arXiv:1505.00387.

    Example:
        >>> highway = attnfast.models.HighwayNetwork(dim=8, layers=2)
        >>> highway(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, dim: int, layers: int = 2):
        super().__init__()
        check_sizes(dim=dim, layers=layers)
        self.dim = int(dim)
        self.transforms = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        gates = [nn.Linear(dim, dim) for _ in range(layers)]
        for gate in gates:
            nn.init.constant_(gate.bias, GATE_BIAS)
        self.gates = nn.ModuleList(gates)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last layer, of the shape of ``x [B, T, dim]``.

        Raises:
            ValueError, TypeError: ``x`` does not fit the module.
        """
        check_array("x", x, "floating-point", ("B", "T", self.dim))
        check_like("x", x, next(self.parameters()))
        for transform, gate in zip(self.transforms, self.gates):
            x = x + gate(x).sigmoid() * (transform(x).relu() - x)
        return x
