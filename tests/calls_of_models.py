"""Public models, diagnostics, speech and training: the other half of tests/calls.py."""

from __future__ import annotations

from typing import Any

import torch
from calls import (
    TK,
    TQ,
    A,
    B,
    Call,
    Table,
    V,
    functions_and_modules,
    lengths,
    made,
    rows,
    seen,
    words,
)

from attnfast import Span, decoding, models, speech
from attnfast import nn as modules
from attnfast._utils.benchmark import Cost
from attnfast.analysis import diagnostics, faithfulness, plots


def translators() -> Table:
    """Return configurations, encoders, decoders, translators and searches."""
    config = models.Config(V, embed_dim=A, hidden_dim=A)
    model = models.build(config).eval()
    pair: dict[str, Any] = {"source": words(B, TK), "lengths": lengths()}
    embedded = {"embedded": torch.randn(B, TK, A), "lengths": lengths()}
    source, state = model.encode(**pair)
    transformer = models.TransformerEncoder(A, A)
    table: dict[str, Any] = {
        "Config": (
            models.Config,
            {"vocab_size": V, "attention": "local", "recurrence": "input_feeding",
             "readout": "attentional", "query_layer": "last", "cell": "gru",
             "embed_dim": A, "hidden_dim": A, "layers": 1, "decoder_layers": 2, "dropout": 0.1,
             "pointer_generator": True, "copy_gate": "output", "window": 2, "stride": 2,
             "fixed_stride": False, "sigma": 1.0, "gaussian_height": 2.0,
             "self_attention": True, "encoder": "rnn", "length_ratio": 2.0, "longest_target": 3},
        ),
        "build": (models.build, {"config": config, "backend": None}),
        "Encoder": (
            models.Encoder,
            {"embed_dim": A, "hidden_dim": A, "cell": "gru", "layers": 1, "dropout": 0.1,
             "self_attention": None, "backend": None},
        ),
        "Encoder.forward": (models.Encoder(A, A), embedded),
        "TransformerEncoder": (
            models.TransformerEncoder,
            {"embed_dim": A, "hidden_dim": A, "heads": [Span()] * 2, "layers": 1, "dropout": 0.1,
             "backend": None},
        ),
        "TransformerEncoder.forward": (transformer, embedded),
        "FixedContext": (models.FixedContext, {"backend": None}),
        "MeanContext": (models.MeanContext, {"backend": None}),
        "NoContext": (models.NoContext, {"backend": None}),
        "Seq2Seq": (
            models.Seq2Seq,
            {"encoder": model.encoder, "decoder": model.decoder, "vocab_size": V, "embed_dim": A,
             "dropout": 0.1, "pointer": modules.PointerGenerator(A)},
        ),
        "Seq2Seq.output_limit": (model.output_limit, {"lengths": lengths()}),
        "Seq2Seq.embed": (model.embed, {"words": words(B, TK)}),
        "Seq2Seq.encode": (model.encode, pair),
        "Seq2Seq.read": (model.read, embedded),
        "Seq2Seq.decode": (
            model.decode,
            {"words": words(B, TQ), "state": state, "source": source, "need_weights": True},
        ),
        "Seq2Seq.forward": (model, pair | {"target_in": words(B, TQ), "need_weights": True}),
    }  # fmt: skip
    options: dict[str, Any] = pair | {
        "model": model, "min_length": 1, "max_length": 3, "prefix": [[5], [6]],
        "no_repeat_ngram": 2, "word_mask": torch.ones(V, dtype=torch.bool),
        "forbidden": [0, 1, 2], "start": models.BOS, "end": models.EOS, "scorer": None,
        "scorer_weight": 0.5, "need_weights": True, "int8": False,
    }  # fmt: skip
    penalties = {"length_penalty": 1.0, "coverage_penalty": 0.5, "length_bonus": 0.5}
    draws = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "generator": torch.Generator()}
    table |= {
        "greedy_search": (decoding.greedy_search, options),
        "beam_search": (decoding.beam_search, options | penalties | {"beam": 2, "n_best": 2}),
        "sample": (decoding.sample, options | draws | {"samples": 2}),
        "sharing_packed_parameters": (decoding.sharing_packed_parameters, {"model": model}),
    }
    for name in ("FixedContext", "MeanContext", "NoContext"):
        context = getattr(models, name)()
        prepare = {"states": torch.randn(B, TK, A), "lengths": lengths()}
        more = {"mask": seen(), "values": torch.randn(B, TK, A)} if name == "MeanContext" else {}
        table[name + ".prepare"] = context.prepare, prepare | more
        call = {"state": torch.randn(B, TQ, A), "memory": context.prepare(**prepare)}
        table[name + ".forward"] = context, call | {"need_weights": True}
    sizes: dict[str, Any] = {"embed_dim": A, "context_dim": A, "hidden_dim": A}
    sizes |= {"attention": made("BahdanauAttention"), "cell": "gru"}
    decoder = models.RecurrentDecoder(**sizes)
    kinds = {"recurrence": "input_feeding", "query_layer": "last", "readout": "deep"}
    table["RecurrentDecoder"] = (
        models.RecurrentDecoder, sizes | kinds | {"layers": 2, "dropout": 0.1}
    )  # fmt: skip
    table["RecurrentDecoder.forward"] = decoder, {
        "input": torch.randn(B, TQ, A), "memory": decoder.attention.prepare(torch.randn(B, TK, A)),
        "hx": decoder.initial(torch.randn(B, A)), "target_lengths": torch.tensor([TQ, 1])[:B],
        "need_weights": True,
    }  # fmt: skip
    table["RecurrentDecoder.initial"] = decoder.initial, {"hidden": torch.randn(B, A)}
    return {name: Call(*of) for name, of in table.items()}


