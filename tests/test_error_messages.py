"""Error messages of arguments that tests/wrong_values.py does not try: bounds, sizes and pairs."""

from types import FunctionType

import pytest
from calls import made
from calls_of_models import calls
from torch import default_generator, full, inf, nan, nn, ones, rand, randn, tensor, zeros

from attnfast import Span, models
from attnfast import nn as modules

CALLS = calls()
HEADS = {"query": zeros(2, 2, 3, 4), "key": zeros(2, 2, 5, 4), "value": zeros(2, 2, 5, 4)}
CONTENT = {"attention": "bahdanau", "sigma": None, "gaussian_height": None}
STATE = modules.RecurrentState(zeros(1, 2, 4))
ORDERED = (
    "LocalAttention", "StridedAttention", "HardMonotonicWindowAttention",
    "LocalPredictiveAttention", "LocationAwareAttention", "ForwardAttention", "MultiHeadAttention",
)  # fmt: skip
#: By call of tests/calls*.py: changed arguments, and parts of the message. A function is given the
#: argument that fits.
MESSAGES = {
    "additive_attention": [
        ({"query": zeros(3, 8)}, "query must be [B, Tq, A] or [B, H, Tq, A], got [3, 8]"),
        ({"key": zeros(2, 5, 9)}, "key must be [2, Tk, 4] … got [2, 5, 9]"),
        ({"value": zeros(2, 6, 7)}, "value must be [2, 5, Dv] … got [2, 6, 7]"),
        ({"score_vector": zeros(7)}, "score_vector must be [4] to fit the query and key, got [7]"),
        ({"mask": ones(2, 5) > 0}, "mask must be [2, 3, 5] … got [2, 5]"),
        ({"bias": zeros(2, 3, 4)}, "bias must be [2, 3, 5]"),
        ({"lengths": tensor([5])}, "lengths must be int64 or int32 of shape [2]"),
        ({"lengths": tensor([5, 6])}, "lengths must be between 0 and 5 … got 6"),
        ({"lengths": tensor([5, -1])}, "lengths must be between 0 and 5 … got -1"),
        ({"temperature": 0.0}, "temperature must be a positive number, got 0.0"),
        ({"activation": "gelu"}, "activation must be 'tanh', … 'relu' … , got 'gelu'")],
    "additive_attention, span": [
        (HEADS | {"span": [Span(window=1)]},
         "span must be 2 Spans, one for each head, got a list of 1"),
        (HEADS | {"position": zeros(4)},
         "position must be [3], [2, 3] or [2, 2, 3] to fit the query, got [4]"),
        ({"span": Span(stride=2), "sigma": None},
         "position must be None, a number or 'end' for a stride that is not fixed, got 'diag"),
        ({"sigma": 0}, "sigma must be a positive number or a tensor of them, got 0"),
        ({"sigma": ones(2)}, "sigma must be [3]"),
        ({"need_weights": "compact"}, "need_weights must be True, False, 'dense' or 'sparse'")],
    "Span": [
        ({"window": (1, -2)}, "window must be … got (1, -2)"),
        ({"window": (1, 2, 3)}, "window must be"),
        ({"window": 2**31}, "window must be … below … got 2147483648")],
    "Span.key_indices": [
        ({"position": zeros(2, 3, 3), "lengths": tensor([5, 2, 1])},
         "position must be int64, int32 or floating-point")],
    "gaussian_bias": [
        ({"sigma": 0}, "sigma must be a positive number"),
        ({"position": zeros(4)}, "position must be int64, int32 or floating-point [.., 3]")],
    "copy_distribution": [
        ({"logits": ones(2, 4)}, "logits must be [B, Tq, V], got [2, 4]"),
        ({"weights": ones(2, 2, 5)}, "weights must be [2, 3, Tk] to fit"),
        ({"gate": ones(2, 3, 1)}, "gate must be [2, 3] to fit the logits, got [2, 3, 1"),
        ({"logits": ones(2, 3, 0), "num_oov": 0}, "logits must be [B, Tq, V] with V > 0 for"),
        ({"source": ones(2, 4).long()}, "source must be int64 … of shape [2, 5]"),
        ({"source": full((2, 5), 11)}, "source must be between 0 and 10, a word, got 11"),
        ({"source": full((2, 5), -1)}, "source must be between 0 and 10, a word, got -1"),
        ({"num_oov": -1}, "num_oov must be an integer, at least 0, got -1")],
    "coverage_attention": [
        ({"key": ones(2, 3, 5)}, "key must be [2, Tk, 4]"),
        ({"penalty": ones(3)}, "penalty must be [1] … got [3]"),
        ({"coverage_weight": ones(5)},
         "coverage_weight must be floating-point [4] to fit the query"),
        ({"score_vector": None}, "score_vector must be given with filters or coverage_weight"),
        ({"projection": None}, "projection must be given: filters and projection"),
        ({"filters": None}, "filters must be given: filters and projection"),
        ({"normalisation": "sparsemax"}, "normalisation must be 'softmax' … 'sigmoid'"),
        ({"normalisation": "sigmoid", "transition_prob": 0.5, "previous": ones(2, 5)},
         "transition_prob must be None with weights from sigmoids"),
        ({"filters": ones(2, 1, 4)}, "filters must be … with an odd number of taps"),
        ({"filters": ones(3)}, "filters must be … with an odd number of taps"),
        ({"projection": ones(4, 3)}, "projection must be [4, 2] to fit"),
        ({"fertility": ones(2, 4)}, "fertility must be [2, 5], got [2, 4]"),
        ({"coverage": ones(2, 4)}, "coverage must be [2, 5], got [2, 4]"),
        ({"previous": None}, "previous must be given with a transition_prob"),
        ({"transition_prob": ones(2, 4)}, "transition_prob must be"),
        ({"temperature": 0.0}, "temperature must be a positive number")],
    "prepare": [
        ({"value": ones(1, 5, 3)}, "value must be [2, 5, Dv] to fit the key"),
        ({"mask": ones(2, 3, 5) > 0}, "mask must be [2, 1, 5]"),
        ({"mask": ones(2, 0, 5) > 0}, "mask must be [2, 1, 5]"),
        ({"mask": ones(3, 5) > 0}, "mask must be [2, 5], or 1 instead of a size, to fit key, got"),
        ({"lengths": tensor([1, 6])}, "lengths must be between 0 and 5")],
    "attend": [
        ({"query": zeros(2, 1, 5)}, "query must be [2, 'Tq', 4] to fit the memory, got"),
        ({"normalisation": "sigmoid"}, "normalisation must be 'softmax', 'sparsemax' or")],
    "Memory.append": [
        ({"key": zeros(2, 2)}, "key must be [2, 4] or [2, n, 4] to fit the"),
        ({"key": zeros(1, 4)}, "key must be … to fit the memory, got [1, 4]"),
        ({"key": zeros(2, 4), "value": zeros(2, 3, 3)},
         "value must be [2, 3] or [2, 1, 3] to fit")],
    "BahdanauAttention.append": [
        ({"states": zeros(2, 3)}, "states must be [B, Tk, 4], got"),
        ({"states": zeros(1, 4), "values": None},
         "states must be of 2 sequences, as the memory, got 1"),
        ({"values": zeros(2, 3, 4)}, "values must be [2, 2, Dv] to fit the states")],
    "alignment_loss": [
        ({"weights": zeros(2, 3)}, "weights must be floating-point [B, Tq, W]"),
        ({"alignment": zeros(2, 3)}, "alignment must be int64 [2, 3] or floating-point"),
        ({"alignment": full((2, 3), 5)},
         "alignment must be keys of weights … between -1 and 4, got 5"),
        ({"key_indices": zeros(2, 3, 4)}, "key_indices must be int64 [2, 3, 5]")],
    "row_statistics": [
        ({"lengths": tensor([6, 1])}, "lengths … between 0 and 5 … got 6"),
        ({"lengths": tensor([1])}, "lengths … of shape [2]"),
        ({"target_lengths": tensor([-1, 3])}, "target_lengths … got -1"),
        ({"key_indices": zeros(3, 6).long()}, "key_indices must be int64")],
    "diagonality": [({"radius": -1}, "radius must be a number of at least 0")],
    "over_under_translation": [
        ({"fertility": ones(2, 3)}, "fertility … [2, 5]"),
        ({"fertility": zeros(2, 5)}, "fertility must be above 0")],
    "repetition": [
        ({"words": [["a"]]}, "words must be a sequence of words"),
        ({"words": iter("ab")}, "words must be a sequence of words")],
    "extract_alignment": [
        ({"min_weight": 2}, "min_weight must be a number from 0 to 1"),
        ({"null": -2}, "null must be None")],
    "alignment_score": [
        ({"predicted": [set()], "sure": []}, "predicted must be of as many sentences as sure, 0"),
        ({"predicted": [{}], "sure": [set()]}, "predicted must be sets of links")],
    "head_roles": [({"weights": rand(2, 3, 5)}, "weights must be [B, H, Tq, Tk]")],
    "Thresholds": [
        ({"diffuse": 2}, "diffuse must be a number from 0 to 1"),
        ({"stuck": 1}, "stuck must be at least 2")],
    "leave_one_out": [
        ({"lengths": tensor([5, 0])}, "lengths must be between 1 and 5 to fit embedded, got 0")],
    "adversarial": [({"epsilon": 2}, "epsilon must be a number from 0 to 1, got 2")],
    "next_word": [({"words": zeros(2, 0).long()}, "words must be … at least one")],
    "Classifier": [({"dropout": 1}, "dropout must be … below 1")],
    "Classifier.forward": [
        ({"lengths": tensor([6, 1])}, "lengths must be between 1 and 5 to fit words, got 6")],
    "BidirectionalAttention.forward": [
        ({"question": randn(1, 3, 4)}, "question must be [B, T, 4], as many as texts, got"),
        ({"question": zeros(2, 0, 4), "question_lengths": None},
         "question must be of at least one word, got"),
        ({"text_lengths": tensor([5, 0])},
         "text_lengths must be between 1 and 5 to fit text, got 0"),
        ({"text_lengths": tensor([6, 1])},
         "text_lengths must be between 1 and 5 to fit text, got 6"),
        ({"question_lengths": tensor([3, 0])},
         "question_lengths must be between 1 and 3 to fit question, got 0"),
        ({"question_lengths": tensor([4, 1])},
         "question_lengths must be between 1 and 3 to fit question, got 4")],
    "BiDAF.forward": [
        ({"text_lengths": tensor([5, 0])},
         "text_lengths must be between 1 and 5 to fit text, got 0"),
        ({"question_lengths": tensor([4, 1])},
         "question_lengths must be between 1 and 3 to fit question, got 4"),
        ({"text": full((2, 5), 9)}, "text must be word ids between 0 and 8, got 9"),
        ({"text": full((2, 5), -1)}, "text must be word ids between 0 and 8, got -1"),
        ({"text_characters": zeros(2, 4, 3).long()},
         "text_characters must be int64 or int32 of shape [2, 5, L] … got a Tensor of torch.int64"),
        ({"question_characters": None}, "question_characters must be a torch.Tensor, got None"),
        ({"question_characters": zeros(2, 3, 0).long()},
         "question_characters must be of at least 1 character a word, got"),
        ({"text_characters": full((2, 5, 3), 9)},
         "text_characters must be character ids between 0 and 8, got 9"),
        ({"text_characters": full((2, 5, 3), -1)},
         "text_characters must be character ids between 0 and 8, got -1")],
    "BiDAF.forward, words": [
        ({"text_characters": ones(2, 5, 3).long()},
         "text_characters must be None for a model without a character CNN, got a Tensor"),
        ({"question_characters": ones(2, 3, 3).long()},
         "question_characters must be None for a model without a character CNN, got a Tensor")],
    "BiDAF": [({"highway_layers": -1}, "highway_layers must be at least 0, got -1")],
    "CharacterCNN.forward": [
        ({"characters": full((2, 5, 3), 9)},
         "characters must be character ids between 0 and 8, got 9"),
        ({"characters": zeros(2, 5, 0).long()},
         "characters must be of at least 1 character a word, got")],
    "HighwayNetwork.forward": [
        ({"x": zeros(2, 5, 3)}, "x must be floating-point [B, T, 4], got a Tensor of")],
    "best_spans": [
        ({"end": randn(2, 4)}, "start and end must be of the same [B, T]"),
        ({"start": full((2, 5), nan)}, "start must be log-probabilities, got NaN")],
    "PointerNetwork.forward": [
        ({"items": zeros(5, 4)}, "items must be [B, N, 4] with an item"),
        ({"lengths": tensor([6, 2])}, "lengths must be between 1 and 5, … , got 6"),
        ({"pointers": tensor([[1, 0], [2, 0]]).int()}, "pointers must be int64 of shape [2, T]"),
        ({"pointers": zeros(2, 0).long()}, "T at least 1, got a Tensor of torch.int64"),
        ({"pointers": tensor([[1, 0], [3, 0]])}, "pointers must be from 0, … items, got 3"),
        ({"pointers": tensor([[1, 0], [-1, 0]])}, "pointers must be from 0, … items, got -1")],
    "PointerNetwork.decode": [
        ({"items": zeros(0, 5, 4), "lengths": zeros(0).long()}, "an item at least, got [0, 5, 4]"),
        ({"lengths": tensor([5, 0])}, "lengths must be between 1 and 5, … , got 0")],
    "pointer_loss": [
        ({"pointers": zeros(2, 3).int()},
         "pointers must be int64 of shape [2, 3] to fit log_probs, got a Tensor of torch.int")],
    "NeuralTuringMachine": [
        ({"num_slots": 2, "shift": 3}, "num_slots must be at least shift, 3, got 2")],
    "NeuralTuringMachine.forward": [
        ({"x": zeros(0, 3, 4)}, "a sequence and a step at least, got [0, 3, 4]"),
        ({"state": lambda s: s._replace(memory=s.memory[:, :0], weights=s.weights[..., :0])},
         "state.memory must be of at least 1 slots, as shift is, got 0"),
        ({"state": lambda s: s._replace(hidden=s.hidden[:1])},
         "state.hidden must be [2, 4] to fit … , got [1, 4]"),
        ({"state": lambda s: s._replace(memory=s.memory[..., 1:])},
         "state.memory must be [2, 5, 4] to fit … , got [2, 5, 3]"),
        ({"state": lambda s: s._replace(memory=s.memory[:, 1:])},
         "state.weights must be [2, 2, 4] to fit … , got [2, 2, 5]"),
        ({"state": lambda s: s._replace(read=None)}, "state.read must be a torch.Tensor, got None"),
        ({"state": lambda s: s._replace(cell=s.cell.double())}, "state.cell must be")],
    "LearnedPositions.forward": [({"offset": 7}, "x must be of 9 positions at most, got 10")],
    "MultiHeadAttention": [
        ({"num_heads": 3}, "num_heads must divide attn_dim 4, got 3"),
        ({"score": "general"}, "score must be 'dot' or 'additive', got 'general'"),
        ({"positions": modules.RelativePositions(4, 3)},
         "positions must be RelativePositions of 2 heads")],
    "LuongAttention": [
        ({"score": "dot", "query_dim": 5},
         "query_dim must equal key_dim for score 'dot', got 5 and 4")],
    "BahdanauAttention.prepare": [
        ({"values": zeros(2, 4, 3)}, "values must be [2, 5, Dv] to fit the states")],
    "MultiHeadAttention.prepare": [
        ({"values": zeros(2, 5, 3)}, "values must be [2, 5, 4] to fit the states")],
    "BahdanauAttention.forward": [
        ({"memory": made("LocalAttention").prepare(zeros(2, 5, 4))},
         "memory must be prepared for an additive score, … one for dot")],
    "LocalAttention.forward": [
        ({"memory": made("BahdanauAttention").prepare(zeros(2, 5, 4))},
         "memory must be prepared for a dot score, … one for tanh")],
    "CoverageAttention": [
        ({"fertility": 0.0}, "fertility must be a positive number"),
        ({"penalty": ones(1)}, "penalty must be a finite number, a")],
    "LocationAwareAttention": [({"width": 4}, "width must be odd and at least 1, got")],
    "LocalAttention": [
        ({"window": -1}, "window must be a number … got -1"),
        ({"slope": -1}, "slope must be a number of at least 0 … got -1"),
        ({"sigma": 0.0}, "sigma must be a positive number or None, got 0"),
        ({"sigma": None}, "height must be a number with a sigma, or")],
    "LocalPredictiveAttention": [({"window": 0}, "window must be at least 1, got 0")],
    "SparseSelfAttention": [
        ({"heads": [Span()] * 3, "positions": None}, "num_heads must divide attn_dim 4, got 3")],
    "TransformerEncoder": [
        ({"heads": None, "hidden_dim": 3}, "hidden_dim must be even for … of four heads, got 3"),
        ({"heads": [Span()] * 4, "hidden_dim": 3},
         "heads must be as many as divide 2 · hidden_dim, 6, got")],
    "TransformerEncoderLayer": [
        ({"attention": made("BahdanauAttention")},
         "attention must be a SparseSelfAttention, got BahdanauAtt")],
    "Config": [
        ({"hidden_dim": 3}, "hidden_dim must be even for … of four heads, got 3"),
        ({"hidden_dim": 3, "encoder": "transformer", "self_attention": False},
         "hidden_dim must be even for … of four heads, got 3"),
        ({"dropout": 1.0}, "dropout must be … of at least 0 and below 1, got 1.0"),
        (CONTENT | {"sigma": 2.0}, "sigma must be left out for attention 'bahdanau', got 2.0"),
        (CONTENT | {"fixed_stride": True},
         "fixed_stride must be False for attention 'bahdanau', got True"),
        (CONTENT | {"attention": "none"},
         "pointer_generator must be False for attention 'none', got True"),
        ({"sigma": None}, "gaussian_height must be None without a sigma, got 2.0"),
        ({"pointer_generator": False}, "copy_gate must be state without a pointer-generator, got"),
        ({"positions": "learned"}, "positions must be sinusoidal for an RNN encoder, got learned"),
        ({"residual": True}, "residual must be False without RNN layers above, got True"),
        ({"query_layer": "first"}, "query_layer must be last with input feeding, got first"),
        ({"decoder_layers": 1, "query_layer": "first"}, "query_layer must be last with one decod"),
        (CONTENT | {"attention": "forward", "filter_width": 5},
         "filter_width must be 31 without filters, got 5"),
        ({"filter_width": 4}, "filter_width must be 31 for attention 'local', got 4"),
        (CONTENT | {"attention": "location", "filter_width": 4}, "filter_width must be odd, got 4"),
        (CONTENT | {"attention": "multihead", "heads": 3},
         "heads must be a divisor of hidden_dim 4, got 3"),
        ({"sigma": 0.0}, "sigma must be a number above 0, got 0"),
        ({"length_ratio": -1.0}, "length_ratio must be")],
    "GatedAttention": [({"attention": nn.Linear(2, 2)}, "attention must be a module of attnfast")],
    "HardAttention": [
        ({"attention": made("CoverageAttention")}, "must be one without a history"),
        ({"attention": made("GatedAttention")},
         "attention must be ungated (use GatedAttention(HardAttention(...), ...)), got"),
        ({"attention": made("MultiHeadAttention")}, "must be one without heads"),
        ({"attention": models.MeanContext()}, "must be one with weights to draw by, got Mea"),
        ({"average": 1.5}, "average must be a probab")],
    "TopKAttention": [
        ({"attention": made("CoverageAttention")},
         "attention must be a BahdanauAttention or LuongAttention")],
    "MultiHopAttention.prepare": [
        ({"sources": [zeros(2, 5, 4)] * 2}, "sources must be 3 tensors with adjacent tying, got 2"),
        ({"sources": [zeros(2, n, 4) for n in (5, 5, 2)]},
         "sources must be all of the same [B, Tk, 4], got a")],
    "MemoryNetwork.forward": [
        ({"stories": ones(2, 51, 5).long()}, "stories must be of 50 sentences at most, got 51"),
        ({"stories": full((2, 3, 5), 9)}, "stories must be word ids between 0 and 8, got 9"),
        ({"questions": full((2, 5), -1)}, "questions must be word ids between 0 and 8, got -1"),
        ({"questions": ones(1, 5).long()},
         "questions must be 2, one of each of the stories, got 1")],
    "ShowAttendTell": [
        ({"vocab_size": 4}, "vocab_size must be at"),
        *(({"attention": x}, f"attention must be one that knows no order of keys and … got {name}")
          for name in ORDERED
          for x in (made(name), modules.GatedAttention(made(name), 4)))],
    "ShowAttendTell.forward": [
        ({"images": full((2, 1, 8, 6), nan)}, "images must be finite numbers, got NaN"),
        ({"sizes": zeros(2, 2).long()}, "heights from 2, a cell, to 8, got 0"),
        ({"sizes": ones(2, 2).long()}, "heights from 2, a cell, to 8, got 1"),
        ({"sizes": full((2, 2), 16)}, "heights from 2, a cell, to 8, got 16"),
        ({"target_in": full((3, 3), 4)}, "as many captions of each of 2 images, got 3"),
        ({"target_in": full((2, 3), 9)}, "target_in must be word ids between 0 and 8"),
        ({"target_in": full((2, 3), -1)}, "word ids between 0 and 8, got -1")],
    "ShowAttendTell.decode": [
        ({"words": full((2, 3), 9)}, "words must be word ids between 0 and 8, got")],
    "GridEncoder": [({"strides": (1, 2)}, "strides must be 1, one for each layer")],
    "Reinforce": [
        ({"weight": -1.0}, "weight must be a number, at least 0, got"),
        ({"decay": 1.0}, "decay must be at least 0 and below 1, got")],
    "LogMel": [
        ({"mels": 100}, "mels must be fewer for 16 samples at 400 Hz"),
        ({"hop": 0}, "hop must be seconds, of a sample at least, got 0")],
    "LogMel.forward": [
        ({"samples": full((2, 40), nan)}, "samples must be finite numbers, got NaN"),
        ({"samples": zeros(2, 9), "lengths": tensor([9, 9])},
         "samples must be at least 10 for each recording, got 9"),
        ({"lengths": tensor([40, 9])}, "lengths must be at least 10, a window, got 9"),
        ({"lengths": tensor([40, 0])}, "lengths must be between 1 and 40 to fit samples, got 0")],
    "FeatureNormalizer.forward": [
        ({"speaker": tensor([0, 2])}, "speaker must be between 0 and 1, got 2"),
        ({"speaker": tensor([-1, 0])}, "speaker must be between 0 and 1, got -1"),
        ({"lengths": tensor([6, 5])}, "lengths must be between 0 and 5 to fit features, got 6"),
        ({"lengths": tensor([5, -1])}, "lengths must be between 0 and 5 to fit features, got -1")],
    "FeatureNormalizer.fit": [
        ({"recordings": [full((3, 4), nan)] * 2}, "recordings must be finite numbers, got NaN"),
        ({"speakers": [0, 2]}, "speakers must be below 2, got 2")],
    "SpecAugment": [({"share": 2}, "share must be a number from 0 to 1, got 2")],
    "SpecAugment.forward": [
        ({"lengths": tensor([6, 5])}, "lengths must be between 0 and 5 to fit features, got 6"),
        ({"lengths": tensor([5, -1])}, "lengths must be between 0 and 5 to fit features, got -1")],
    "scheduled_sampling": [({"share": 2}, "share must be a number from 0 to 1, got 2")],
    "hybrid_loss": [
        ({"ctc_weight": 2}, "ctc_weight must be … from 0 to 1, got 2"),
        ({"ctc_weight": 1.0, "target_out": full((2, 3), 9)},
         "target_out must be word ids between 0 and 8, got 9"),
        ({"ctc_weight": 1.0, "target_out": full((2, 3), -1)},
         "target_out must be word ids between 0 and 8, got -1"),
        ({"target_out": full((2, 4), 4)},
         "target_out must be word ids [2, 3], as the logits of output, got")],
    "ListenAttendSpell.encode": [
        ({"frames": full((2, 5, 4), inf)}, "frames must be finite numbers, got NaN or infinity"),
        ({"frames": zeros(2, 0, 4), "lengths": zeros(2).long()},
         "frames must be at least 2, … got 0"),
        ({"lengths": tensor([5, 1])}, "lengths must be at least 2, the frames … got 1"),
        ({"lengths": tensor([6, 2])}, "lengths must be between 1 and 5 to fit frames, got 6")],
    "beam_search": [
        ({"scorer_weight": 1.5}, "scorer_weight must be a number from 0 to 1, got 1.5"),
        ({"lengths": tensor([3])}, "lengths must be one for each of 2 sentences, as source, got"),
        ({"n_best": 3}, "n_best must be at most the beam of 2, got 3"),
        ({"max_length": 2, "min_length": 3}, "max_length must be at least min_length, 3, got 2"),
        ({"coverage_penalty": -1.0}, "coverage_penalty must be between 0 and 64, got -1.0"),
        ({"forbidden": [0, 3]}, "forbidden must be without the end, 3, got [0, 3]"),
        ({"prefix": [[5]]}, "prefix must be of 2 sentences, got 1"),
        ({"prefix": [[5, 6], [4] * 4]}, "prefix must be of at most max_length = 3 words, got 4"),
        ({"prefix": [[5, 1], []]}, "prefix must be of words that may come, got 1"),
        ({"prefix": [5, 6]}, "prefix must be a list of word ids for each sentence, got [5, 6]"),
        ({"word_mask": tensor([True] * 99)}, "word_mask must be [V] or [B, V] with V = "),
        ({"length_bonus": 1e5}, "length_bonus must be between -64 and 64, got 100000.0"),
        ({"length_penalty": 1e5}, "length_penalty must be between -64 and 64, got 100000.0"),
        ({"length_penalty": -1e5}, "length_penalty must be between -64 and 64, got -100000.0"),
        ({"scorer": models.CTCPrefixScorer},
         "scorer must be an object with score(...), or None, got"),
        ({"scorer": models.CTCPrefixScorer()},
         "encoded must be of a model with frame_log_probs, as ListenAttendSpell's, got Encoded")],
    "sample": [
        ({"temperature": 0.0}, "temperature must be a finite number above 0, got 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"generator": 3},
         "generator must be a torch.Generator, one for each sentence, or None, got 3"),
        ({"generator": [default_generator]},
         "generator must be one for each of 2 sentences, got 1")],
    "AttentionGRU": [
        ({"query_layer": "first"}, "query_layer must be 'last' with input"),
        ({"recurrence": "attend_first"}, "output_size must be None without input feeding, got 4"),
        ({"dropout": 1.0}, "dropout must be a probability below 1, got 1.0"),
        ({"attention": nn.Linear(2, 2)},
         "attention must be a module of attnfast.nn, got Linear")],
    "AttentionGRU.forward": [
        ({"input": zeros(2, 4)}, "input must be [B, T, 4], got [2, 4]"),
        ({"input": zeros(1, 3, 4)}, "memory must be of 1 sources"),
        ({"hx": zeros(2, 4)}, "hx.hidden must be [1, 2, 4]"),
        ({"hx": (None, None)}, "hx.hidden must be a torch.Tensor, got None"),
        ({"hx": STATE._replace(feed=zeros(2, 4))},
         "hx.feed must be None with recurrence 'attend_first'"),
        ({"hx": STATE._replace(history=1)}, "hx.history must be None for attention"),
        ({"hx": STATE._replace(hidden=STATE.hidden.double())},
         "hx.hidden must be torch.float32 on cpu"),
        ({"hx": (STATE.hidden, STATE.hidden)}, "hx.cell must be None"),
        ({"target_lengths": tensor([4, 1])}, "target_lengths must be betw")],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    call, wrong = CALLS[name], []
    for changes, message in MESSAGES[name]:
        changed = {k: x(call.arguments[k]) if isinstance(x, FunctionType) else x
                   for k, x in changes.items()}  # fmt: skip
        with pytest.raises((ValueError, TypeError)) as error:
            call.function(**call.arguments | changed)
        text = str(error.value)
        if not all(part in text for part in message.split(" … ")) or "\n" in text:
            wrong.append(f"{changes}: {text}")
    assert wrong == []
