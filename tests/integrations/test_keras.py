"""Keras 3 with PyTorch as its backend: the real layers, and models that hold them."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from integrations.common import compare, real

import attnfast
from attnfast.integrations.patch import adapter_serving

os.environ["KERAS_BACKEND"] = "torch"
keras = real("keras")
if keras.config.backend() != "torch":
    pytest.skip("Keras has another backend", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
LAYERS = {
    "additive": lambda **more: keras.layers.AdditiveAttention(**more),
    "additive without scale": lambda **more: keras.layers.AdditiveAttention(False, **more),
    "dot": lambda **more: keras.layers.Attention(**more),
    "scaled dot": lambda **more: keras.layers.Attention(True, **more),
    "concat": lambda **more: keras.layers.Attention(score_mode="concat", **more),
    "scaled concat": lambda **more: keras.layers.Attention(True, "concat", **more),
}


def make(kind, size=4, **more):
    torch.manual_seed(0)
    layer = LAYERS[kind](**more)
    layer.build([(None, None, size)] * 2)
    for p in layer.parameters():
        if p.requires_grad:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return layer


def use(layer, draw):
    for B, Tk, lengths in ((3, 7, (7, 1, 4)), (2, 5, (5, 2))):
        value, key, seen = draw(B, Tk, 4), draw(B, Tk, 4), draw.seen(lengths, Tk)
        for training in (False, True):
            for Tq in (5, 1, 1):
                query = draw(B, Tq, 4)
                yield layer([query, value], training=training)
                yield layer([query, value, key], mask=[None, seen], training=training)
                yield layer(
                    [query, value, key], mask=[seen[:, :Tq], None], training=training,
                    return_attention_scores=True,
                )  # fmt: skip
                yield layer([query, value, key], use_causal_mask=True, training=training)
                yield layer(
                    [query, value, key], mask=[seen[:, :Tq], seen, seen], training=training,
                    use_causal_mask=True, return_attention_scores=True,
                )  # fmt: skip


@pytest.mark.parametrize("kind", LAYERS)
def test_attention(kind):
    """Dropout, of every second kind, takes the same random numbers as Keras's own."""
    dropout = 0.5 * (list(LAYERS).index(kind) % 2)
    layer = make(kind, dropout=dropout, seed=1 if dropout else None)
    compare(layer, use, dtypes=[torch.float32], training=[False])


@pytest.mark.parametrize("kind", ["additive", "scaled dot", "scaled concat"])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_bfloat16(kind, policy):
    plain, served = make(kind, dtype=policy), make(kind, dtype=policy)
    assert attnfast.replace(served).replaced
    query, value = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    a, b = (x([query, value], return_attention_scores=True) for x in (plain, served))
    torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_float64_is_left_alone():
    report = attnfast.replace(make("dot", dtype="float64"))
    assert "skipped: Keras's own computes parts of float64 in float32" in str(report)


def test_four_dimensions_are_left_to_keras():
    plain, served = make("additive"), make("additive")
    assert attnfast.replace(served).replaced
    inputs = [torch.randn(2, 3, 5, 4), torch.randn(2, 3, 6, 4)]
    torch.testing.assert_close(served(inputs), plain(inputs))


def test_layers_that_are_not_built():
    report = attnfast.replace(keras.layers.AdditiveAttention())
    assert "skipped: it is not built yet" in str(report)


class Model(keras.Model):
    """Layers in attributes, lists and dictionaries."""

    def __init__(self):
        super().__init__()
        self.one = keras.layers.Attention()
        self.more = [keras.layers.AdditiveAttention(), {"x": keras.layers.Attention(True)}]
        self.inner = [keras.Sequential([keras.layers.Dense(4)])]

    def call(self, inputs):
        query, value = inputs
        for layer in (self.one, self.more[0], self.more[1]["x"]):
            query = self.inner[0](layer([query, value]))
        return query


def functional():
    query, value = keras.Input((3, 4)), keras.Input((5, 4))
    query, value = (keras.layers.Masking()(x) for x in (query, value))
    return keras.Model([query, value], keras.layers.AdditiveAttention(name="a")([query, value]))


def test_layers_in_lists():
    model, inputs = Model(), [torch.randn(2, 3, 4), torch.randn(2, 5, 4)]
    want = model(inputs)
    report = attnfast.replace(model)
    assert [x.path for x in report.replaced] == [
        "one", *(layer.name for layer in (model.more[0], model.more[1]["x"]))
    ]  # fmt: skip
    torch.testing.assert_close(model(inputs), want)
    report.undo()
    assert type(model.more[0]) is keras.layers.AdditiveAttention


def test_trainer():
    """A functional model, with masks that travel with its tensors."""
    torch.manual_seed(0)
    inputs = [torch.randn(4, 3, 4), torch.randn(4, 5, 4)]
    inputs[0][0, 2:] = inputs[1][:3, 3:] = 0
    results = []
    for serve in (False, True):
        keras.utils.set_random_seed(0)
        model = functional()
        if serve:
            assert [x.path for x in attnfast.replace(model).replaced] == ["a"]
        model.compile("sgd", "mse")
        history = model.fit(inputs, torch.ones(4, 3, 4), epochs=3, verbose=0).history["loss"]
        results.append((history, model.predict(inputs, verbose=0)))
    torch.testing.assert_close(*results)


def test_files_and_copies(tmp_path):
    model, inputs = functional(), [torch.randn(2, 3, 4), torch.randn(2, 5, 4)]
    config = model.to_json()
    attnfast.replace(model)
    assert model.to_json() == config
    model.save(tmp_path / "model.keras")
    served = model.get_layer("a")
    for twin in (
        keras.models.load_model(tmp_path / "model.keras"),
        keras.models.clone_model(model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ):
        twin.set_weights(model.get_weights())
        assert type(twin.get_layer("a")) is keras.layers.AdditiveAttention
        torch.testing.assert_close(model(inputs), twin(inputs))
    for twin in (copy.deepcopy(served), pickle.loads(pickle.dumps(served))):
        assert adapter_serving(twin) is adapter_serving(served) is not None
        torch.testing.assert_close(served(inputs), twin(inputs))