def readers() -> Table:
    """Return the models of other tasks."""
    pyramid = models.PyramidEncoder(A, A, 1)
    las = models.ListenAttendSpell(pyramid, modules.BahdanauAttention(A, 2 * A, A), V, A, A)
    las = las.eval()
    grid = models.GridEncoder(1, [A], [2])
    attention = modules.BahdanauAttention(A, A + 2, A)
    decoder = models.ShowAttendTell(grid, attention, V, A, A).eval()
    spoken = {"frames": torch.randn(B, TK, A), "lengths": lengths()}
    images = {"images": torch.rand(B, 1, 8, 6), "sizes": torch.tensor([[8, 6], [5, 4]])[:B]}
    encoded, spelling = las.encode(**spoken)
    seen_, telling = decoder.encode(**images)
    classifier = models.Classifier(models.Encoder(A, A), V, A, 3).eval()
    network = models.MemoryNetwork(V, A, 2)
    both = modules.BidirectionalAttention(2 * A)
    cnn = models.CharacterCNN(V, A, A)
    flag = {"need_weights": True}
    target = {"target_in": words(B, TQ)} | flag
    scorer = models.CTCPrefixScorer()
    sizes = {"vocab_size": V, "hidden_dim": A, "embed_dim": A, "dropout": 0.1}
    table: dict[str, Any] = {
        "PyramidEncoder": (
            models.PyramidEncoder,
            {"features": A, "hidden_dim": A, "layers": 2, "dropout": 0.1, "factor": 2,
             "backend": None},
        ),
        "PyramidEncoder.forward": (pyramid, spoken),
        "ListenAttendSpell": (
            models.ListenAttendSpell,
            {"encoder": pyramid, "attention": made("LuongAttention")} | sizes,
        ),
        "ListenAttendSpell.output_limit": (las.output_limit, {"lengths": lengths()}),
        "ListenAttendSpell.encode": (las.encode, spoken),
        "ListenAttendSpell.decode": (
            las.decode, {"words": words(B, TQ), "state": spelling, "encoded": encoded} | flag,
        ),
        "ListenAttendSpell.forward": (las, spoken | target),
        "CTCPrefixScorer.score": (
            scorer.score,
            {"words": words(B, 1), "state": scorer.score(words(B, 1), None, encoded)[1],
             "encoded": encoded},
        ),
        "GridEncoder": (
            models.GridEncoder,
            {"channels": 1, "features": [A], "strides": [2], "place_scale": 1.5},
        ),
        "GridEncoder.forward": (grid, images),
        "ShowAttendTell": (
            models.ShowAttendTell,
            {"encoder": grid, "attention": attention, "max_length": TK} | sizes,
        ),
        "ShowAttendTell.output_limit": (decoder.output_limit, {"sizes": images["sizes"]}),
        "ShowAttendTell.encode": (decoder.encode, images),
        "ShowAttendTell.decode": (
            decoder.decode, {"words": words(B, TQ), "state": telling, "encoded": seen_} | flag,
        ),
        "ShowAttendTell.forward": (decoder, images | target),
        "Classifier": (
            models.Classifier,
            {"encoder": classifier.encoder, "vocab_size": V, "embed_dim": A, "classes": 3,
             "pooling": "mean", "dropout": 0.1, "backend": None},
        ),
        "Classifier.embed": (classifier.embed, {"words": words(B, TK)}),
        "Classifier.read": (
            classifier.read, {"embedded": torch.randn(B, TK, A), "lengths": lengths()},
        ),
        "Classifier.forward": (classifier, {"words": words(B, TK), "lengths": lengths()}),
        "MemoryNetwork": (
            models.MemoryNetwork,
            {"vocab_size": V, "dim": A, "hops": 2, "tying": "adjacent", "max_sentences": TK,
             "backend": None},
        ),
        "MemoryNetwork.forward": (
            network, {"stories": words(B, TQ, TK), "questions": words(B, TK)} | flag,
        ),
        "position_encoding": (models.position_encoding, {"words": words(B, TK), "features": A}),
        "BiDAF": (
            models.BiDAF,
            {"attention": both, "features": 8 * A, "backend": None, "characters": cnn,
             "highway_layers": 2} | sizes,
        ),
        "BiDAF.forward": (
            models.BiDAF(both, 8 * A, V, A, A, characters=cnn),
            {"text": words(B, TK), "text_lengths": lengths(), "question": words(B, TQ),
             "question_lengths": lengths(TQ), "text_characters": words(B, TK, 3),
             "question_characters": words(B, TQ, 3)} | flag,
        ),
        "BiDAF.forward, words": (
            models.BiDAF(both, 8 * A, V, A, A),
            {"text": words(B, TK), "text_lengths": lengths(), "question": words(B, TQ),
             "question_lengths": lengths(TQ), "text_characters": None,
             "question_characters": None} | flag,
        ),
        "CharacterCNN": (
            models.CharacterCNN,
            {"num_characters": V, "embed_dim": A, "output_dim": A, "kernel_size": 2,
             "dropout": 0.1},
        ),
        "CharacterCNN.forward": (cnn, {"characters": words(B, TK, 3)}),
        "HighwayNetwork": (models.HighwayNetwork, {"dim": A, "layers": 2}),
        "HighwayNetwork.forward": (models.HighwayNetwork(A), {"x": torch.randn(B, TK, A)}),
        "best_spans": (
            models.best_spans,
            {x: torch.randn(B, TK).log_softmax(-1) for x in ("start", "end")} | {"max_length": 3},
        ),
    }  # fmt: skip
    return {name: Call(*of) for name, of in table.items()}


