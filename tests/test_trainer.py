"""One step of training, beside the same written out."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from attnfast._utils.checks import InputError
from attnfast.losses import Reinforce
from attnfast.models import Config, build
from attnfast.translate import checkpoint
from attnfast.translate import trainer as trainer_module
from attnfast.translate.data import Batch, Example, WordTokenizer, collate
from attnfast.translate.trainer import (
    Options,
    StepOptions,
    Trainer,
    batch_loss,
    make_optimizer,
    sequence_loss,
    train_step,
    validation_loss,
)


def made(attention="bahdanau", **options):
    """A small model, and a batch with padding."""
    torch.manual_seed(0)
    config = Config(11, attention, embed_dim=8, hidden_dim=6, dropout=0.0, **options)
    g = torch.Generator().manual_seed(1)
    source, target = (torch.randint(4, 11, (3, n), generator=g) for n in (5, 6))
    target[1, 4:] = 0
    lengths = torch.tensor([5, 2, 4])
    return build(config, backend="reference"), Batch(source, lengths, target, target.roll(-1, 1))


@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_a_gradient_is_no_longer_than_clip(clip):
    model, batch = made()
    options = Options(clip=clip)
    plain = copy.deepcopy(model)
    logits, _ = plain(batch.source, batch.lengths, batch.target_in)
    sequence_loss(logits, batch.target_out, options.label_smoothing).backward()
    whole = [x.grad for x in plain.parameters()]
    norm = nn.utils.get_total_norm(whole)
    assert 2e-3 < norm < 5e2
    train_step(model, make_optimizer(model, options), batch, options, StepOptions(1e-3))
    for x, grad in zip(model.parameters(), whole):
        torch.testing.assert_close(x.grad, grad * min(1, clip / norm), rtol=1e-4, atol=1e-9)


def test_a_step_is_adamws_at_the_rate_given():
    """Also in the second step, which finds gradients and another rate there."""
    model, batch = made()
    options = Options(label_smoothing=0.2, weight_decay=0.1)
    plain = copy.deepcopy(model)
    optimizer = make_optimizer(model, options)
    same = torch.optim.AdamW(plain.parameters(), 1.0, weight_decay=0.1)
    for rate in (1e-2, 3e-3):
        loss = train_step(model, optimizer, batch, options, StepOptions(rate))
        same.param_groups[0]["lr"] = rate
        same.zero_grad()
        logits, _ = plain(batch.source, batch.lengths, batch.target_in)
        wanted = sequence_loss(logits, batch.target_out, 0.2)
        wanted.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), options.clip)
        same.step()
        assert loss == pytest.approx(wanted.item(), rel=1e-6)
    for got, want in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(got, want)


def test_products_of_bfloat16_have_nearly_the_gradients_of_float32():
    model, batch = made()
    grads = []
    for precision in ("float32", "bfloat16"):
        model.zero_grad()
        loss = batch_loss(model, batch, Options(precision=precision), StepOptions())
        assert loss.dtype == torch.float32
        loss.backward()
        grads.append(torch.cat([x.grad.flatten() for x in model.parameters()]))
    error = (grads[1] - grads[0]).norm() / grads[0].norm()
    assert 1e-4 < error < 0.03


def test_what_the_loss_is_of():
    """Coverage counts once for each word; where words are copied nothing is smoothed."""
    for copying in (False, True):
        model, batch = made("coverage", pointer_generator=copying)
        options = Options(label_smoothing=0.3)
        logits, coverage = copy.deepcopy(model)(batch.source, batch.lengths, batch.target_in)
        words = (batch.target_out != 0).sum()
        log_probs = logits.log_softmax(-1)[batch.target_out != 0]
        own = log_probs.gather(-1, batch.target_out[batch.target_out != 0].unsqueeze(-1)).mean()
        smoothing = 0.0 if copying else 0.3
        wanted = 0.5 * coverage.sum() / words - (1 - smoothing) * own
        wanted = wanted - smoothing * log_probs.mean() if smoothing else wanted
        now = StepOptions(1e-3, coverage=0.5)
        loss = train_step(model, make_optimizer(model, options), batch, options, now)
        assert loss == pytest.approx(wanted.item(), rel=1e-6)


def test_the_coverage_loss_begins_late():
    options = Options(coverage_loss=0.5, coverage_from=0.6)
    assert [options.at(step, 5).coverage for step in range(5)] == [0, 0, 0, 0.5, 0.5]
    assert Options(coverage_from=0.0).at(0, 5).coverage == 1.0


def test_a_gate_keeps_the_coverage_loss():
    model, batch = made("coverage", gated=True)
    coverage = model(batch.source, batch.lengths, batch.target_in)[1]
    assert coverage.shape == (3,) and (coverage > 0).all()


def test_an_attention_without_parameters_has_no_learning_rate():
    model, _ = made("dot")
    with pytest.raises(InputError, match=r"attention_lr_scale must be 1.0 for an attention witho"):
        make_optimizer(model, Options(attention_lr_scale=0.5))


def test_hard_attention_learns_by_reinforce():
    """The loss is that of whole targets, for each word; the baseline is part of a checkpoint."""
    model, batch = made(hard=True)
    options = Options(reinforce_weight=0.5, entropy_weight=0.1)
    reinforce = Reinforce(options.reinforce_weight, options.entropy_weight)
    plain = copy.deepcopy(model)
    torch.manual_seed(2)
    predicted = plain(batch.source, batch.lengths, batch.target_in)
    each = predicted[0].log_softmax(-1).gather(-1, batch.target_out.unsqueeze(-1)).squeeze(-1)
    each = (each * (batch.target_out != 0)).sum(-1)
    drawn = predicted.history
    assert (drawn.log_prob < 0).any()
    wanted = copy.deepcopy(reinforce)(each, drawn.log_prob, drawn.entropy) * 3 / 16
    torch.manual_seed(2)
    optimizer = make_optimizer(model, options)
    loss = train_step(model, optimizer, batch, options, StepOptions(1e-3), reinforce)
    assert loss == pytest.approx(wanted.item(), rel=1e-6)
    assert reinforce.baseline.item() == pytest.approx(each.mean().item(), rel=1e-6)


def test_gradients_of_batches_add_up_to_those_of_one():
    """As those of one batch of all their words, and of all their aligned words."""
    torch.manual_seed(0)
    pairs = [
        Example([4, 5, 6], [7, 8, 9, 10], [[0], [], [2], []]),
        Example([9], [8], [[0]]),
        Example([6, 7], [5]),
    ]
    model, _ = made("coverage")
    options, losses, now = Options(), [], StepOptions(alignment=0.7, coverage=0.3)
    for groups in ([pairs], [pairs[:1], pairs[1:]]):
        own = copy.deepcopy(model)
        batches = [collate(group) for group in groups]
        losses.append(train_step(own, make_optimizer(own, options), batches, options, now))
        losses.append([x.grad for x in own.parameters()])
    assert losses[0] == pytest.approx(losses[2], rel=1e-6)
    torch.testing.assert_close(losses[1], losses[3])


def test_scheduled_sampling_replaces_what_the_decoder_reads(monkeypatch):
    model, batch = made()
    asked, own = [], batch.target_in.flip(0)

    def sampled(target_in, logits, share):
        torch.testing.assert_close(
            logits, model(batch.source, batch.lengths, batch.target_in)[0].detach()
        )
        asked.append((target_in is batch.target_in, share))
        return own

    monkeypatch.setattr(trainer_module, "scheduled_sampling", sampled)
    loss = batch_loss(model, batch, Options(), StepOptions(sampled=0.3))
    logits, _ = model(batch.source, batch.lengths, own)
    torch.testing.assert_close(loss, sequence_loss(logits, batch.target_out, 0.1))
    assert asked == [(True, 0.3)]
    options = Options(scheduled_sampling=0.5)
    assert [options.at(i, 5).sampled for i in range(5)] == [0.0, 0.125, 0.25, 0.375, 0.5]


def make_trainer(tmp_path, **options):
    torch.manual_seed(0)
    pairs = [Example([4, 5], [6, 7]), Example([8], [9]), Example([5, 6, 4], [7])]
    options = Options(batch_size=1, **options)
    config, text = Config(11, embed_dim=8, hidden_dim=6, dropout=0.0), [("4", "5")]
    words, model = WordTokenizer([*"4567890"]), build(config)
    return Trainer(config, model, words, options, pairs, pairs, text, tmp_path)


def test_the_moving_average_is_validated_and_saved(tmp_path):
    """It begins with the parameters after the first step."""
    trainer = make_trainer(tmp_path, epochs=1, average=0.75)
    seen, step = [], trainer.optimizer.step

    def watched(*args):
        step(*args)
        seen.append([x.detach().clone() for x in trainer.model.parameters()])

    trainer.optimizer.step = watched
    trainer.run(lambda line: None)
    assert len(seen) == 3
    mean = seen[0]
    for after in seen[1:]:
        mean = [0.75 * x + 0.25 * y for x, y in zip(mean, after)]
    best, last = (checkpoint.load(tmp_path / f"{x}.pt")["model"] for x in ("best", "last"))
    names = [name for name, _ in trainer.model.named_parameters()]
    torch.testing.assert_close([best[x] for x in names], mean)
    torch.testing.assert_close([last[x] for x in names], seen[-1])


def test_a_trainer_logs_further_measurements(tmp_path):
    trainer = make_trainer(tmp_path, epochs=1)
    trainer.measure = lambda model: {"rows": len(model.bias)}
    trainer.run(lambda line: None)
    assert trainer.history[0]["rows"] == len(trainer.model.bias)
    assert "rows" in (tmp_path / "log.csv").read_text().splitlines()[0]


def test_a_training_ends_when_its_patience_is_over(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, epochs=9, patience=2)
    scores = iter([1.0, 3.0, 2.0, 2.5, 9.0])
    entry = {"epoch": 0, "loss": 0, "valid_loss": 1.0, "step_ms": 0, "seconds": 0}
    monkeypatch.setattr(trainer, "_validate", lambda *_: entry | {"bleu": next(scores)})
    trainer.run(lambda line: None)
    assert [x["bleu"] for x in trainer.history] == [1.0, 3.0, 2.0, 2.5]


def test_a_compiled_model_learns_the_same(tmp_path, monkeypatch):
    compiled = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiled)
    parameters = []
    for compiles in (False, True):
        trainer = make_trainer(tmp_path / str(compiles), epochs=1, compile=compiles)
        trainer.directory.mkdir()
        trainer.run(lambda line: None)
        assert (trainer.trained is trainer.model) is not compiles
        parameters.append(list(trainer.model.parameters()))
    torch.testing.assert_close(*parameters)


def test_options_without_effect_are_refused():
    """And taken where they have one: the encoder may have a window and a stride too."""
    for name, shape, attention, usual in (
        ("coverage_loss", {}, "bahdanau", {"attention": "coverage"}),
        ("attention_lr_scale", {}, "none", {"attention": "dot"}),
        ("window", {"window": 3}, "strided", {"attention": "predictive"}),
        ("window", {"window": 3}, "dot", {"self_attention": True}),
        ("stride", {"stride": 3}, "local", {"attention": "strided"}),
        ("stride", {"stride": 3}, "bahdanau", {"self_attention": True}),
    ):
        options = Options() if shape else Options(**{name: 0.5})
        with pytest.raises(InputError, match=f"{name} must be .* for attention '{attention}', "):
            options.check(Config(11, attention, **shape))
        options.check(Config(11, **{"attention": attention, **usual}, **shape))
        Options().check(Config(11, attention))


def test_learned_positions_bound_the_length_of_pairs():
    config = Config(11, hidden_dim=8, encoder="transformer", positions="learned")
    Options(max_length=511).check(config)
    with pytest.raises(InputError, match="max_length must be below 512 with learned positions"):
        Options(max_length=512).check(config)


def test_a_trainer_sets_how_long_translations_may_become(tmp_path):
    model, _ = made()
    pairs = [Example([4], list(range(4, 10)) * 5), Example([4] * 9, [5] * 9)]
    config, text = Config(11, embed_dim=8, hidden_dim=6), [("4", "5")]
    both = (pairs, pairs[:1])
    for examples, ratio in zip(both, (2 * 41 / 12, 31.0)):
        trainer = Trainer(
            config, model, WordTokenizer([*"4567890"]), Options(), examples, pairs, text, tmp_path
        )
        trainer.save("best.pt")
        again = checkpoint.restore(checkpoint.load(tmp_path / "best.pt"))[1]
        for x in (trainer.config, model, again):
            assert (x.length_ratio, x.longest_target) == (pytest.approx(ratio), 31)
        assert again.output_limit(torch.tensor([2])).tolist() == [max(31, int(2 * ratio) + 10)]
    more = Config(11, embed_dim=8, hidden_dim=6, length_ratio=40.0, longest_target=99)
    trainer = Trainer(
        more, model, WordTokenizer([*"4567890"]), Options(), pairs, pairs, text, tmp_path
    )
    assert trainer.config == more


def test_validation_counts_words():
    """Batches weigh by their words; nothing is dropped out, and training goes on as before."""
    config = Config(11, "bahdanau", embed_dim=8, hidden_dim=6, dropout=0.5)
    model = build(config, backend="reference").train()
    groups = [[Example([4, 5], [6])], [Example([4], [6, 7, 8, 9]), Example([5], [7])]]
    got = validation_loss(model, groups)
    assert model.training
    total = 0.0
    for batch in map(collate, groups):
        logits, _ = model.eval()(batch.source, batch.lengths, batch.target_in)
        log_probs = logits.log_softmax(-1).gather(-1, batch.target_out.unsqueeze(-1)).squeeze(-1)
        total -= log_probs[batch.target_out != 0].sum().item()
    assert got == pytest.approx(total / (2 + 5 + 2), rel=1e-5)
