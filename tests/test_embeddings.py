"""Character CNNs and highway networks against loops over words, characters and features."""

import pytest
import torch

from attnfast.models import CharacterCNN, HighwayNetwork

ALPHABET, E, F = 7, 3, 4
WORDS = [[[1, 2, 3, 4, 5, 6], [3]], [[6, 6], []], [[5, 1, 2], [4, 3, 2, 1]]]  # without padding


def pad(words, length):
    return torch.tensor([[word + [0] * (length - len(word)) for word in text] for text in words])


def convolve(cnn, word):
    """Return the features of one word: each the largest of its windows around a character."""
    k, weight, bias = cnn.conv.kernel_size[0], cnn.conv.weight, cnn.conv.bias
    features = []
    for f in range(F):
        windows = [torch.zeros((), dtype=torch.float64)]
        for i in range(len(word)):
            total = bias[f]
            for j in range(k):
                at = i + j - k // 2
                if 0 <= at < len(word):
                    total = total + sum(
                        weight[f, e, j] * cnn.embedding.weight[word[at], e] for e in range(E)
                    )
            windows.append(total)
        features.append(torch.stack(windows).amax())
    return torch.stack(features)


def pass_highway(highway, x):
    """Return the output for one vector, feature by feature."""
    for transform, gate in zip(highway.transforms, highway.gates):
        outputs = []
        for i, own in enumerate(x):
            h = (transform.weight[i] @ x + transform.bias[i]).clamp_min(0)
            t = 1 / (1 + (-(gate.weight[i] @ x) - gate.bias[i]).exp())
            outputs.append(t * h + (1 - t) * own)
        x = torch.stack(outputs)
    return x


@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4, 5, 9])
def test_characters(kernel_size):
    torch.manual_seed(0)
    cnn = CharacterCNN(ALPHABET, E, F, kernel_size).double()
    torch.nn.init.normal_(cnn.conv.bias)
    got = cnn(pad(WORDS, 6))
    want = torch.stack([torch.stack([convolve(cnn, word) for word in text]) for text in WORDS])
    assert got.shape == (3, 2, F) and not got[1, 1].any() and (got[0] > 0).any()
    torch.testing.assert_close(got, want)
    noise = torch.randn_like(want)
    leaves = [*cnn.parameters()]
    torch.testing.assert_close(
        *(torch.autograd.grad((x * noise).sum(), leaves) for x in (got, want))
    )
    for length in (7, 20):  # more padding, and characters as int32
        torch.testing.assert_close(cnn(pad(WORDS, length).int()), got)


def test_a_maximum_is_over_the_characters_of_the_word():
    """With a positive bias a window of padding alone would have the largest features."""
    cnn = CharacterCNN(ALPHABET, E, F, 3)
    with torch.no_grad():
        cnn.conv.weight.fill_(-1)
        cnn.embedding.weight[1:].fill_(1)
        cnn.conv.bias.fill_(100)
    assert cnn(pad([[[1, 2, 3], [4]]], 9)).detach()[0, :, 0].tolist() == [94, 97]


def test_dropout_of_characters():
    torch.manual_seed(0)
    cnn = CharacterCNN(ALPHABET, E, F, dropout=0.5)
    x = pad(WORDS, 6)
    assert not cnn(x).equal(cnn(x))
    cnn.eval()
    assert cnn(x).equal(cnn(x))


@pytest.mark.parametrize("layers", [1, 3])
def test_highway(layers):
    torch.manual_seed(0)
    highway = HighwayNetwork(F, layers).double()
    assert all((gate.bias == -1).all() for gate in highway.gates)
    x = torch.randn(2, 3, F, dtype=torch.float64, requires_grad=True)
    got = highway(x)
    want = torch.stack([torch.stack([pass_highway(highway, row) for row in text]) for text in x])
    torch.testing.assert_close(got, want)
    noise = torch.randn_like(want)
    leaves = [x, *highway.parameters()]
    torch.testing.assert_close(
        *(torch.autograd.grad((y * noise).sum(), leaves) for y in (got, want))
    )
    with torch.no_grad():
        for gate in highway.gates:
            gate.bias.fill_(-1e3)
    assert highway(x).equal(x)  # closed gates pass the input on