def judges() -> Table:
    """Return diagnostics and explanation."""
    of_weights = {
        "weights": rows(), "lengths": lengths(), "target_lengths": lengths(TQ),
        "key_indices": None,
    }  # fmt: skip
    table: dict[str, Any] = {}
    more: dict[str, dict[str, Any]] = {
        "row_statistics": {}, "kl_from_uniform": {}, "key_coverage": {},
        "diagonality": {"radius": 1.5}, "monotonicity": {},
        "over_under_translation": {"fertility": torch.rand(B, TK) + 1},
        "extract_alignment": {"min_weight": 0.1, "null": -1},
        "head_roles": {"radius": 1}, "failures": {"thresholds": diagnostics.Thresholds()},
    }  # fmt: skip
    for name, own in more.items():
        call = of_weights | own | ({"weights": rows(B, 2)} if name == "head_roles" else {})
        function = getattr(diagnostics, name)
        table[name] = function, call
        spanned: dict[str, Any] = {"weights": call["weights"][..., :3], "fertility": None}
        spanned["key_indices"] = Span(window=1).key_indices(TQ, TK)
        table[name + ", keys"] = function, call | {x: spanned[x] for x in spanned if x in call}
    found = [{(0, 0), (1, 2)}] * B
    model = models.build(models.Config(V, embed_dim=A, hidden_dim=A)).eval()
    classifier = models.Classifier(models.Encoder(A, A), V, A, 3).eval()
    read: dict[str, Any] = {
        "reader": classifier.read, "embedded": torch.randn(B, TK, A), "lengths": lengths(),
    }  # fmt: skip
    table |= {
        "repetition": (diagnostics.repetition, {"words": ["a", "b", "a"], "size": 2}),
        "alignment_score": (
            diagnostics.alignment_score, {"predicted": found, "sure": found, "possible": found},
        ),
        "Thresholds": (
            diagnostics.Thresholds,
            {"diffuse": 0.9, "concentrated": 0.5, "stuck": 4, "drift": 0.25, "skipped": 0.1,
             "sentence": 0.5},
        ),
        "next_word": (faithfulness.next_word, {"model": model, "words": words(B, 2)}),
        "total_variation": (faithfulness.total_variation, {x: rows() for x in "pq"}),
        "jensen_shannon": (faithfulness.jensen_shannon, {x: rows() for x in "pq"}),
        "kendall_tau": (
            faithfulness.kendall_tau,
            {"a": torch.randn(B, TK), "b": torch.randn(B, TK), "lengths": lengths()},
        ),
        "gradient_times_input": (faithfulness.gradient_times_input, read | {"fixed": True}),
        "leave_one_out": (faithfulness.leave_one_out, read),
        "weight_gradient": (faithfulness.weight_gradient, read),
        "permutation_test": (faithfulness.permutation_test, read | {"count": 2, "seed": 1}),
        "adversarial": (
            faithfulness.adversarial,
            read | {"epsilon": 0.5, "restarts": 1, "steps": 2, "seed": 1},
        ),
        "erasure": (faithfulness.erasure, read | {"ranking": torch.rand(B, TK)}),
    }  # fmt: skip
    return {name: Call(*of) for name, of in table.items()}


def sounds() -> Table:
    """Return speech."""
    features = {"features": torch.randn(B, TK, A), "lengths": lengths()}
    mel = speech.LogMel(400, 4)
    normalisation = speech.FeatureNormalizer(A, 2)
    table: dict[str, Any] = {
        "mel_filters": (speech.mel_filters, {"mels": 4, "fft": 64, "rate": 400}),
        "LogMel": (speech.LogMel, {"rate": 400, "mels": 4, "window": 0.025, "hop": 0.01}),
        "LogMel.forward": (
            mel, {"samples": torch.randn(B, 40), "lengths": torch.tensor([40, 20])[:B]},
        ),
        "FeatureNormalizer": (speech.FeatureNormalizer, {"features": A, "speakers": 2}),
        "FeatureNormalizer.fit": (
            normalisation.fit, {"recordings": [torch.randn(TK, A)] * 2, "speakers": [0, 1]},
        ),
        "FeatureNormalizer.forward": (
            normalisation, features | {"speaker": torch.tensor([0, 1])[:B]},
        ),
        "SpecAugment": (
            speech.SpecAugment,
            {"feature_masks": 1, "feature_width": 2, "frame_masks": 1, "frame_width": 2,
             "share": 0.2},
        ),
        "SpecAugment.forward": (speech.SpecAugment(), features),
        "word_errors": (
            speech.word_errors, {"reference": ["a", "b"], "hypothesis": ["a", "c"]},
        ),
    }  # fmt: skip
    return {name: Call(*of) for name, of in table.items()}


def pictures() -> Table:
    """Return what draws."""
    texts = {"source": list("abcde"), "target": list("xyz"), "titles": ("read", "written")}
    weights, spanned = rows()[0], Span(window=1).key_indices(TQ, TK)
    cost = [Cost(0.5, 9), Cost(0.75, 10)]
    table: dict[str, Any] = {
        "draw_alignment": (
            plots.draw_alignment,
            {"weights": weights, **texts, "key_indices": None},
        ),
        "draw_alignment, keys": (
            plots.draw_alignment,
            {"weights": weights[..., :3], **texts, "key_indices": spanned},
        ),
        "draw_listening": (
            plots.draw_listening,
            {"features": torch.randn(9, A), "weights": weights, "letters": list("xyz"),
             "hop": 0.01},
        ),
        "draw_hops": (
            plots.draw_hops, {"weights": weights, "sentences": list("abcde"), "question": "q"},
        ),
        "draw_pointing": (
            plots.draw_pointing,
            {"points": torch.rand(4, 2), "target": [0, 1, 2], "predicted": [0, 2, 3],
             "weights": weights},
        ),
        "draw_addressing": (
            plots.draw_addressing,
            {"x": torch.rand(TQ, A), "output": torch.rand(TQ, A), "read": rows(2).transpose(0, 1),
             "written": rows(2).transpose(0, 1)},
        ),
        "draw_looking": (
            plots.draw_looking,
            {"image": torch.rand(4, 5), "maps": torch.rand(3, 4, 5), "words": list("xyz")},
        ),
        "draw_speed": (
            plots.draw_speed,
            {"rows": {"title": {"curve": cost}}, "sizes": [1, 2], "note": "n", "axis": "words"},
        ),
    }  # fmt: skip
    return {name: Call(*of) for name, of in table.items()}


def teachers() -> Table:
    """Return what training computes with tensors."""
    logits, target = torch.randn(B, TQ, V), words(B, TQ)
    spelled = models.LASOutput(logits, torch.randn(B, TK, V).log_softmax(-1), lengths())
    table: dict[str, Any] = {
        "sequence_loss": (
            models.sequence_loss,
            {"logits": logits, "target_out": target, "label_smoothing": 0.1},
        ),
        "hybrid_loss": (
            models.hybrid_loss,
            {"output": spelled, "target_out": target, "ctc_weight": 0.5, "label_smoothing": 0.1},
        ),
        "scheduled_sampling": (
            models.scheduled_sampling, {"target_in": target, "logits": logits, "share": 0.5},
        ),
    }  # fmt: skip
    return {name: Call(*of) for name, of in table.items()}


def calls() -> Table:
    """Return every public callable with a call that fits, the same each time."""
    torch.manual_seed(0)
    parts = (functions_and_modules, translators, readers, judges, sounds, pictures, teachers)
    return {name: call for part in parts for name, call in part().items()}
