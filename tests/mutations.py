"""The faults that tests/mutants.py plants: a file and its tests, a function, a pattern, a fault.

One line each, as a slip of the hand would make it: a term left out, a bound off by one, a sign, a
case forgotten. A change that no test can tell from the right code (a shortcut not taken) is none.
"""

OURS = "not (triton or cuda or reference or fuzz or compile or opcheck or gradcheck)"
ENTMAX = "tests/test_entmax.py -k 'cpu or many'"
CPU = f"tests/test_attention.py -k '{OURS}'"
ORACLE = "tests/test_attention.py -k '(reference or scale) and not (check or compile or fuzz)'"
STEPS = f"tests/test_memory.py -k '{OURS}'"
GROWING = f"tests/test_growable.py -k '{OURS}'"
HISTORY = f"tests/test_coverage.py -k '{OURS}'"
SPANS = f"tests/test_span.py -k '{OURS}'"
TRITON = "tests/test_attention.py -k 'triton and not fuzz and not check and not compile'"
TRITON_HISTORY = "tests/test_coverage.py -k 'triton and not fuzz and not check and not compile'"
CONTRACTS = "tests/test_model_contracts.py -k '{}'"
MESSAGES = "tests/test_error_messages.py tests/test_arguments.py -k '{}'"
RECURRENT = "tests/test_recurrent.py -k 'cpu and (table or fuzz or nothing or bits)'"
CUDA = "tests/test_cuda_on_host.py -k '{}'"
DECODERS = "tests/integrations/test_search_decoders.py -k '{}'"

FAULTS: dict[tuple[str, str], dict[str, list[tuple[str, str]]]] = {
    ("attnfast/decoding/deferred.py",
     "tests/test_coverage.py -k 'in_place_between or hidden_rows'"): {
        "SharedKeys.features": [("a[0] is not b[0] or a[1] != b[1]", "a[0] is not b[0]")],
        "DeferredKeyGradients.backward": [(".masked_fill(hidden, 0)", "")],
    },
    ("attnfast/decoding/deferred.py", STEPS): {
        "SharedKeys.matches": [
            ("and source[4] == score", ""),
            ("source[0] is key", "True"),
        ],
        "DeferredKeyGradients.backward": [
            ("scale=1.0, score=ctx.shared.score,", "scale=1.0, score='tanh',"),
        ],
        "SharedKeys.check_unchanged": [("if x._version != version:", "if False:")],
        "SharedKeys.defers": [
            ("number_of_backward() == self.task", "number_of_backward() != -2"),
            ("if has_saved_tensor_hooks():", "if False:"),
        ],
        "SharedKeys.key_exponentials": [("if has_dispatch_mode():", "if False:")],
        "no_double_backward.run": [("if not torch.is_grad_enabled() or not roots:", "if True:")],
    },
    ("attnfast/decoding/deferred.py", "tests/test_memory.py -k several"): {
        "DeferredKeyGradients.backward": [
            ("zip(grads, new_grads)) if grads", "zip(grads, new_grads)) if False"),
        ],
        "Step.backward": [("grad_score = grad_score * call.scale", "pass")],
    },
    ("attnfast/ops/operators.py", "tests/test_attention.py -k 'table and cpu'"): {
        "Operator.of_bias": [("grad_score.sum_to_size(shape).to(dtype)", "grad_score * 0")],
    },
    ("attnfast/decoding/deferred.py", HISTORY): {
        "HistoryStep.backward": [("gradients.grad_score * call.scale", "gradients.grad_score")],
    },
    ("attnfast/decoding/memory.py", CONTRACTS.format("reorder and fertility")): {
        "Memory.index_select": [
            ('names = ("key", "value", "lengths", "mask", "fertility")',
             'names = ("key", "value", "lengths", "mask")'),
        ],
    },
    ("attnfast/decoding/memory.py", f"tests/test_local.py {STEPS}"): {
        "attend": [
            ("plain = plain and not isinstance(need_weights, str)", "pass"),
        ],
    },
    ("attnfast/decoding/memory.py", CONTRACTS.format("strided")): {
        "attend": [
            ("isinstance(within.span, Span) and within.span.stride == 1",
             "isinstance(within.span, Span)"),
        ],
    },
    ("attnfast/nn/ntm.py", CONTRACTS.format("Turing")): {
        "NTMState.index_select": [("x.index_select(0, index) for x in self", "x for x in self")],
    },
    ("attnfast/decoding/growable.py", GROWING): {
        "copy_reason": [
            ("newest is not old", "False"),
            ("old.shape[-2] + new.shape[-2] > buffer.rows.shape[-2]", "False"),
        ],
        "GrowableBuffer.write": [
            ("self.rows.data.narrow(-2, start, rows)", "self.rows.narrow(-2, start, rows)"),
        ],
        "GrowableBuffer.like": [("with torch.inference_mode(False):", "if True:")],
        "GrowableBuffer.key_exponentials": [
            ("if self._exponentials_for != (backend, score):", "if self._kept_for is None:"),
            ("start == 0 or self._exponentials is not None", "True"),
        ],
        "append_rows": [
            ("2 * (old.shape[-2] + new.shape[-2])", "old.shape[-2] + new.shape[-2]"),
            ("buffer.write(0, old)", ""),
        ],
        "_Appended.backward": [
            ("return grad[..., : ctx.rows, :], new, None", "return None, new, None"),
        ],
    },
    ("attnfast/decoding/memory.py", GROWING): {
        "Memory.append": [
            ("value=True)", "value=False)"),
            ("lengths=None,", ""),
            ("is_tracing() or has_dispatch_mode()", "is_tracing()"),
            ("_usable(self.shared_keys)", ""),
        ],
        "Memory._whole_mask": [("else seen & mask", "else seen")],
        "Memory._with_shared_keys": [("self.mask, self.buffers[0])", "self.mask)")],
    },
    ("attnfast/nn/attention.py", GROWING): {
        "_Attention._keys": [("key, states if values is None else values", "key, states")],
    },
    ("attnfast/ops/reference.py", ORACLE): {
        "visible_keys": [("visible = visible & (call.bias != -math.inf)", "pass")],
        "attention": [("e = call.scale * score(call.query, k,", "e = score(call.query, k,")],
    },
    ("attnfast/ops/reference.py", "tests/test_statistics.py -k 'nowhere and reference'"): {
        "row_statistics": [(".masked_fill(largest.isnan(), math.nan)", "")],
    },
    ("attnfast/ops/reference.py", CPU): {
        "attention": [
            ("log_sum_exp = log_sum_exp.masked_fill(empty.squeeze(-1), -math.inf)", "pass"),
        ],
        "score": [("ACTIVATIONS[name](features)", "features.tanh()")],
    },
    ("attnfast/functional.py", CPU): {
        "_attend": [
            ("scale=max(call.query.shape[-1], 1) ** -0.5",
             "scale=max(call.query.shape[-1], 1) ** 0.5"),
            ("(temperature, call.scale, call.bias)", "(temperature, call.scale, None)"),
        ],
    },
    ("attnfast/ops/attention.py", CPU): {
        "": [('("key", "value", "score_vector")', '("key", "value")')],
    },
    ("attnfast/ops/arguments.py", "tests/test_models.py tests/test_multi_hop.py"): {
        "length_mask": [("< lengths.unsqueeze(-1)", "<= lengths.unsqueeze(-1)")],
    },
    ("attnfast/ops/scores.py", "tests/test_scores.py -k 'not triton'"): {
        "_gradients": [
            ("weights=grad, grad_score=grad,", "weights=grad, grad_score=2 * grad,"),
            ("need_grad_key=any(need_keys)", "need_grad_key=need_keys[0]"),
        ],
    },
    ("attnfast/functional.py", SPANS): {
        "_attend": [("sigma * temperature**0.5", "sigma * temperature")],
    },
    ("attnfast/ops/lowering.py", SPANS): {
        "_strided_keys": [("(lengths + (k - 1)).div(k", "lengths.div(k")],
        "_in_phases": [("score_vector.repeat_interleave(k, 0)", "score_vector.repeat(k, 1)")],
        "lower": [
            ("query.shape[-2], Tk) % span.stride", "query.shape[-2], Tk) * 0"),
            ("prior if call.bias is None else call.bias + prior", "prior"),
            ("query = query.masked_fill(lost, math.nan)", "pass"),
        ],
        "run_within": [
            ("neighbours = all(index[-1] - index[0] < len(index) for index in groups.values())",
             "neighbours = True"),
        ],
    },
    ("attnfast/spans.py", SPANS): {
        "Span.locate": [
            (".nan_to_num(0)", ""),
            ("(p + right).floor()", "(p + right).ceil()"),
            ("phase = 0 if self.fixed else p % k", "phase = p % k"),
        ],
        "_check_place": [("*[1] * (position.dim() - 2)", "")],
        "Span.sides": [("return left, 0 if self.causal else right", "return left, right")],
        "Span.columns": [
            ("right // self.stride + 1", "right // self.stride"),
            ("return ceil_div(Tk, self.stride)", "return Tk // self.stride"),
        ],
        "first_position": [
            ('return Tk - Tq if position == "end"', 'return Tq - Tk if position == "end"'),
        ],
        "positions": [("return rows * ends / max(Tq, 1)", "return rows * Tk / max(Tq, 1)")],
        "log_prior": [("return -0.5 * ((keys", "return -1.0 * ((keys")],
    },
    ("attnfast/ops/span.py", SPANS): {
        "bounds_in_phases": [
            ("(row < 0) | (row >= Tq)", "row >= Tq"),
            ("stop = torch.minimum(stop, ceil_div(ends - phase, k))", "pass"),
        ],
        "": [("inside, 0))\n\n\ndef to_columns", "inside, 1))\n\n\ndef to_columns")],
    },
    ("attnfast/ops/reference.py", HISTORY): {
        "coverage_attention": [
            ("(p if call.inverse_fertility is None else call.inverse_fertility * p)", "p"),
            ("seen = seen & (log_r != -math.inf)", "pass"),
            ("e = e - call.penalty.unsqueeze(-1) * c", "e = e - call.penalty.unsqueeze(-1)"),
        ],
        "log_transition": [
            ("pad(log_p, (1, 0), value=-math.inf)[..., :-1]",
             "pad(log_p, (0, 1), value=-math.inf)[..., 1:]"),
        ],
    },
    ("attnfast/ops/coverage.py", HISTORY): {
        "": [('("filters", "projection"),\n    },', '("filters",),\n    },')],
    },
    ("attnfast/ops/coverage.py", MESSAGES.format("coverage_attention")): {
        "check_history": [("or filters.shape[-1] % 2 == 0:", ":")],
    },
    ("attnfast/ops/copying.py", MESSAGES.format("copy")): {
        "check": [("or not 0 <= num_oov < 2**31", "or not -1 <= num_oov < 2**31")],
        "check_words": [("if not 0 <= word < count:", "if not 0 <= word <= count:")],
    },
    ("attnfast/ops/reference.py", "tests/test_copying.py -k 'not triton and not fuzz'"): {
        "copy_distribution": [("masked_fill(never, LOWEST)", "masked_fill(never, -math.inf)")],
    },
    ("attnfast/ops/arguments.py", MESSAGES.format("dot_attention or additive")): {
        "check_terms": [("if not 0 <= length <= keys:", "if not 0 <= length:")],
        "check_scale": [("if not is_finite(scale):", "if False:")],
        "check_inputs": [("if v[:-1] != k[:-1]:", "if v[:-2] != k[:-2]:")],
    },
    ("attnfast/ops/arguments.py", "tests/test_attention.py -k autocast"): {
        "autocast": [("narrow = (torch.float32, *HALF)", "narrow = (torch.float32,)")],
    },
    ("attnfast/_utils/torch_private.py", "tests/test_attention.py -k forward_mode"): {
        "has_tangents": [("forward_ad._current_level >= 0", "forward_ad._current_level > 0")],
    },
    ("attnfast/ops/operators.py", "tests/test_attention.py -k lies_in"): {
        "empty_rows": [("key=lambda axis: -lead[axis]", "key=lambda axis: lead[axis]")],
    },
    ("attnfast/ops/operators.py", "tests/test_attention.py -k gradcheck"): {
        "accumulation_dtype": [
            ("torch.float64 if dtype == torch.float64 else torch.float32", "torch.float32"),
        ],
    },
    ("attnfast/nn/attention.py", "tests/test_nn.py -k 'not compile and not parallel'"): {
        "_Attention._attend": [("(self.temperature, scale, ", "(1 / self.temperature, scale, ")],
        "LuongAttention.__init__": [('None if score.startswith("scaled") else 1.0', "1.0")],
        "_Attention.__init__": [
            ("bound = weight_shape[-1] ** -0.5", "bound = weight_shape[-1] ** 0.5"),
        ],
        "BahdanauAttention.__init__": [
            ("self.query_proj = nn.Linear(query_dim, attn_dim, bias=bias)",
             "self.query_proj = nn.Linear(query_dim, attn_dim, bias=True)"),
        ],
    },
    ("attnfast/nn/multi_hop.py", "tests/test_multi_hop.py"): {
        "MultiHopAttention.forward": [
            ("memory.memories[k if self.tying", "memory.memories[0 if self.tying"),
            ("if len(memory.memories) != wanted:", "if False:"),
            ("at.shared_keys.check_unchanged()", "pass"),
            ("check_like(name, x, next(self.parameters(), key), whose)", "pass"),
            ("u = self.between(u) + context", "u = u + context"),
        ],
        "_scores": [
            ("length_mask(memory.lengths, ", "length_mask(memory.lengths.amax(0, True), "),
            ("scores.masked_fill(~memory.mask, unseen)", "scores"),
        ],
        "TopKAttention.forward": [
            ("seen = index < keys.lengths", "seen = index < 1 + keys.lengths"),
            ("seen = seen & of.reshape", "seen = seen | of.reshape"),
            ("flat = index.reshape(len(index), Tq", "flat = 0 * index.reshape(len(index), Tq"),
            ("dense.scatter(-1, index,", "dense.scatter(-1, index.flip(-1),"),
        ],
        "TopKAttention.choose": [("_scores(rows, keys, -torch.inf)", "_scores(rows, keys, 0)")],
    },
    ("attnfast/models/memory_network.py", "tests/test_multi_hop.py -k network"): {
        "position_encoding": [
            ("* there.unsqueeze(-1)", ""),
            ("- k / features * (1 - 2 * share)", "- k / features * (1 - share)"),
        ],
        "MemoryNetwork.forward": [
            ("lengths.unsqueeze(-1) - 1 - torch", "lengths.unsqueeze(-1) - torch"),
            ("pad(last, (1, 0)).amax(-1)", "pad((last > 0).long(), (1, 0)).sum(-1)"),
        ],
        "MemoryNetwork.__init__": [("self.output.weight = last.weight", "pass")],
    },
    ("attnfast/models/memory_network.py", "tests/test_float64.py"): {
        "position_encoding": [("dtype=accumulation_dtype(dtype), device", "device")],
    },
    ("attnfast/models/classifier.py", "tests/test_float64.py"): {
        "Classifier.read": [("exists.to(accumulation_dtype(states.dtype)) /", "exists /")],
    },
    ("attnfast/decoding/_constraints.py", "tests/test_float64.py"): {
        "Constraints.log_probs": [
            ("logits.to(accumulation_dtype(logits.dtype))", "logits.float()"),
        ],
    },
    ("attnfast/analysis/diagnostics.py", "tests/test_float64.py"): {
        "monotonicity": [("back.sum(-1, dtype=of.weights.dtype)", "back.sum(-1)")],
    },
    ("attnfast/analysis/faithfulness.py", "tests/test_float64.py"): {
        "erasure": [("(~hidden).sum(-1, dtype=output.dtype)", "(~hidden).sum(-1)")],
    },
    ("attnfast/nn/bidirectional.py", "tests/test_bidaf.py"): {
        "BidirectionalAttention.forward": [
            ("+ statistics.max_weight.log()", ""),
            ("+ self.text_proj(text).squeeze(-1)", ""),
            ("bias=self.question_proj(question).mT,", ""),
            ("lengths=question_lengths,", ""),
            ('largest.masked_fill(beyond["text"], -torch.inf)', "largest"),
        ],
    },
    ("attnfast/models/_checks.py", MESSAGES.format("BiDAF")): {
        "check_ids": [
            ("words, 0, count - 1,", "words, 0, count,"),
            ("words, 0, count - 1,", "words, -1, count - 1,"),
        ],
        "embed": [("check_ids(name, words, embedding.num_embeddings)", "")],
    },
    ("attnfast/models/_checks.py", MESSAGES.format("BiDAF or Character")): {
        "check_characters": [
            ("embedding.num_embeddings - 1,", "embedding.num_embeddings,"),
            ("characters, 0,", "characters, -1,"),
            ("if not characters.shape[2]:", "if False:"),
        ],
    },
    ("attnfast/models/bidaf.py", MESSAGES.format("BiDAF")): {
        "BiDAF.__init__": [('check_int("highway_layers", highway_layers, least=0)', "")],
        "BiDAF.forward": [("elif characters is not None:", "elif False:")],
    },
    ("attnfast/models/embeddings.py", "tests/test_embeddings.py"): {
        "CharacterCNN.__init__": [
            ("padding=kernel_size // 2", "padding=kernel_size - 1"),
            ("padding_idx=PAD", "padding_idx=None"),
        ],
        "CharacterCNN.forward": [
            ("* (words != PAD).unsqueeze(1)", ""),
            (".relu()", ""),
            ("self.dropout(self.embedding(words))", "self.embedding(words)"),
            (".amax(-1)", ".mean(-1)"),
        ],
        "HighwayNetwork.__init__": [("nn.init.constant_(gate.bias, GATE_BIAS)", "pass")],
        "HighwayNetwork.forward": [
            ("transform(x).relu()", "transform(x)"),
            (".relu() - x)", ".relu())"),
            ("gate(x).sigmoid()", "(1 - gate(x).sigmoid())"),
        ],
    },
    ("attnfast/models/bidaf.py", "tests/test_bidaf.py"): {
        "BiDAF.forward": [
            ("embedded = self.highway(embedded)", "pass"),
            ("[embedded, self.characters(characters)]", "[self.characters(characters), embedded]"),
            ("self.dropout(embedded)", "embedded"),
            ("self.ending(m, text_lengths)", "m"),
            (".masked_fill(beyond, -torch.inf)", ""),
        ],
        "best_spans": [
            ("else max_length - 1)", "else max_length)"),
            ("dtype=torch.bool, device=start.device).triu()",
             "dtype=torch.bool, device=start.device)"),
        ],
    },
    ("attnfast/nn/local.py", "tests/test_local.py -k m-"): {
        "LocalAttention.terms": [
            ("position=position, lengths=memory.lengths, device", "position=position, device"),
            ("self.sigma, height=self.gaussian_height", "self.sigma, height=1.0"),
            ('return {"sigma": self.sigma}', "return {}"),
        ],
    },
    ("attnfast/nn/attention.py", "tests/test_local.py -k formula"): {
        "_Attention._attend": [
            ("scale, bias = apply_temperature", "scale, _ = apply_temperature"),
            ("sigma * self.temperature**0.5", "sigma"),
        ],
    },
    ("attnfast/nn/attention.py", "tests/test_nn.py -k missing"): {
        "_Attention._wants_values": [
            ("(features or memory.value.shape[-1])", "(features or states.shape[-1])"),
        ],
    },
    ("attnfast/nn/attention.py", MESSAGES.format("MultiHead")): {
        "MultiHeadAttention.__init__": [
            ("isinstance(positions, RelativePositions) and len", "positions is not None and len"),
        ],
    },
    ("attnfast/nn/attention.py", "tests/test_nn.py"): {
        "_Unit.forward": [
            ("F.normalize(x.to(accumulation_dtype(x.dtype)), dim=-1)", "x"),
            ("x.to(accumulation_dtype(x.dtype))", "x"),
        ],
        "MultiHeadAttention._keys": [("(self.value_proj, values))", "(self.value_proj, states))")],
        "_Attention._keys": [
            ("return key, states if values is None else values", "return key, states"),
        ],
    },
    ("attnfast/ops/arguments.py", "tests/test_nn.py -k temperature"): {
        "apply_temperature": [
            ("check_temperature(temperature)", ""),
        ],
    },
    ("attnfast/decoding/memory.py", CONTRACTS.format("bump")): {
        "_attend_once": [
            ("exponentials, bias, normalisation", "exponentials, None, normalisation"),
        ],
    },
    ("examples/stories.py", "tests/test_multi_hop.py -k answers"): {
        "stays": [("found[-1] = (place_of.what, [x.at, place_of.at])", "pass")],
        "counting": [("held ^= {x.what}", "held |= {x.what}")],
        "paths": [
            ('f"the {a} is {OPPOSITE[way] if turned else way} of the {b}"',
             'f"the {a} is {way} of the {b}"'),
        ],
    },
    ("examples/stories.py", "tests/test_multi_hop.py -k learn_from"): {
        "draw_parts": [
            ("while (*story.sentences, story.question) in known:", "while False:"),
            ("(*x.sentences, x.question) for x in parts", "(*x.sentences, '') for x in parts"),
        ],
    },
    ("examples/stories.py", "tests/test_experiment.py -k stories"): {
        "Training.__init__": [('"linear_start", "learning_rate"', '"linear_start"')],
        "Training.judge": [("float(each.mean()) if len(each) else None", "float(each.mean())")],
    },
    ("examples/reading.py", "tests/test_bidaf.py -k 'answers or tested or ratings or values'"): {
        "pose": [
            ("first += len(others[0]) + 1", "first += len(others[0])"),
            ("first += len(others[0]) + 1", "pass"),
            ("or any(find(value, x) for x in others)", ""),
            ("== asked == left_out == 1", "== left_out == 1"),
            ("== asked == left_out == 1", "== asked == 1"),
            ("and find(another, others[0])", ""),
            ("or value in AMBIGUOUS", ""),
            ("if not any(distinguishes(", "if False and any(distinguishes("),
            ("if x != kind):", "):"),
        ],
        "ask": [
            ("one.texts[:i] + one.texts[i + 1 :]", "one.texts"),
            ("draw.sample(other.texts, 2)", "draw.choices(other.texts, k=2)"),
        ],
        "split": [
            ("if tuple(y) not in known]", "]"),
            ("and words not in texts", ""),
        ],
    },
    ("attnfast/nn/positions.py", "tests/test_positions.py"): {
        "SinusoidalPositions.forward": [
            ("stack([angle.sin(), angle.cos()], -1)", "stack([angle.cos(), angle.sin()], -1)"),
        ],
        "LearnedPositions.forward": [
            ("self.weight[offset : offset + x.shape[1]]", "self.weight[: x.shape[1]]"),
        ],
        "RelativePositions.forward": [
            ("(keys - (offset + rows).unsqueeze(-1))", "((offset + rows).unsqueeze(-1) - keys)"),
        ],
    },
    ("attnfast/nn/transformer.py", "tests/test_positions.py"): {
        "TransformerEncoderLayer.forward": [
            ("self.norms[0](states), lengths=lengths", "states, lengths=lengths"),
            ("states = states + self.dropout(found)", "states = self.dropout(found)"),
            ("lengths=lengths, need_weights", "need_weights"),
        ],
    },
    ("attnfast/models/encoders.py", "tests/test_positions.py -k translator"): {
        "TransformerEncoder.__init__": [
            ("heads = [Span()] * 4 if heads is None else heads", "heads = [Span()] * 4"),
        ],
    },
    ("attnfast/models/encoders.py", MESSAGES.format("TransformerEncoder.")): {
        "TransformerEncoder.forward": [
            ('check_like("embedded", embedded, next(self.parameters(), embedded))', ""),
        ],
    },
    ("attnfast/nn/transformer.py", MESSAGES.format("TransformerEncoderLayer")): {
        "TransformerEncoderLayer.forward": [
            ('check_like("states", states, self.norms[0].weight)', "pass"),
        ],
    },
    ("attnfast/models/config.py", MESSAGES.format("Config")): {
        "Config.__post_init__": [
            ("self.hidden_dim % 2 and (self.self_attention or",
             "self.hidden_dim % 2 and (False or"),
        ],
    },
    ("attnfast/nn/stateful.py", "tests/test_stateful.py"): {
        "CumulativeState._after": [
            ("loss if self.loss is None else self.loss + loss,", "loss,"),
        ],
        "ForwardAttention.start": [("first[:, :1] = 1", "first[:, -1:] = 1")],
        "HistoryAttention.__init__": [("self.activation = activation", "pass")],
        "CoverageAttention.prepare": [
            ("fertility=self.fertility * logits.sigmoid()", "fertility=logits.sigmoid()"),
            ("logits.masked_fill(~seen.squeeze(-2)", "logits.masked_fill(seen.squeeze(-2)"),
        ],
        "LocationAwareAttention._terms": [
            ('"coverage" if self.channels == "coverage" else "previous"', '"previous"'),
        ],
        "LocationAwareAttention.__init__": [('1 + (channels == "both")', "1")],
        "LocationAwareAttention.start": [
            ("visible = visible * length_mask(memory.lengths, visible.shape[-1], visible)", "pass"),
            ("coverage=first, previous=first", "previous=first"),
        ],
    },
    ("attnfast/nn/local.py", "tests/test_local.py"): {
        "SpanState._after": [("self._replace(rows=self.rows + rows)", "self")],
        "HardMonotonicWindowAttention._rows": [
            ("best = key + best if self.span.compact else best", "pass"),
            ("if Tk and row.shape[1]:", "if Tk:"),
        ],
        "LocalPredictiveAttention._positions": [
            ("memory.lengths.unsqueeze(-1) * share", "memory.key.shape[-2] * share"),
        ],
        "LocalPredictiveAttention.forward": [
            ("sigma = (left or 0) / 2", "sigma = left or 0"),
            ("wide = sigma / self.temperature**0.5", "wide = sigma"),
            ("context = context * scale", "pass"),
        ],
    },
    ("attnfast/nn/local.py", CONTRACTS.format("of_the_target and m-")): {
        "_SpanAttention.forward": [
            ("(query.shape[1] if counted is None else counted.sum(-1))", "(query.shape[1])"),
        ],
    },
    ("attnfast/nn/local.py", "tests/test_nn_recurrent.py -k go"): {
        "HardMonotonicWindowAttention._rows": [
            ("torch.where(target_mask[:, t], best, key)", "best"),
        ],
        "StridedAttention.positions": [
            ("isinstance(rows, Tensor) and self.span.phases > 1", "False"),
        ],
    },
    ("attnfast/nn/_fused_rnn.py", "tests/test_nn_recurrent.py -k autocast"): {
        "run_layer": [("is_half(input) and not autocasts", "is_half(input)")],
        "runs_under_autocast": [("x.dtype in (torch.float32, dtype)", "False")],
    },
    ("attnfast/ops/packing.py", "tests/test_nn_recurrent.py -k autocast"): {
        "upcast_halves": [("if name in in_bfloat16 else", "if name == 'weight_ih' else")],
    },
    ("attnfast/nn/_fused_rnn.py", "tests/test_nn_recurrent.py -k go"): {
        "run_layer": [("input.shape[1] if lengths is None else lengths", "input.shape[1]")],
    },
    ("attnfast/nn/_layer_steps.py", "tests/test_nn_recurrent.py -k go"): {
        "run_steps": [("rows=first + target_lengths", "rows=target_lengths")],
    },
    ("attnfast/nn/pointer.py", "tests/test_stateful.py -k pointer"): {
        "PointerGenerator.forward": [
            ("log=log, backend", "log=True, backend"),
            ("num_oov=num_oov, log", "log"),
        ],
    },
    ("attnfast/losses.py", "tests/test_losses.py"): {
        "alignment_loss": [
            ("return loss + _unseen(aligned, inside, kind)", "return loss"),
            ("masked_fill(key_indices < 0, 0)", "masked_fill(key_indices < 1, 0)"),
        ],
        "_of_keys": [
            ("return loss.masked_fill(~exists, 0)", "return loss"),
            ("- 2 * aligned + 1)", "- 2 * aligned)"),
        ],
        "": [("SMALLEST = 1e-8", "SMALLEST = 1e-6")],
    },
    ("attnfast/decoding/search.py", MESSAGES.format("beam_search")): {
        "beam_search": [("if not least <= x <= MAX_WEIGHT:", "if x > MAX_WEIGHT:")],
        "_begin": [("isinstance(scorer, type) or", "")],
    },
    ("attnfast/decoding/search.py", "tests/test_decoding.py"): {
        "_Beams.step": [
            ("topk(min(2 * beam, beam * vocab))", "topk(beam + 1)"),
            ("total[:, 1:] = -math.inf", "pass"),
            ("total[..., end] -= self.length_bonus", "pass"),
            ("rows, words = index // vocab + first,", "rows, words = index // vocab,"),
            ("self.coverage = self.coverage[rows.flatten()]", "pass"),
            ("final = scores / normaliser", "final = scores"),
        ],
        "_Beams._uncovered": [(".masked_fill(~_keys_of(self.hypotheses.memory, logs), 0)", "")],
        "_Beams._finish": [("ends[:, :K] & scores[:, :K]", "ends & scores")],
        "_Beams._kept": [
            ("or max(x.score for x in finished) < ahead[i]", ""),
        ],
        "_normaliser": [("(5 + count) / 6", "(6 + count) / 7")],
        "_choose_each": [
            ("stuck |= ~ended & (scores == -math.inf)", "pass"),
            ("lengths += ~ended & ~stuck", "lengths += ~ended"),
        ],
        "sample": [("log_probs.double() / temperature", "log_probs * temperature")],
    },
    ("attnfast/decoding/_constraints.py", "tests/test_decoding.py"): {
        "repeated_ngrams": [("ngrams[..., -1]", "ngrams[..., 0]"), ("n > length", "n >= length")],
        "Constraints.log_probs": [
            ("(1 - share) * log_probs + share * other", "log_probs + share * other"),
            ("logits[:, word] = -math.inf", "pass"),
            ("mixed.masked_fill(log_probs == -math.inf, -math.inf)", "mixed"),
        ],
        "Constraints._hidden": [
            ("if length < self.min_length:", "if length <= self.min_length:"),
            ("self.limits[sentence] <= length + 1", "self.limits[sentence] <= length"),
            ("forced >= 0, another, hidden", "forced >= 0, another | hidden, hidden"),
        ],
    },
    ("attnfast/decoding/_constraints.py", "tests/test_search.py -k 'left_as or longer'"): {
        "search_limits": [("len(words) + 1 for words", "len(words) for words")],
        "Constraints.for_operator": [("self._padded_mask(V)", "self.word_mask")],
    },
    ("attnfast/ops/cuda_graphs.py", "tests/test_cuda_graphs.py"): {
        "_fill": [
            ("max=call.lengths[name]", "max=1 << 40"),
            ("-math.inf if name in call.logarithms else 0", "0"),
            ("target.fill_(-math.inf if name in call.logarithms else 0)", "pass"),
        ],
        "bucket": [("length.bit_length() - 4", "length.bit_length() - 3")],
        "_Stream.resize": [("self.graphs.clear()", "pass")],
        "_Stream._renew_pool": [("if not self.graphs:", "if not self.arena.numel():")],
        "_insert": [("entries.move_to_end(key)", "pass")],
        "Graphs._reason_against": [("return self.failure", "return None")],
        "Graphs._resized": [('name.removeprefix("grad_")', "name")],
        "Graphs._unpad": [
            ("copied = [y for x, y in zip(results, cut) if is_shared or y is not x]",
             "is_shared, copied = False, [y for x, y in zip(results, cut) if y is not x]"),
        ],
    },
    ("attnfast/ops/recurrent.py", "tests/test_cuda_on_host.py -k step_by_step"): {
        "runs_step_by_step": [
            ("B <= MAX_PERSISTENT_BATCH", "True"),
            ('call["input"].dtype == torch.float32 and', ""),
            ('"weight_gate",', ""),
            ("has_tanh and", ""),
        ],
    },
    ("attnfast/ops/self_check.py", "tests/test_cuda_graphs.py -k self_check"): {
        "_compare": [("if backend in operator.runners and", "if False and")],
    },
    ("attnfast/ops/search_steps.py", "tests/test_decoding.py"): {
        "draw_words": [
            ("sums <= numbers", "sums < 1 - numbers"),
            ("before >= top_p *", "before > 1.1 * top_p *"),
            ("probs[:, top_k:] = 0", "probs[:, top_k + 1 :] = 0"),
        ],
    },
    ("attnfast/ops/search_steps.py", "tests/test_search.py -k for_cpus"): {
        "search": [("if call.int8:", "if False:")],
    },
    ("attnfast/ops/search_steps.py", "tests/test_search.py -k triton"): {
        "_SearchState.of_rows": [('x.dim() - 2 if name in ("hidden", "cell") else 0', "0")],
        "_SearchState.attend": [("bounds.expand(-1, self.K, -1).contiguous()", "bounds")],
        "_SearchState.step": [
            (">= len(call.embedding), call.unknown", ">= len(call.embedding), 0"),
            ("self.history.copy_(self.history.index_select(0, row))", "pass"),
        ],
        "_SearchState.as_outputs": [("lengths.masked_fill(is_nan, -1)", "lengths")],
        "_BeamSearch.__init__": [("exists &= call.mask.squeeze(1)", "pass")],
        "_BeamSearch.outputs": [("* (rank == 0)", ""), ("index // self.K + 1", "index // self.K")],
        "_Sampling.continue_hypotheses": [("stuck | (says &", "(says &")],
    },
    ("attnfast/ops/search_steps.py", "tests/test_pretend_gpu.py -k shows"): {
        "_SearchState.step": [("torch.index_select(new, axis, row, out=state[name])",
                          "state[name] = torch.index_select(new, axis, row)")],
    },
    ("kernels/search.py", "tests/test_search.py -k triton"): {
        "_score_words": [
            ("<= t + 1", "<= t"),
            ("t < min_length", "t <= min_length"),
            ("tl.where(o_w == end, 0, _scalar(bonus, acc))", "_scalar(bonus, acc)"),
            ("tl.where(o_w == w + index,", "tl.where(o_w == index,"),
            ("p_word + o_best + r, w + index", "p_word + o_best + r, index"),
        ],
        "_forbid_repeats": [("o_i + n <= t", "o_i + n < t")],
        "_continue_beam": [
            ("m_end & (o_r < K)", "m_end"),
            ("b_final = b_best / norm", "b_final = b_best"),
            ("tl.store(p_length + i_b, t)", "pass"),
            ("tl.where(m_end_now, b_slot, -1)", "b_slot"),
            ("num_finished >= K", "num_finished > K"),
            ("coverage_penalty, acc) * b_lost", "coverage_penalty, acc)"),
        ],
        "_uncovered": [("tl.load(p_exists + o_k, mask=m_k, other=0) != 0", "o_k >= 0")],
        "_trace": [("parent = tl.where(is_end, slot, parent)", "parent = slot")],
    },
    ("attnfast/decoding/_constraints.py", "tests/test_models.py -k 'possible or said'"): {
        "Constraints.log_probs": [
            ("logits.masked_fill(logits == LOWEST, -math.inf)", "logits.clone()"),
            (".masked_fill(none, -math.inf)", ""),
        ],
    },
    ("attnfast/decoding/_hypotheses.py", "tests/test_decoding.py"): {
        "Hypotheses.append": [
            ("else self.judged.index_select(rows)", "else self.judged"),
            ("self.state = self.state.index_select(rows)", "pass"),
        ],
        "Hypotheses.trace_weights": [("last <= t, 0)], row)", "last <= t, 0)], row * 0)")],
        "collect": [("key=lambda y: -y.score", "key=lambda y: y.score")],
        "SearchOutput.hypotheses": [("if n or not i", "if True")],
    },
    ("attnfast/models/seq2seq.py", "tests/test_search.py"): {
        "Seq2Seq._select_search_backend": [("PAD not in constraints.forbidden or", "")],
        "Seq2Seq._search_inputs": [
            ("embedding_scale=words.embedding_dim**0.5,", ""),
            ('"unknown": UNK,', ""),
        ],
    },
    ("attnfast/nn/_fused_search.py", "tests/test_search.py tests/test_speech.py"): {
        "search_inputs": [
            ("begin=constraints.start,", "begin=constraints.end,"),
            ("len(embedding) + num_oov)", "len(embedding))"),
            ("state.hidden, state.cell", "state.hidden, state.hidden"),
        ],
    },
    (
        "attnfast/integrations/search_model.py", "tests/integrations/test_search_model.py",
    ): {
        "DecoderParts.search_inputs": [("embedding_scale=self.scale", "embedding_scale=1.0")],
        "find_words": [
            ("steps + 1", "steps + 2"),
            ("prefix=forced", "prefix=None"),
            ("not bool((start == first).all())", "False"),
            ("or not 0 <= first < V", ""),
            ("((forced >= -1) & (forced < V))", "(forced >= -1)"),
            ("if (found.lengths < (steps if end < 0 else 0)).any():", "if False:"),
            ("if parts.embedding.weight.dtype in HALF:", "if False:"),
            ("if is_tracing():", "if False:"),
        ],
        "SearchModel.encode": [
            ("if any(", "if False and any("),
            ("if reason := parts.skip_reason():", "if reason := '':"),
        ],
        "DecoderParts.skip_reason": [
            ("*self.wrappers", ""),
            ("not is_plain_table(self.embedding) or", ""),
            ("if self.output.out_features != self.embedding.num_embeddings:", "if False:"),
        ],
        "SearchModel.decode": [
            ("[..., : output.in_features]", "[..., -output.in_features :]"),
            ("(0, fed)", "(fed, 0)"),
            ("last[:, -1]", "None"),
        ],
        "make_search_model": [
            ("if len(known) != 1:", "if not known:"),
            ("len(more) == len(needed) and", ""),
            ('name != "model" or', "True or"),
        ],
    },
    ("attnfast/integrations/search_model.py", DECODERS.format("")): {
        "DecoderParts.attend": [('**options.get("terms", {})', "")],
        "DecoderParts.skip_reason": [("or not all(is_plain(x, *CELLS) for x in cells)", "")],
        "DecoderParts.search_inputs": [("if isinstance(attention, GatedAttention):", "if False:")],
        "find_words": [
            ("min(steps, int(search(steps, end).lengths.max()))", "steps"),
            ("int(search(steps, end).lengths.max())", "steps"),
        ],
        "check_all_visible": [("(lengths < states.shape[1]).any()", "False")],
        "EncodedSource.index_select": [("words=words", "words=self.words")],
        "SearchModel.encode": [
            ("source.flatten(1, -2)", "source"),
            ('check_like("source", source, next(self.decoder.parameters()), "the decoder\'s")', ""),
            (".masked_fill(~length_mask(lengths, Tk), 0)", ""),
        ],
        "SearchModel.decode": [("history=steps.history,", ""), ("words, gate", "words, -gate")],
    },
    ("attnfast/integrations/projects/clovaai.py", DECODERS.format("clovaai or sources")): {
        "parts_of": [("roll(-cell", "roll(cell")],
        "encode": [("check_all_visible(states, lengths)", "pass")],
        "Head.forward": [("torch.zeros(len(batch_H)", "torch.ones(len(batch_H)")],
    },
    ("attnfast/integrations/projects/sgrvinod.py", DECODERS.format("sgrvinod")): {
        "encode": [('{"gate": decoder.f_beta}', "{}")],
        "memory_of": [('score="relu"', 'score="tanh"')],
    },
    ("attnfast/integrations/projects/speechbrain.py", DECODERS.format("peech or attributes")): {
        "prepare_source": [
            ("key = key + attention.mlp_loc.bias", "pass"),
            ("CumulativeState(first, first)", "CumulativeState(first, 0 * first)"),
            ('{"scale": attention.scaling}', "{}"),
        ],
        "encode": [
            ("weight.roll(decoder.hidden_size, 1)", "weight"),
            ("F.linear(first.bias, last.weight, last.bias)", "last.bias"),
            ("copy.copy(decoder.attn)", "decoder.attn"),
            ('or getattr(linear, "max_norm", None) is not None', ""),
            ("(embedding, linear, last)", "(embedding, last)"),
        ],
    },
    ("attnfast/integrations/projects/espnet.py", DECODERS.format("ESPnet or espnet")): {
        "prepare_source": [
            ("key + attention.wvec.bias", "key"),
            ('{"scale": 2.0, **options}', "options"),
            ("history=history", ""),
        ],
        "encode": [
            ("if decoder.dlayers > 1:", "if False:"),
            ("copy.copy(decoder.att_list[0])", "decoder.att_list[0]"),
        ],
    },
    ("attnfast/integrations/projects/yoyodyne.py", DECODERS.format("yoyodyne")): {
        "parts_of": [
            ("table.weight[:V]", "table.weight[-V:]"),
            ("(gate.W_hs, gate.W_attention,", "(gate.W_attention, gate.W_hs,"),
            ("gate.modules()", "()"),
            ("or not is_plain_table(table)", ""),
        ],
        "encode": [
            ("words[:n]", "words"),
            ("if model.has_features_encoder:", "if False:"),
        ],
        "run_target": [
            ("end=END", "end=None"),
            ("if T < 2:", "if False:"),
            ("if target is None and drops:", "if False:"),
        ],
    },
    ("attnfast/integrations/projects/onmt.py", "tests/integrations/test_search_model.py"): {
        "encoded": [
            ('{"terms": {"normalisation": attention.attn_func}}', "{}"),
            ("decoder.state.update(kept)", "pass"),
        ],
        "encode_opennmt": [("len(tables) != 1 or", "")],
        "read": [("or not encoder.use_bridge:", ":"), ("embedded, None, lengths)", "embedded)")],
        "encode_eole": [("or words.normalize", "")],
    },
    ("attnfast/integrations/projects/joeynmt.py", "tests/integrations/test_search_model.py"): {
        "encode": [
            ("words.embedding_dim**0.5 if words.scale else 1.0", "1.0"),
            ("states[order.argsort()]", "states[order]"),
        ],
    },
    ("attnfast/integrations/projects/bentrevett.py", "tests/integrations/test_search_model.py"): {
        "encode": [("create_mask(words)[back]", "create_mask(words)")],
        "Steps.forward": [
            ("forced[:, predicted] = -1", "forced[:] = -1"),
            ("words.masked_fill(words < 0, decoder.embedding.num_embeddings)", "words.clone()"),
        ],
    },
    ("attnfast/decoding/_constraints.py", "tests/test_models.py -k 'limit'"): {
        "output_limit": [
            (".long() + 10)", ".long() + 11)"),
            (".clamp_min(longest)", ""),
        ],
    },
    ("attnfast/models/las.py", "tests/test_speech.py -k 'pyramid or odd or padding'"): {
        "join_frames": [
            ("(lengths + size - 1) // size", "lengths // size"),
            ("(0, 0, 0, -T % size)", "(0, 0, -T % size, 0)"),
        ],
        "PyramidEncoder.forward": [
            ("frames.masked_fill(~exists.unsqueeze(-1), 0)", "frames"),
        ],
    },
    ("attnfast/models/las.py", "tests/test_speech.py -k no_rec"): {
        "join_frames": [("B, -(-T // size), size", "B, -1, size")],
    },
    ("attnfast/models/las.py", "tests/test_speech.py -k 'hand or share'"): {
        "ListenAttendSpell.__init__": [('recurrence="attend_last"', 'recurrence="attend_first"')],
        "ListenAttendSpell._spell": [
            ("torch.cat([result.states, result.contexts], -1)",
             "torch.cat([result.contexts, result.states], -1)"),
        ],
        "ListenAttendSpell.output_limit": [
            ("return lengths.cpu() + 1", "return lengths.cpu() + 2"),
        ],
    },
    ("attnfast/models/ctc.py", "tests/test_speech.py -k 'prefix or impossible'"): {
        "CTCPrefixScorer.score": [
            ("torch.where(words == state.last, state.blank, entering)", "entering"),
            ("again = blank[:, :-1] +", "again = both[:, :-1] +"),
            ("blank = _walked(label, log_p[..., BLANK])",
             "blank = _walked(entering, log_p[..., BLANK])"),
            ("length_mask(encoded.lengths, ", "length_mask(encoded.lengths + 1, "),
            ("both.gather(-1, encoded.lengths.unsqueeze(-1)).squeeze(-1)", "both[:, -1]"),
            ("torch.where(total == -torch.inf, total, scores - total)", "scores - total"),
            ("log_p = log_p.double()", ""),
        ],
        "_walked": [
            ("(entering - product)[:, :-1]", "(entering - product)[:, 1:]"),
            ("if not (product > LEAST).all():", "if False:"),
            ("y[:, :-size] + product[:, size:]", "y[:, :-size] + product[:, :-size]"),
            ("longer = product[:, size:] + product[:, :-size]", "longer = product[:, size:]"),
        ],
    },
    ("attnfast/models/objectives.py", "tests/test_speech.py -k 'scheduled'"): {
        "scheduled_sampling": [
            ("logits.detach()[:, :-1]", "logits.detach()[:, 1:]"),
            ("< share) & (given > EOS)", "< share)"),
            ("before[..., EOS + 1 :].softmax(-1)", "before[..., EOS + 1 :].sigmoid()"),
            (".multinomial(1) + EOS + 1", ".multinomial(1) + EOS"),
            ("(chances < share)", "(chances > share)"),
        ],
    },
    ("attnfast/models/objectives.py", "tests/test_speech.py -k 'hybrid'"): {
        "hybrid_loss": [
            ("loss + (1 - ctc_weight) * own", "loss + own"),
            ("counts = (target_out > EOS).sum(-1)", "counts = (target_out > PAD).sum(-1)"),
            ("zero_infinity=True", "zero_infinity=False"),
            ("paths / counts.sum().clamp_min(1)", "paths / len(counts)"),
            ("labels = target_out.gather(1, first)", "labels = target_out"),
            ("log_probs.to(accumulation_dtype(log_probs.dtype))", "log_probs"),
            ("target_out = target_out.long()", ""),
        ],
        "_warn_of_long_texts": [
            ("(counts + repeats > states", "(counts > states"),
            ("& pairs).sum(-1)", ").sum(-1)"),
        ],
    },
    ("attnfast/models/objectives.py", "tests/test_trainer.py"): {
        "sequence_loss": [("label_smoothing=label_smoothing", "label_smoothing=0.0")],
    },
    ("attnfast/models/objectives.py", MESSAGES.format("hybrid_loss")): {
        "hybrid_loss": [
            ('"ctc_weight", ctc_weight, 0, 1', '"ctc_weight", ctc_weight, 0'),
            ('check_ids("target_out", target_out, V)', 'check_ids("target_out", target_out)'),
            ("if list(target_out.shape) != shape:", "if False:"),
        ],
    },
    ("attnfast/_utils/checks.py", MESSAGES.format("FeatureNormalizer")): {
        "check_range": [
            ("if not least <= number <= most:", "if not least <= number:"),
            ("if not least <= number <= most:", "if not number <= most:"),
        ],
        "check_numbers": [('"int64 or int32", (count,), of=of)', '"int64 or int32", of=of)')],
    },
    ("attnfast/nn/bidirectional.py", MESSAGES.format("Bidirectional")): {
        "BidirectionalAttention.forward": [
            ("text.shape[0], 1, x.shape[1], name)", "text.shape[0], 0, x.shape[1], name)"),
        ],
    },
    ("attnfast/models/bidaf.py", MESSAGES.format("best_spans")): {
        "best_spans": [("if x.isnan().any():", "if False:")],
    },
    ("attnfast/nn/attention.py", MESSAGES.format("Bahdanau or Local")): {
        "_Attention._attend": [
            ("if (memory.score_vector is None) != (self.score_vector is None):", "if False:"),
        ],
    },
    ("attnfast/nn/positions.py", MESSAGES.format("LearnedPositions")): {
        "LearnedPositions.forward": [
            ("offset + x.shape[1] > max_length", "x.shape[1] > max_length"),
        ],
    },
    ("attnfast/models/encoders.py", MESSAGES.format("TransformerEncoder")): {
        "TransformerEncoder.__init__": [("heads is None and self.output_dim % 4", "False")],
    },
    ("attnfast/models/las.py", MESSAGES.format("ListenAttendSpell")): {
        "PyramidEncoder.forward": [
            ("int(lengths.min()) < least", "int(lengths.max()) < least"),
            ("and not states.isfinite().all()", "and False"),
        ],
    },
    ("attnfast/speech.py", MESSAGES.format("FeatureNormalizer")): {
        "FeatureNormalizer.fit": [("if not x.isfinite().all():", "if False:")],
    },
    ("attnfast/models/show_attend_tell.py", MESSAGES.format("ShowAttendTell")): {
        "GridEncoder._check": [("self.stride <= pixels <= most", "0 < pixels <= most")],
        "ShowAttendTell.__init__": [
            ("vocab_size, EOS + 2)", "vocab_size, EOS + 1)"),
            ('getattr(inner, "knows_order", False)', 'getattr(attention, "knows_order", False)'),
        ],
    },
    ("attnfast/nn/wrappers.py", MESSAGES.format("HardAttention")): {
        "HardAttention.__init__": [("if isinstance(attention, GatedAttention):", "if False:")],
    },
    ("attnfast/nn/pointer.py", MESSAGES.format("PointerNetwork")): {
        "PointerNetwork._check": [("if not 1 <= length <= N", "if not 0 <= length <= N")],
    },
    ("attnfast/nn/ntm.py", MESSAGES.format("NeuralTuring")): {
        "NeuralTuringMachine._check": [("if slots < self.shift:", "if False:")],
    },
    ("attnfast/models/encoders.py", "tests/test_models.py -k no_state"): {
        "TransformerEncoder.forward": [
            ("* length_mask(lengths, states.shape[1], states).unsqueeze(-1)", ""),
        ],
    },
    ("attnfast/nn/bidirectional.py", CONTRACTS.format("Bidirectional")): {
        "BidirectionalAttention.forward": [
            ("x = x.masked_fill(beyond[name].unsqueeze(-1), 0)", "pass"),
        ],
    },
    ("attnfast/nn/stateful.py", CONTRACTS.format("of_the_target")): {
        "CumulativeState._after": [
            ("self.previous, lengths),", "self.previous, None),"),
            ("last_of(log_weights, first, lengths)", "last_of(log_weights, first, None)"),
        ],
        "last_of": [("torch.where((lengths > 0)", "torch.where((lengths >= 0)")],
        "HistoryAttention.forward": [("seen if mask is None else seen & mask", "seen")],
    },
    ("attnfast/models/las.py", CONTRACTS.format("speech")): {
        "EncodedSpeech.index_select": [("(x[index] for x in self[1:])", "self[1:]")],
    },
    ("attnfast/_utils/checks.py", "tests/test_arguments.py"): {
        "check_array": [
            ("if not fits or not KINDS[kind](x.dtype):", "if not fits:"),
            ("if not fits or not KINDS[kind](x.dtype):", "if not KINDS[kind](x.dtype):"),
        ],
        "check_device": [("x.is_meta and (like is None or not like.is_meta)", "False")],
        "check_tensor": [("x.layout != torch.strided or x.is_nested", "x.layout != torch.strided")],
        "check_range": [("if not is_readable(x) or not x.numel():", "if True:")],
    },
    ("attnfast/ops/backends.py", MESSAGES.format("PyramidEncoder")): {
        "check_backend": [
            ("backend is not None and (not isinstance(backend, str) or backend not in BACKENDS)",
             "False"),
        ],
    },
    ("examples/_experiment.py", "tests/test_experiment.py"): {
        "at_least.read": [("if not least <= number < 2**31:", "if False:")],
        "Trial.test": [('if self.found.get("asked") != self.test_settings:', "if not self.found:")],
        "learn_all": [
            ("if one.options.seed == 1:", "if True:"),
            ("(text, last(done))", "(text, last(done[:1]))"),
        ],
        "Trial.learn": [
            ("if not norm.isfinite():", "if False:"),
            ("self.step == self.steps or time", "time"),
        ],
        "Trial.save": [("if not all(p.isfinite().all() for p in self.parameters):", "if False:")],
        "Trial.__init__": [
            ('.replace(", ", "-")', ""),
            ("for x in settings | began if", "for x in settings if"),
            ("KeyError, RuntimeError, TypeError", "KeyError, RuntimeError"),
            ("KeyError, RuntimeError, TypeError", "KeyError, TypeError"),
        ],
        "Once.__call__": [("list(dict.fromkeys(values))", "list(values)")],
    },
    ("examples/speech.py", "tests/test_experiment.py -k 'speech or recordings'"): {
        "Digits.__init__": [
            ("if len(samples) < window:", "if False:"),
            ("for content in (name.encode(), samples.numpy().tobytes()):",
             "for content in (name.encode(),):"),
        ],
        "Training.__init__": [('"recordings": digits.fingerprint,', "")],
    },
    ("examples/reading.py", "tests/test_bidaf.py -k spelled"): {
        "Questions.__init__": [('enumerate(sorted({*"".join(counts)}), UNK + 1)',
                                'enumerate(sorted({*"".join(counts)}), UNK)')],
        "Questions.spell": [("self.alphabet.get(x, UNK)", "self.alphabet.get(x, 0)")],
        "Questions.gather": [("self.spell(texts)", "self.spell([x.text for x in asked])")],
    },
    ("examples/reading.py", "tests/test_experiment.py -k readers"): {
        "Training.__init__": [
            ("highway_layers=self.row.highway_layers", "highway_layers=0"),
            ("if self.row.characters:", "if False:"),
        ],
        "Training.read": [("if not self.row.characters:", "if False:")],
    },
    ("examples/reading.py", "tests/test_experiment.py -k 'reading or descriptions'"): {
        "fingerprint": [("zlib.crc32(repr(asked).encode())", "len(asked)")],
    },
    ("attnfast/speech.py", "tests/test_speech.py"): {
        "read_wav": [
            ("samples.float() / 2**15", "samples.float() / 2**16"),
            ("size < STREAMED or", "size or"),
            ("or len(frames) % file.getsampwidth()", ""),
            ("(EOFError, RuntimeError, wave.Error)", "(EOFError, wave.Error)"),
        ],
        "_is_recording": [('and not name.startswith("._")', "")],
        "_contents": [
            ("if member.isfile() and", "if"),
            ("while archive.fileobj.read(2**20):", "while False:"),
        ],
        "read_recordings": [("if name in found:", "if False:")],
        "LogMel.forward": [
            ("if self.filters.dtype in HALF:", "if False:"),
            ("if not len(lengths):", "if False:"),
            ("spectrum.abs().square()", "spectrum.abs()"),
            ("1 + (lengths - self.samples) // self.hop", "lengths // self.hop"),
            ("spare // 2, spare - spare // 2", "0, spare"),
            ("return _cut(features, counts), counts", "return features, counts"),
        ],
        "FeatureNormalizer.fit": [
            ("(second / count - mean.square())", "(second / count)"),
        ],
        "SpecAugment.forward": [
            ('check_lengths(lengths, features, 0, whose="features")\n        if not self.',
             "if not self."),
            ("(self.share * n.to(dtype)).clamp_max(self.frame_width)", "self.share * n.to(dtype)"),
            ("(drawn[0] * (most.floor() + 1)).floor()", "(drawn[0] * most).floor()"),
            ("(drawn[1] * (total - width + 1)).floor()", "(drawn[1] * total).floor()"),
        ],
        "mel_filters": [
            ("2595 * torch.tensor(1 + rate / 1400", "2595 * torch.tensor(1 + rate / 700"),
            ("torch.minimum((f - low) / (middle - low)", "torch.minimum((f - low) / (high - low)"),
        ],
        "FeatureNormalizer.forward": [("self.mean[number].unsqueeze(1)", "self.mean[:1]")],
        "word_errors": [
            ("key=lambda x: (x[0], -x[1])", "key=lambda x: (x[0], x[1])"),
            ("row = row, [(i, 0, i, 0)]", "row = row, [(i, 0, 0, i)]"),
        ],
    },
    ("attnfast/models/show_attend_tell.py", "tests/test_show_attend_tell.py"): {
        "GridEncoder.forward": [
            ("norm(x.permute(0, 2, 3, 1)[inside])",
             "norm(x.permute(0, 2, 3, 1).flatten(0, 2)).view(*inside.shape, -1)[inside]"),
            ("self.place_scale * place * inside.unsqueeze(-1)", "self.place_scale * place"),
            ("self.place_scale * place", "place"),
            ("images.masked_fill(~inside.unsqueeze(1), 0)", "images.nan_to_num()"),
            ("(2 * cell + 1) /", "(2 * cell) /"),
            ("sizes = -(-sizes // stride)\n            inside", "inside"),
        ],
        "ShowAttendTell.forward": [
            (".repeat_interleave(count)", ".repeat(count)"),
            ('check_flag("need_weights", need_weights)\n        if isinstance(self.encoder',
             "if isinstance(self.encoder"),
        ],
        "GridEncoder._check": [
            ("if norm.training and cells < 2", "if norm.training and cells < 1"),
        ],
        "masked_mean": [
            ("mask.sum(-1, keepdim=True).clamp_min(1)", "mask.shape[-1]"),
            ("sum(1, dtype=dtype)", "sum(1)"),
        ],
        "ShowAttendTell._tell": [
            ("torch.cat([result.states, result.contexts], -1)",
             "torch.cat([result.contexts, result.states], -1)"),
            ("read = embedded + linear(", "read = linear("),
        ],
        "ShowAttendTell.output_limit": [
            ("(len(sizes),), self.max_length)", "(len(sizes),), self.max_length + 1)"),
        ],
        "ShowAttendTell.__init__": [
        ],
    },
    ("attnfast/nn/wrappers.py", "tests/test_show_attend_tell.py"): {
        "GatedAttention.forward": [
            ("self.gate(state).sigmoid() * context", "self.gate(state).tanh() * context"),
        ],
        "HardAttention.forward": [
            ("index = weights.argmax(-1)", "index = weights.argmin(-1)"),
            ("torch.where(history.averaged.view(-1, 1, 1), mean, one)", "one"),
            ("counts = counts & target_mask.reshape(counts.shape)", "counts = counts & True"),
            ("left_out = ~counts | history.averaged.unsqueeze(-1)", "left_out = ~counts"),
            ("entropy = -(safe * safe.log())", "entropy = (safe * safe.log())"),
            ("one.masked_fill(~counts.unsqueeze(-1), 0)", "one"),
            ("one.masked_fill(damaged.unsqueeze(-1), torch.nan)", "one"),
            ("(~counts | damaged)", "(~counts)"),
            ("if not weights.shape[-1]:", "if False:"),
            ("chances = weights.detach().to(", "chances = torch.ones_like(weights).to("),
        ],
        "HardAttention.start": [
            ("torch.rand_like(zeros) < share", "torch.rand_like(zeros) > share"),
            ("< share if share else", "< share if True else"),
        ],
    },
    ("examples/captioning.py", "tests/test_experiment.py -k captioning"): {
        "compare": [("if args.captions > 16:", "if False:")],
        "main": [('"--dim", type=at_least(2)', '"--dim", type=count')],
    },
    ("attnfast/losses.py", "tests/test_show_attend_tell.py"): {
        "doubly_stochastic_loss": [
            ("(1 - weights.to(accumulation_dtype(weights.dtype)).sum(1))",
             "(1 - weights.to(accumulation_dtype(weights.dtype)).sum(2))"),
            ("left = left.masked_fill(~mask, 0)", "left = left"),
        ],
        "Reinforce.forward": [
            ("self.decay * before + (1 - self.decay)", "(1 - self.decay) * before + self.decay"),
            ("if self.training:\n            mean", "if True:\n            mean"),
            ("torch.where(mean.isfinite(), moved, self.baseline)", "moved"),
            ("gain = (reward - before)", "gain = (before - reward)"),
            ("reward = log_likelihood.detach().double()", "reward = log_likelihood.double()"),
        ],
    },
    ("attnfast/nn/pointer.py", "tests/test_pointer.py -k 'not example and not hulls'"): {
        "PointerNetwork.point": [
            ("weights < faint", "weights < 0"),
            ("e - total[b, t])", "e)"),
            ("weights.clamp_min(faint).log()", "weights.log()"),
            ("masked_fill(~visible, -math.inf)", "masked_fill(~visible, 0)"),
        ],
        "PointerNetwork.encode": [
            ("torch.cat([self.end.to(states).expand(len(items), 1, -1), states], 1)",
             "torch.cat([states, self.end.to(states).expand(len(items), 1, -1)], 1)"),
            ("states, there + 1)", "states, there)"),
        ],
        "PointerNetwork._read": [
            ("(pointers - 1).clamp_min(0)", "pointers.clamp_max(items.shape[1] - 1)"),
            ("pointers.unsqueeze(-1) > 0, chosen", "pointers.unsqueeze(-1) >= 0, chosen"),
        ],
        "PointerNetwork.forward": [
            ("pointers.to(items.device), (1, -1))", "pointers.to(items.device), (0, 0))"),
        ],
        "PointerNetwork.decode": [
            ("ended = ended | (step >= lengths)", "ended = ended | (step > lengths)"),
            ("ended = last == 0", "ended = last < 0"),
            ("last.unsqueeze(1), True)", "last.unsqueeze(1), step > 0)"),
            ("if distinct:", "if True:"),
        ],
    },
    ("attnfast/nn/multi_hop.py", "tests/test_multi_hop.py -k best"): {
        "_order": [
            ("score_vector * (WIDEST / most.clamp_min(WIDEST))", "score_vector * 1"),
            ("for x in (query, shown))", "for x in (query,))"),
        ],
        "TopKAttention.choose": [("wide = accumulation_dtype(rows.dtype)", "wide = rows.dtype")],
    },
    ("attnfast/decoding/memory.py", "tests/test_growable.py -k 'empty or one_mask'"): {
        "Memory.index_select": [("len(self.mask) != len(self.key)", "False")],
    },
    ("attnfast/nn/ntm.py", "tests/test_ntm.py -k 'not example and not tasks'"): {
        "NeuralTuringMachine._start": [
            ("weights[..., 0] = 1", "weights[..., -1] = 1"),
            ("expand(batch, self.num_slots, -1).clone()", "expand(batch, self.num_slots, -1)"),
            ("hidden, cell = slot.new_zeros(2, batch, self.hidden_size)",
             "hidden = cell = slot.new_zeros(batch, self.hidden_size)"),
        ],
        "NeuralTuringMachine.address": [
            ("F.softplus(strength) *", "strength *"),
            ("* key / norm(key).unsqueeze(-1)", "* key"),
            ("/ norm(memory).unsqueeze(1)", ""),
            ("dtype = accumulation_dtype(previous.dtype)", "dtype = previous.dtype"),
            ("previous + gate.sigmoid() * (content - previous)",
             "content + gate.sigmoid() * (previous - content)"),
            ("torch.cat([mixed[..., -S:], mixed, mixed[..., :S]], -1)", "F.pad(mixed, (S, S))"),
            ("shift.softmax(-1).flip(-1)", "shift.softmax(-1)"),
            ("shifted.clamp_min(torch.finfo(dtype).tiny).log()", "shifted.log()"),
            ("((1 + F.softplus(sharpness)) * log)", "(F.softplus(sharpness) * log)"),
        ],
        "norm": [
            ("clamp_min(SHORT**2).sqrt()", "sqrt()"),
            ("clamp_min(SHORT**2)", "clamp_min(SHORT)"),
        ],
        "NeuralTuringMachine.step": [
            ("if is_autocast_on() else nullcontext()", "if False else nullcontext()"),
            ("read = weights[:, :R] @ memory", "read = previous[:, :R] @ memory"),
            ("weights[:, R:].transpose(1, 2)", "weights[:, : self.num_writes].transpose(1, 2)"),
            ("erase[:, None, h]", "erase[:, None, 0]"),
            ("torch.addcmul(memory, erased, memory, value=-1)", "memory - erased"),
            ("writing, add.tanh())", "writing, add)"),
            ("[hidden, read.flatten(1).to(hidden.dtype)]",
             "[hidden, state.read.flatten(1).to(hidden.dtype)]"),
        ],
        "NeuralTuringMachine._check_kind": [("x.dtype in (torch.float32, *HALF)", "True")],
        "NeuralTuringMachine.forward": [
            ("x = x.to(self.slot.dtype)", "pass"),
            ("state = self._start(x.shape[0]) if state is None else state",
             "state = self._start(x.shape[0])"),
        ],
        "": [("name_in_exports(NTMOutput)", "")],
    },
    ("examples/turing.py", "tests/test_ntm.py -k 'tasks or size or sorting'"): {
        "copy": [("x[:, size.n, 8] = 1", "x[:, size.n - 1, 8] = 1")],
        "repeat": [
            ("bits.repeat(1, times, 1)", "bits.repeat_interleave(times, 1)"),
            ("target[:, -1, 8] = 1", "target[:, 0, 8] = 1"),
            ("times / 10", "times"),
        ],
        "recall": [
            ("bits[rows, queried + 1]", "bits[rows, queried]"),
            ("x[:, size.n :, 0, 7] = 1", "x[:, size.n, 0, 7] = 1"),
            ("x[:, size.n, 1:, :6] = bits[rows, queried]", "x[:, size.n, 1:, :6] = bits[:, 0]"),
        ],
        "reverse": [("bits.flip(1)", "bits")],
        "sort": [
            ("descending=True", "descending=False"),
            ("size.n // 5", "size.n // 4"),
            ("size.n // 5", "0"),
            ("2 * torch.rand(count, size.n, generator=draw) - 1",
             "torch.rand(count, size.n, generator=draw)"),
            ("x[:, : size.n, 9] = priorities", "x[:, : size.n, 9] = priorities.sort(1)[0]"),
            ("x[:, size.n, 8] = 1", "x[:, size.n - 1, 8] = 1"),
        ],
        "RecurrentModel.__init__": [
            ("+ outputs * (size + 1) >= limit", "+ outputs * (size + 1) >= 2 * limit"),
            ("SLOT, heads, heads)", "SLOT, heads)"),
        ],
    },
    ("attnfast/losses.py", "tests/test_pointer.py -k 'counts or given'"): {
        "pointer_loss": [
            ("ends.cumsum(-1) - ends.long() == 0", "ends.cumsum(-1) == 0"),
            ("/ counts.sum().clamp_min(1)", "/ len(counts)"),
        ],
    },
    ("examples/pointers.py", "tests/test_pointer.py -k 'hulls or polygons'"): {
        "turn": [("a[..., 0] * b[..., 1] - a", "a[..., 0] * b[..., 1] + a")],
        "hull": [
            ("(left | one | one.unsqueeze(1))", "(left | one)"),
            ("(place + 1).masked_fill(ended, 0)", "place + 1"),
        ],
        "is_simple.cross": [("turn(d - c, a - c) * turn(d - c, b - c) < 0", "True")],
        "is_simple": [("return K > 2 and not any", "return not any")],
        "judge_hull": [("set(got) == set(target)", "got == target")],
    },
    ("examples/pointers.py", "tests/test_experiment.py -k pointers"): {
        "Training.judge": [("if n <= self.row.largest]", "]")],
    },
    ("attnfast/analysis/diagnostics.py", "tests/test_diagnostics.py"): {
        "failures": [
            ("(of.each(of.m, 1) + 2) // 3", "(of.each(of.m, 1) + 1) // 3"),
            ("crossed.triu(1)", "crossed"),
            ("rows.sum(-2, keepdim=True)", "rows[..., :1, :]"),
            ("> limit.alike", "> 2 * limit.alike"),
            ("(share >= limit.saturated)", "(share > 0)"),
        ],
    },
    ("attnfast/translate/checkpoint.py", "tests/test_checkpoint.py -k umask"): {
        "write_atomically": [("os.chmod(temporary, 0o666 & ~umask)", "pass")],
    },
    ("attnfast/analysis/diagnostics.py", "tests/test_speech.py -k monotonicity"): {
        "monotonicity": [
            ("position[..., 1:] < position[..., :-1]", "position[..., 1:] <= position[..., :-1]"),
            (") & of.rows[..., 1:]", ")"),
            ("of.each(of.m - 1)", "of.each(of.m)"),
        ],
    },
    ("attnfast/models/decoders.py", CONTRACTS.format("lstm and coverage")): {
        "RecurrentDecoder.forward": [
            ("target_lengths=target_lengths", "target_lengths=None"),
        ],
    },
    ("attnfast/models/decoders.py", "tests/test_models.py"): {
        "RecurrentDecoder.initial": [
            ("torch.zeros_like(hidden) if", "torch.ones_like(hidden) if"),
        ],
        "RecurrentDecoder.__init__": [
            ("dropout=dropout if layers > 1 else 0.0", "dropout=0.0"),
            ("query_layer=query_layer, ", ""),
            ("self.reads_input or not feeds", "True"),
        ],
        "RecurrentDecoder.__setattr__": [('name == "attention"', "False")],
        "RecurrentDecoder.forward": [
            ("[run.states, run.contexts,", "[run.contexts, run.states,"),
        ],
    },
    ("attnfast/models/seq2seq.py", "tests/test_models.py tests/test_translate.py -k 'not train'"): {
        "Seq2Seq._embed": [
            ("self.dropout(embedded * self.embedding.embedding_dim**0.5)",
             "self.dropout(embedded)"),
        ],
    },
    ("attnfast/models/seq2seq.py", CONTRACTS.format("copying")): {
        "Seq2Seq._embed": [
            ("words >= self.embedding.num_embeddings", "words > self.embedding.num_embeddings"),
        ],
        "Seq2Seq._decode": [("(words != PAD).sum(-1)", "None")],
    },
    ("attnfast/models/seq2seq.py", "tests/test_models.py -k no_state"): {
        "Seq2Seq.__init__": [("self.embedding.weight[PAD] = 0", "pass")],
    },
    ("attnfast/models/seq2seq.py", "tests/test_models.py -k 'not_copied'"): {
        "Seq2Seq.encode": [("source = source.masked_fill(source == EOS, PAD)", "pass")],
    },
    ("attnfast/models/encoders.py", "tests/test_models.py -k 'not train'"): {
        "Encoder.forward": [
            ("return states * length_mask(there, states.shape[1]).unsqueeze(-1)", "return states"),
        ],
    },
    ("attnfast/translate/trainer.py", "tests/test_trainer.py"): {
        "train_step": [
            ("nn.utils.clip_grad_norm_(model.parameters(), options.clip)", ""),
            ('group["lr"] = now.rate * group.get("scale", 1.0)', "pass"),
            ("optimizer.zero_grad(set_to_none=True)", "pass"),
            ("share = count / words", "share = 1 / len(counts)"),
        ],
        "Options.at": [("step >= self.coverage_from * steps", "True")],
        "batch_loss": [
            ("smoothing = 0.0 if copying else options.label_smoothing",
             "smoothing = options.label_smoothing"),
            ("coverage.sum() / words", "coverage.mean()"),
            ("of_sentences * len(batch.target_out) / words", "of_sentences"),
        ],
        "validation_loss": [
            ("batch.target_out).item() * count", "batch.target_out).item()"),
            ("model.eval()\n    total", "total"),
        ],
        "Trainer.__post_init__": [
            ("2 * sum(targets) / sum(sources)", "sum(targets) / sum(sources)"),
            ("max(self.config.longest_target, *targets)", "max(targets)"),
            ("model.length_ratio, model.longest_target = ratio, longest", "pass"),
        ],
        "Trainer._has_converged": [(">= self.options.patience", "> self.options.patience")],
        "Trainer.save": [("self.validated if model is None else model", "self.model")],
        "Options.check": [('sparse or attention == "strided"', 'attention == "strided"')],
    },
    ("attnfast/translate/data.py", "tests/test_data.py"): {
        "batches": [
            ("order.sort(key=lambda example: (len(example.target), len(example.source)))", ""),
            ('f"{seed} {epoch}"', 'f"{seed}"'),
        ],
        "encode_pairs": [("elif longer > max_length:", "elif longer >= max_length:")],
        "WordTokenizer.train": [("words[: vocab_size - 4]", "words[:vocab_size]")],
        "pad_sources": [("[len(ids) + 1 for ids in sources]", "[len(ids) for ids in sources]")],
        "decode_lines": [('b"\\n" not in content and b"\\r" in content', "False")],
        "stream_lines": [("number += len(lines)", "number += 1")],
        "_whole_lines": [("not (is_first and content.startswith(GZIP))", "True")],
        "SubwordTokenizer.train": [
            ('normalization_rule_name="identity"', 'normalization_rule_name="nfkc"'),
            ("remove_extra_whitespaces=False", "remove_extra_whitespaces=True"),
            ("max_sentence_length=2**30", "max_sentence_length=4192"),
            ('required_chars="".join(sorted(characters)),', ""),
        ],
        "SubwordTokenizer.word_numbers": [("if end > ends[numbers[-1]]:", "if False:")],
    },
    ("attnfast/translate/evaluate.py", "tests/test_cli.py -k 'allowed or batches or memory'"): {
        "_batches": [
            ("(len(batch) + 1) * lengths[i] > LARGEST", "len(batch) * lengths[i] > LARGEST"),
        ],
        "translate": [
            ("if not out_of_memory(error):", "if True:"),
        ],
        "_collect": [("len(several[0]) + 1 >= limits[i]", "len(several[0]) >= limits[i]")],
    },
    ("attnfast/translate/evaluate.py", "tests/test_cli.py -k 'search or unknown or prefix'"): {
        "SearchOptions.__post_init__": [("if self.n_best > self.beam", "if False")],
        "SearchOptions.check": [("isinstance(model.decoder.attention, FixedContext)", "False")],
        "_encode": [
            ("i == UNK or", "False or"),
            ("(i >= V and i not in ids)", "False"),
            ("len(begin) > ", "len(begin) < "),
        ],
        "_search": [
            ("(PAD, BOS) if options.replace_unknown", "(PAD, BOS) if False"),
            ("options.alignments or options.replace_unknown", "options.alignments"),
            ('f"{options.seed} {x.number}"', 'f"{options.seed}"'),
        ],
        "_collect": [
            ("length_mask(lengths - 1,", "length_mask(lengths,"),
            ("V + len(own) + j if x == UNK", "V + j if x == UNK"),
            ("[x >= V for x in words] if copies", "[x >= V for x in words] if True"),
        ],
    },
    ("attnfast/_utils/command_line.py", "tests/test_cli.py"): {
        "_prepare_output": [("if isinstance(out.buffer, io.RawIOBase):", "if False:")],
    },
    ("attnfast/translate/cli.py", "tests/test_cli.py"): {
        "train": [("options.check(config)", "pass")],
        "_Formatter._get_help_string": [("action.default is None or", "")],
        "_add_settings": [
            ("action=Flag, default=field.default", "action=Flag, default=None"),
            ("if field.name in skipped:", "if field.name in (*skipped, 'clip'):"),
            ('choices=field.metadata["choices"] or None,', ""),
        ],
        "_translate_stream": [
            ("sys.stdout.buffer.flush()", "pass"),
            ("first=done + 1", "first=1"),
            ("stop.number, text", "stop.number"),
        ],
        "_to_text": [("[*texts, *", "[*")],
        "_read_settings": [("if x.name in args", "if x.name in args and x.name != 'cell'")],
    },
    ("attnfast/_utils/settings.py", "tests/test_settings.py"): {
        "_check": [
            ("value is None and setting.default is None", "value is None"),
            ('bounds.setdefault("below", 2**31)', "pass"),
            ("(is_infinite and bounds", "(bounds"),
            ("fits and all(", "all("),
        ],
        "_text": [("number >= 2**30", "False")],
        "with_settings": [('"Args:", *entries', '"Args:"')],
    },
    ("attnfast/ops/backends.py", "tests/test_package.py -k 'runs_on or triton_needs or goes_'"): {
        "not_built_for": [
            ("any(own >= x for x in alike)", "any(own <= x for x in alike)"),
            ("own >= built[-1]", "own >= built[0]"),
        ],
        "": [("OLDEST_FOR_TRITON = (8, 0)", "OLDEST_FOR_TRITON = (7, 5)")],
        "Cuda.rank": [
            ("and request.dtype in HALF and not request.step", "and not request.step"),
            ("return 2 if products else 0", "return 0"),
        ],
        "ranked_backends": [("ranks[name] < math.inf", "True")],
        "Triton._unsupported_reason": [("if request.filters > self.most_filters:", "if False:")],
    },
    ("attnfast/nn/_fused_rnn.py", "tests/test_nn_recurrent.py -k 'not compile and not table'"): {
        "_gate_arguments": [("None if gate.bias is None", "None if True")],
        "_history_arguments": [
            ("mask = seen if mask is None else seen & mask", "pass"),
            ('state.get("previous"), None,', 'state["coverage"], None,'),
        ],
        "_common_arguments": [("shared_keys.check_unchanged()", "pass")],
        "_reversed": [
            ("return x.flip(1)", "return x"),
            ("lengths[:, None] - 1 - steps, steps)", "lengths[:, None] - 1 - steps, 0)"),
        ],
    },
    ("attnfast/nn/_layer.py", "tests/test_nn_recurrent.py -k 'not compile and not table'"): {
        "RecurrentState.index_select": [('"cell": -2, "feed": 0}', '"cell": -2}')],
    },
    ("attnfast/nn/_layer_steps.py", "tests/test_nn_recurrent.py -k 'not compile and not table'"): {
        "run_no_step": [
            ('while not hasattr(inner, "start"):', "if False:"),
        ],
        "run_steps": [
            ("masked_fill(~length_mask(target_lengths, input.shape[1]).unsqueeze(-1), 0)",
             "clone()"),
        ],
    },
    ("attnfast/integrations/cache.py", "tests/test_replace_cache.py"): {
        "_state": [("None if x.is_inference() else x._version", "0")],
        "_CachedResult.matches": [("self.modes == modes", "True")],
        "TensorSnapshot.is_unchanged": [("is _base(x) and _part(x) == self.part", "is _base(x)")],
    },
    ("attnfast/integrations/cache.py", "tests/test_replace_refilled.py"): {
        "TensorSnapshot.is_unchanged": [("self.copy is None or _is_equal(x, self.copy)", "True")],
        "_is_equal": [("x.numel() * x.itemsize) == 0", "x.itemsize) == 0")],
        "_tells_of_changes": [
            ("base.grad_fn is not None and not _is_shared(base)", "base.grad_fn is not None"),
        ],
    },
    ("attnfast/_utils/dispatch_log.py", "tests/test_explain.py"): {
        "explain": [("outer += choices", "pass"), ("_recorder.choices = outer", "pass")],
        "record": [("choice not in _logged", "True"), ("if x)", ")")],
        "Explanation.__str__": [("if n > 1 else", "if n > 3 else")],
    },
    ("attnfast/ops/self_check.py", "tests/test_self_check.py"): {
        "_compare": [
            ("if failure is None and not error <= 1:", "if failure is None and error > 1:"),
            ("if failure is None and not error <= 1:", "if not error <= 1:"),
            ("8 * _distance(plain[name], want)", "8e9 * _distance(plain[name], want)"),
        ],
        "_results": [("if differentiable:", "if False:")],
        "compare": [
            ("if isinstance(result, torch.OutOfMemoryError):", "if False:"),
            ("thread.join(LIMIT)", "thread.join()"),
        ],
        "compare_once": [
            ("if is_known:", "if False:"),
            ("outcomes.write(name, process=os.getpid())", "pass"),
            ("outcomes.write(name)\n        raise", "raise"),
            ("backends.self_check_postponed = True", "pass"),
        ],
        "OutcomeFile.load": [
            ('if _is_alive(entry["process"]):', "if False:"),
            ("if not isinstance(entry, dict):", "if entry is None:"),
        ],
        "OutcomeFile._read": [("(OSError, ValueError)", "OSError")],
        "OutcomeFile.write": [("contextlib.suppress(OSError)", "contextlib.suppress(ValueError)")],
        "reason_against": [
            ('if mode == "0" or not (on_gpu or mode == "all"):', 'if mode == "0":'),
            ('if mode == "0" or not (on_gpu or mode == "all"):', 'if mode != "all":'),
            ("if on_gpu and torch.cuda.is_current_stream_capturing():", "if False:"),
        ],
        "comparisons": [("if BACKENDS[backend].unsupported_reason(request) is None:", "if True:")],
    },
    ("attnfast/ops/backends.py", "tests/test_self_check.py"): {
        "unsupported_reason": [(" or self_check(backend, request)", "")],
    },
    ("attnfast/ops/backends.py", "tests/test_explain.py"): {
        "reasons_against": [("names[: names.index(chosen)]", "names")],
    },
    ("attnfast/integrations/adapter.py", "tests/test_replace_fallback.py"): {
        "is_as_it_was": [
            ("type(part) not in kinds", "False"),
            ('or own["_backward_hooks"]', ""),
            ('or "forward" in own', ""),
        ],
    },
    ("attnfast/integrations/patch.py", "tests/test_replace_fallback.py"): {
        "_own_code_reason": [
            ("is_transformed() or has_global_hooks()", "is_transformed()"),
            ("if torch.jit.is_tracing():", "if False:"),
            ("if torch.onnx.is_in_onnx_export():", "if False:"),
        ],
    },
    ("attnfast/integrations/own_loop.py", "tests/integrations/test_own_loop.py"): {
        "_Terms.add": [("number = number_of_backward()", "number = 0")],
        "_Product.backward": [("grad @ weight", "grad @ weight.detach()")],
        "WeightGradients.multiply": [("x.numel() <= x.shape[-1] ** 2", "True")],
        "WeightGradients.step_lstm": [("f.sigmoid() * c", "c")],
        "WeightGradients.step_gru": [("torch.lerp(n, h,", "torch.lerp(h, n,")],
    },
    ("attnfast/integrations/fused_decoders.py", "tests/integrations/test_decoders.py"): {
        "fusion_skip_reason": [
            ("x.training and x.p > 0", "x.training and x.p > 1"),
            ("if not is_plain(attention, type(attention)):", "if False:"),
            ("x.shape[:2] == (layers, len(source))", "True"),
        ],
        "draw_masks": [
            ("for x, mask in zip(dropouts, masks)", "for x, mask in zip(dropouts[::-1], masks)"),
            ("else mask[0]", "else mask"),
        ],
    },
    ("attnfast/integrations/projects/d2l.py", "tests/integrations/test_search_model.py"): {
        "parts_of": [(".roll(-attention.W_k.in_features, 1)", "")],
        "Model.predict_step": [("every[-1:]", "every")],
    },
    ("attnfast/integrations/projects/d2l.py", "tests/integrations/test_decoders.py -k d2l"): {
        "Decoder.forward": [
            ("valid_lens is not None and valid_lens.dim() != 1", "False"),
            ("attention.attention_weights = self._attention_weights[-1]", "pass"),
        ],
    },
    ("attnfast/integrations/projects/tutorials.py", "tests/integrations/test_decoders.py"): {
        "TranslationDecoder.forward": [
            ("words[:, : T - 1]", "words[:, 1:T]"),
            ("torch.cat([self.dropout(x) for x in embedded.split(1, 1)], 1)",
             "self.dropout(embedded)"),
        ],
    },
    ("attnfast/integrations/projects/onmt.py", "tests/integrations/test_decoders.py"): {
        "unrolled": [("self.state[\"hidden\"], feed=feed)", "self.state[\"hidden\"])")],
        "stack_of": [
            ("is_plain(x, nn.LSTMCell, nn.GRUCell) for x in cells", "True for x in cells"),
        ],
        "EoleInputFeed._run_forward_pass": [("mask = ~src_pad_mask", "mask = src_pad_mask")],
        "lengths_of.count": [
            ("length_mask(src_len.view(-1), Tk).sum(1).expand(B)", "src_len.long()"),
        ],
    },
    ("attnfast/integrations/projects/joeynmt.py", "tests/integrations/test_joeynmt.py"): {
        "Decoder.forward": [
            ("joined_mask.roll(-rnn.hidden_size, -1)", "joined_mask"),
            ("words = words * input_mask\n", "pass\n"),
        ],
    },
    ("attnfast/integrations/projects/speechbrain.py", "tests/integrations/test_speechbrain.py"): {
        "Decoder.forward": [
            ("detach_history=located", "detach_history=False"),
            ("inp_tensor = inp_tensor * input_mask", "pass"),
        ],
    },
    ("attnfast/integrations/projects/sgrvinod.py", "tests/integrations/test_sgrvinod.py"): {
        "Decoder.forward": [
            ("gate=self.f_beta, ", ""),
            ("scores.masked_fill(padding, 0)", "scores"),
        ],
        "drop_states": [("n > t for n in words", "n >= t for n in words")],
    },
    ("attnfast/integrations/projects/espnet_tts.py", "tests/integrations/test_espnet_tts.py"): {
        "run_first_layer": [
            ("history=CumulativeState(last[2], last[2])", "history=steps[-1].history"),
        ],
        "Decoder.forward": [
            ("weight_ih.roll(-hs.shape[2], 1)", "weight_ih"),
        ],
    },
    ("attnfast/integrations/fused_decoders.py", "tests/integrations/test_espnet_tts.py"): {
        "draw_masks": [("if dropout.training else mask.fill_(p)", "if True else mask.fill_(p)")],
    },
    ("attnfast/integrations/projects/tacotron2.py", "tests/integrations/test_tacotron2.py"): {
        "run_layers": [
            ("[above.states, steps.contexts]", "[steps.contexts, above.states]"),
        ],
    },
    ("attnfast/integrations/projects/coqui.py", "tests/integrations/test_coqui.py"): {
        "attended": [("torch.cat([v.weight[0], v.bias])", "torch.cat([v.weight[0], 0 * v.bias])")],
        "Decoder.forward": [
            ("dropout_cell=cell_mask", "dropout_cell=state_mask"),
            ("self.query, self.attention_rnn_cell_state", "_, self.attention_rnn_cell_state"),
        ],
    },
    ("attnfast/nn/_layer_steps.py", "tests/test_nn_recurrent.py -k steps_drop"): {
        "_move": [('("dropout_state", "dropout_cell")]', '("dropout_state", "dropout")]')],
        "_move_all": [("layer_masks, zoneout)", "layer_masks)")],
    },
    ("attnfast/integrations/projects/wavernn.py", "tests/integrations/test_wavernn.py"): {
        "WaveRNN.forward": [("self.conv.weight.flip(1)", "self.conv.weight")],
        "VoiceCloning.forward": [
            ("count.log() - self.v.weight.sum()", "count.log()"),
            ("rest / count.clamp(min=1)", "rest"),
        ],
    },
    ("attnfast/integrations/inspection.py", "tests/test_replace.py -k hooks"): {
        "inner_hooks": [("if part is not module and any(hooks):", "if any(hooks):")],
    },
    ("attnfast/integrations/inspection.py", "tests/test_replace_probe.py"): {
        "methods_of": [('method = vars(method).get("__wrapped__")', "method = None")],
        "used_by": [("{**function.__globals__, **bound}", "function.__globals__")],
        "unsupported_attributes": [("if k not in own and", "if not callable(vars(cls)[k]) and")],
        "is_ready_made": [
            ("if not isinstance(x, (type, FunctionType, BuiltinFunctionType, ModuleType)):",
             "if not callable(x) and not isinstance(x, ModuleType):"),
        ],
    },
    ("attnfast/integrations/inspection.py", "tests/test_adapter_check.py"): {
        "unsupported_attributes": [("if not hasattr(type(module), x)}", "}")],
    },
    ("attnfast/integrations/probe.py", "tests/test_replace_probe.py -k rounding"): {
        "_measure": [("8 * rounded", "0 * rounded"), ("8 * rounded", "1e6 * rounded")],
    },
    ("attnfast/integrations/probe.py", "tests/integrations/test_coqui.py -k rounding"): {
        "measure": [("range(SEEDS)", "range(1)")],
        "is_decided_by_rounding": [("(change, -change)", "(0.0, 0.0)")],
        "outcome_of": [("seed=config.seed, others", "others")],
    },
    ("attnfast/integrations/probe.py", "tests/test_adapter_check.py"): {
        "Measurement.largest": [("if a.keys() == b.keys()", "if True")],
        "_distance": [("(a == b) | (a.isnan() & b.isnan())", "a == b")],
        "_cure": [("isinstance(a, Tensor) and b is None", "False")],
    },
    ("attnfast/integrations/find.py", "tests/test_adapter_check.py"): {
        "find_attention": [("every if module in by_code else known", "known")],
        "_attention_calls": [('and "log_softmax" not in x ', "")],
    },
    ("attnfast/integrations/check.py", "tests/test_adapter_check.py"): {
        "check": [("all(served)", "any(served)")],
        "print_comparison": [("if number == 0 and", "if False and")],
    },
    ("attnfast/integrations/inspection.py", "tests/integrations/test_decoders.py -k copies"): {
        "unsupported_attributes": [("(state | HIDDEN)", "state")],
    },
    ("attnfast/integrations/probe.py", "tests/integrations/test_late.py"): {
        "probe_configs": [("others=BATCHES, repeats=True, late=True", "repeats=True, late=True")],
        "calls": [("before < draw.marked < draw.marks", "False")],
        "words_to_compare": [
            ("words = max(WORDS, *(1 + x for x in special if x < most))", "words = WORDS"),
        ],
        "outcome_of": [("None if config.large else words)", "words)")],
    },
    ("attnfast/integrations/inspection.py", "tests/integrations/test_late.py"): {
        "read_by_name": [("strings if BY_NAME.intersection(code.co_names) else set()", "set()")],
        "unsupported_attributes": [
            ("{name for name in named if not hasattr(module, name)}", "set()")
        ],
        "integers": [("elif isinstance(x, (tuple, frozenset)):", "elif False:")],
    },
    ("attnfast/integrations/adapter.py", "tests/integrations/test_late.py"): {
        "ProbeInputs.words": [
            ("range(0, T - 1 if self.late else 0, 2)", "range(0)"),
            ("words[self.marked % len(words)]", "words[t // 2 % len(words)]"),
        ],
    },
    ("attnfast/integrations/replace.py", "tests/integrations/test_decoders.py -k left_alone"): {
        "replace": [("if x.adapter and not x.adapter.attention]", "if x.adapter]")],
        "_choose_backend": [
            ("if all(attention is not x.module", "if False and all(attention is not x.module"),
        ],
    },
    ("attnfast/integrations/helpers.py", "tests/test_replace_fallback.py"): {
        "attend_to_source": [
            ("query.shape[:-2] != key.shape[:-2]", "False"),
            ("mask is None or _fits(mask, shape)", "True"),
        ],
    },
    ("attnfast/integrations/helpers.py", "tests/test_replace.py"): {
        "keep_in_graph": [("x = x + p.flatten()[:0].sum()", "pass")],
    },
    ("kernels/attention.py", TRITON): {
        "_masked": [('m_s = m_s & (b_bias != -float("inf"))  # also', "m_s = m_s  # also")],
        "_forward": [
            ('b_shift = tl.where(b_max == -float("inf"), 0, b_max)', "b_shift = b_max"),
            ("b_l = b_l * b_rescale + tl.sum(b_p, 1)", "b_l = b_l + tl.sum(b_p, 1)"),
            ("m_k = tl.max(m_s.to(tl.int32), 0) > 0", "m_k = o_k < n"),
            ('tl.where(m_diverged, float("nan"), 1 / tl.where(m_empty, 1, b_l))',
             "1 / tl.where(m_empty, 1, b_l)"),
            ("MIN_FINITE, b_s * JUST_BELOW_ONE)", "MIN_FINITE, b_s)"),
            ("tl.cdiv(to_k - from_k, tl.num_programs(1))",
             "(to_k - from_k) // tl.num_programs(1)"),
            ("b_s *= scale", "b_s *= 1"),
        ],
        "_product": [
            ("tl.where(tl.min(b_is_finite) == 0, stop, start)", "start"),
            ("m_out & (b_is_finite == 0)[:, None]", "m_out & (b_is_finite > 1)[:, None]"),
        ],
        "_multiply_all": [("if not is_even:", "if False:")],
        "launch_forward": [
            ("_replace(bias=None, mask=None, scale=1.0)", "_replace(mask=None, scale=1.0)"),
            ("_replace(bias=None, mask=None, scale=1.0)", "_replace(bias=None, mask=None)"),
        ],
        "_exponentials": [
            ("tl.max(tl.abs(b_chunks), 1) * 2.0**-30, LEAST_WEIGHT)",
             "tl.max(tl.abs(b_chunks), 1) * 0.0, 2.0**-120)"),
        ],
        "": [("FACTORED_LIMIT = tl.constexpr(21.8)", "FACTORED_LIMIT = tl.constexpr(40.0)")],
        "_exp_twice": [("1.4286068203094172e-06", "1.4286068203094172e-04")],
        "_score_gradient": [("b_g - b_delta[:, None] + b_dlse[:, None]", "b_g - b_delta[:, None]")],
        "_additive_gradient": [
            ("b_dw = -2 * scale * tl.sum(b_dw, 0)", "b_dw = -2 * tl.sum(b_dw, 0)"),
            ("m_1 = o_x < tl.where(k + 1 < end, Tx, 0)", "m_1 = m_x"),
        ],
        "_seen_keys": [("tl.load(p_lengths + i_b), 0), Tk)", "tl.load(p_lengths), 0), Tk)")],
        "_activation": [("0.25 * LEAKY_SLOPE * b_ones)", "0.25 * b_ones)")],
    },
    ("kernels/coverage.py", TRITON_HISTORY): {
        "_weight_gradient": [
            ("b_g += tl.where(b_p <= b_c, grad_loss, 0)",
             "b_g += tl.where(b_p < b_c, grad_loss, 0)"),
        ],
        "_softmax_gradient": [
            ("b_dpenalty -= b_ds * b_c", "b_dpenalty += b_ds * b_c"),
            ("- b_p * total", ""),
        ],
        "_history_gradient": [("+ u * b_this * (b_next / b_sum)", "")],
        "_features_gradient": [("m_k = b_ds != 0  #", "m_k = o_k < n  #")],
        "_softmax": [("b_c + b_rate * b_p", "b_c + b_p")],
    },
    ("kernels/copying.py", "tests/test_copying.py -k 'triton and not check and not compile'"): {
        "_distribution_gradient": [
            ("every += tl.sum(b_plus, 0)", "pass"),
            ("tl.where(b_da > HIGHEST, HIGHEST,", "tl.where(b_da > HIGHEST, b_da,"),
        ],
        "_sort_keys": [("(o_j < o_i[:, None])", "(o_j < 0)")],
        "_keys": [("k + tl.arange(0, BK)", "tl.arange(0, BK)")],
        "_word": [("b_u = _exp(b_d)", "b_u = tl.exp(b_d)")],
    },
    ("csrc/score.h", CPU): {
        "activation": [("z < V{} ? z * C(kLeakySlope) : z;", "z < V{} ? z * C(0.21) : z;")],
        "times_slope": [("f > V{} ? g : g * C(kLeakySlope);", "f > V{} ? g : g;")],
    },
    ("csrc/arguments.h", "tests/test_schemas.py"): {
        "pop_string": [("TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));", "")],
    },
    ("csrc/launch_coverage.h", "tests/test_invalid_calls.py tests/test_schemas.py"): {
        "ATTNFAST_HISTORY": [
            ("X(Optional, previous, rows, sum_dtype, {Tk})", "X(Optional, previous, any)"),
        ],
    },
    ("csrc/cpu/attention_kernel.cpp", CPU): {
        "normalisation_backward": [
            ("const C rest = a.grad_log_sum_exp.data ?", "const C rest = false ?"),
            (
                "pj == 0 ? pj : slope(pj) * (xj - mean + rest) * scale",
                "slope(pj) * (xj - mean + rest) * scale",
            ),
        ],
        "multiply": [("x = x == x ? x : again[r * width + c];", "x = x;")],
        "pack_slice": [("finite ? (v - v == 0 ? v : Vec<C>{})", "finite ? v")],
        "softmax": [("multiply_by((C)a.scale, item.seen, row(i));", ";")],
    },
    ("csrc/cpu/attention_kernel.cpp", ENTMAX): {
        "normalisation_backward": [
            ("? square_root<C>(pj) : pj > 0", "? pj : pj > 0"),
            (": pj > 0 ? Vec<C>{} + 1 : pj", ": pj"),
            ("== Normalisation::softmax ? 1 : sum<C>(slopes)", "== Normalisation::softmax ? 1 : 1"),
        ],
        "exponentials_or_entmax": [
            ("describe(s, mass, first, statistics);", "describe(s, mass, 0, statistics);")
        ],
    },
    ("csrc/cpu/rows.h", ENTMAX): {
        "entmax": [
            ("const C factor = square ? 0.5 : 1;", "const C factor = 1;"),
            ("if (!rises) break;", "break;"),
            ("if (next > -2) threshold", "if (rises) threshold"),
            ("const Vec<C> p = d == d ? (square", "const Vec<C> p = true ? (square"),
        ],
        "describe": [
            ("if (p > most) most = p, position = j;", "if (p >= most) most = p, position = j;"),
            ("(j - mean) * (j - mean)", "(j - mean)"),
        ],
    },
    ("csrc/cpu/product.h", ENTMAX): {
        "gemm_small_row": [
            ("total[c] += acc[c], acc[c] = 0;", "total[c] += acc[c];"),
            ("if (fours % kPart) continue;", "continue;"),
        ],
    },
    ("csrc/cpu/score.h", ENTMAX): {
        "grad_tile": [("== 0 && g[(I - 1) * g_stride + j] == 0", "== 0")],
    },
    ("csrc/cpu/coverage_kernel.cpp", HISTORY): {
        "softmax_backward": [
            ("x += part(past) - w * total;", "x += part(past);"),
            ("x *= (C)1 - w * sigmoids;", ""),
        ],
        "log_sigmoids": [("least = x > 0 ? Vec<C>{} : x", "least = x")],
        "forward": [
            ("lost += x <= c ? x : c;", "lost += x;"),
            ("for (int64_t j = n; j < a.Tk; ++j) row[j] = last[j] = 0;", ""),
        ],
    },
    ("csrc/cpu/coverage_kernel.cpp", RECURRENT): {
        "run": [
            ("(a.sums ? *row(a.grad_penalty) : 0)", "0"),
            ("if (a.grad_last.data) copy(row(a.grad_last)", "if (false) copy(row(a.grad_last)"),
        ],
    },
    ("csrc/cpu/recurrent_backward.h", "tests/test_zero_sizes.py"): {
        "begin": [("a.grad_feed.data && a.T == 0 && b < a.B", "false")],
    },
    ("attnfast/nn/_layer_steps.py", "tests/test_zero_sizes.py"): {
        "run_no_step": [
            ("state = state._replace(history=inner.start(memory))", "pass"),
            ("y[..., :0, :] for x, y in", "y[..., :1, :] for x, y in"),
        ],
    },
    ("attnfast/nn/multi_hop.py", "tests/test_multi_hop.py -k 'best or apart'"): {
        "_largest": [
            ("first.values[..., -1:] * (1 - error)", "first.values[..., -1:]"),
            ("scores.masked_fill(order.gather(-1, index) == 0, -torch.inf)", "scores"),
        ],
    },
    ("csrc/cpu/transition.h", HISTORY): {
        "transition_backward": [
            (
                "store_part(shifted + j, times(r.before) * u",
                "store_part(shifted + j, times(r.before)",
            ),
        ],
        "log": [("top + log_of_one_more(sum - (C)1)", "top")],
    },
    ("csrc/cpu/copying_kernel.cpp", "tests/test_copying.py -k 'cpu and not compile'"): {
        "add_up": [
            ("mass[source[i]] += widen(weights[i]);", "mass[source[i]] = widen(weights[i]);"),
        ],
        "generates": [("w < V && x[w] != -infinity<C>()", "w < V")],
    },
    ("csrc/recurrent.h", RECURRENT): {
        "remember": [
            ("step.log_weights.data ? step.log_weights : step.weights", "step.weights"),
            ("if (a.step_lengths) step.lengths =", "if (false) step.lengths ="),
        ],
    },
    ("csrc/cpu/recurrent_forward.h", RECURRENT): {
        "add_losses": [
            ("sum += *row<C>(a.attention.loss, b, t);", "sum = *row<C>(a.attention.loss, b, t);"),
        ],
        "update_units": [
            ("if (pads) unit = Unit<Vec<C>>{};", ""),
            ("if (lift) store_part(", "if (false) store_part("),
        ],
        "add_biases": [("out[sum_index(a.cell, gate) * width]", "out[gate * width]")],
        "update_block": [
            ("packed.hidden.at(own)", "packed.hidden.at(panel)"),
        ],
        "update_states": [
            ("{masked[t % 2] + layer * a.B * a.H, a.H}", "{masked[t % 2], a.H}"),
        ],
        "weigh": [("in_place.scores = step.weights;", "")],
        "apply_gate": [("gate = sigmoid_of(gate);", "")],
        "compute_attentional": [("if (a.output_tanh) sum =", "sum =")],
    },
    ("csrc/cpu/recurrent_backward.h", RECURRENT): {
        "gate_back": [
            ("((C)1 - factor)", "factor"),
            ("g * factor, n", "g, n"),
        ],
        "begin_history": [
            ("clear(row<C>(room.parameter_sums, b), room.parameter_sums.batch);", "{}"),
            ("row<C>(h.grad_previous, b)[j] = 0;", ""),
        ],
        "run": [("if (room.parameter_sums.data) finish_history();", "")],
        "put_fed": [
            ("if (!runs(a, b, t)) x = Vec<C>{};", ""),
            ("f = mask == 0 ? Vec<C>{} : f / mask;", ""),
            ("if (a.output_tanh) x *=", "x *="),
        ],
        "backward_units": [
            ("if (given_cell) grad_cell += part(given_cell);", ""),
        ],
        "write_initial_grads": [
            ("if (layer == a.layers - 1 && a.attends_first && a.T) add_attended(0, block, x);", ""),
        ],
        "backward_block": [("if (layer == a.layers - 1) add_attended(", "add_attended(")],
        "add_attended": [
            ("multiply_mask(a.dropout_joined, a.Dv, t,", "multiply_mask(a.dropout_joined, 0, t,"),
            ("if (a.weight_gate.data) {", "if (false) {"),
        ],
        "grad_to_fed": [("if (a.dropout_feed.data) g *=", "if (false) g *=")],
        "grad_to_below": [("x, at_layer<C>(a.dropout_between, layer - 1), t);", "x, View{}, t);")],
        "list_gradients": [
            ("below(a.dropout_between), gates", "none, gates"),
            ("!a.attends_first, a.dropout_feed,", "!a.attends_first, none,"),
            ("a.attends_first, a.dropout_query, a.A,", "a.attends_first, none, a.A,"),
            ("columns_from(a.dropout_joined, a.Dv), a.F", "a.dropout_joined, a.F"),
            ("a.attends_first, a.dropout_query, a.Dv,", "a.attends_first, none, a.Dv,"),
            ("columns_from(rest.left, gates);", "columns_from(rest.left, alike);"),
        ],
        "pack_right": [
            ("there = runs(a, b, t) && (!before || x.first.data)",
             "there = !before || x.first.data"),
            ("if (n > 0 && x.factor.data) v *=", "if (false) v *="),
            ("? read(r + 1, c) :", "? read(r, c) :"),
        ],
    },
    ("csrc/cell.h", RECURRENT): {
        "cell_forward": [("u.state = n + z * (state - n);", "u.state = n + z * state;")],
        "cell_backward": [
            ("const V to_cell = grad_cell + g * o", "const V to_cell = g * o"),
        ],
        "undropped": [("factor == 0 ? V{} : value / factor;", "value / factor;")],
    },
    ("csrc/cpu/panels.h", "tests/test_linear.py"): {
        "multiply_rows": [
            ("if (bias) sum += load_part", "if (false) sum += load_part"),
            ("k ? sum + load_part", "false ? sum + load_part"),
            ("gathers = x.sums || x.column != 1", "gathers = x.column != 1"),
            ("gathers ? own : x.left + k;", "gathers ? own : x.left;"),
        ],
        "gather_left": [("sums[m] += of_block[m];", "sums[m] = of_block[m];")],
    },
    ("csrc/cpu/linear_kernel.cpp", "tests/test_linear.py"): {
        "multiply": [("min(kProductRows, a.M - first_row)", "a.M - first_row")],
        "pack_panel": [("if (a.right_column == 1) pack(", "if (a.right_row == 1) pack(")],
    },
    ("csrc/cpu/linear.cpp", "tests/test_linear.py"): {
        "ATTNFAST_LINEAR_BACKWARD": [
            ("X(Tensor, grad_output, sizes, dtype, {M, N})", "X(Tensor, grad_output, any)"),
        ],
    },
    ("attnfast/nn/_linear.py", "tests/test_linear.py"): {
        "linear": [
            ("is_autocast_on() or", ""),
            ("x.requires_grad != weight.requires_grad", "False"),
            ('or backend not in (None, "cpu")', ""),
            ("or has_dispatch_mode()", ""),
        ],
        "_is_own": [
            ("type(y) in (Tensor, nn.Parameter)", "True"),
            ("x.dtype in (torch.float32, torch.float64)", "True"),
        ],
        "project": [("if not is_plain(layer, nn.Linear):", "if not isinstance(layer, nn.Linear):")],
    },
    ("csrc/cpu/recurrent.cpp", "tests/test_recurrent.py -k 'cpu and invalid_calls'"): {
        "recurrent": [
            ('(given.packed->numel()) == kernels().packed(a, {}), "packed");', '(1), "packed");'),
        ],
    },
    ("attnfast/models/_search.py", "tests/test_search.py"): {
        "select_search_backend": [
            ("if model.dropout.training and model.dropout.p:", "if False:"),
            ("words.max_norm or", ""),
        ],
    },
    ("attnfast/ops/packing.py", "tests/test_search.py tests/test_nn_recurrent.py -k packed"): {
        "pack_parameters": [
            ("and before.made_of == made_of", ""),
            ("context_size, call.mode, int8", "context_size, call.mode, False"),
        ],
        "_version": [("x.data_ptr(), x._version,", "x._version,")],
    },
    ("csrc/cpu/search_words.h", "tests/test_search.py -k 'cpu and not opcheck'"): {
        "takes": [("score > least()", "score >= least()")],
        "insert": [("at[i - 1].score < x.score", "at[i - 1].score <= x.score")],
        "pack": [("{0, a.H, a.H + a.Dv, 0};", "{0, a.H, a.H, 0};")],
        "before": [("x[i] == x[j] && i < j", "x[i] == x[j] && i > j")],
        "sink": [("child + 1 < n &&", "false &&")],
        "next": [("heap[n] = first;", "")],
        "draw_word": [
            ("(logit - top) * scale", "logit - top"),
            ("for (total = 0; count < most; ++count)", "for (; count < most; ++count)"),
            ("sum < draw.top_p * total", "sum < draw.top_p"),
            ("if (part > number * sum) break;", "if (part > number) break;"),
            ("if (sum > number * total) break;", "if (sum >= number) break;"),
        ],
    },
    ("csrc/cpu/search_copying.h", "tests/test_search.py -k 'cpu and cop'"): {
        "keep": [("words(s)[at] < end", "words(s)[at] <= first")],
        "has": [("&& words(s)[at] == word", "")],
        "score": [
            ("if (index[j] >= 0)", "if (index[j] > 0)"),
            ("word.slight && logit == never ? never :", ""),
            ("word.log_p - every.log_p", "word.log_p"),
            ("gate.log_p - all", "gate.log_p - sum"),
        ],
    },
    ("csrc/cpu/search.h", "tests/test_search.py -k 'cpu and cop'"): {
        "gate": [
            ("a.bias_pointer.data ?", "false ?"), ("weight += n;", ""),
            ("row<C>(step.contexts, r)", "row<C>(step.contexts, 0)"),
        ],
    },
    ("csrc/cpu/search.h", "tests/test_search.py -k 'cpu and not opcheck'"): {
        "insert": [
            ("first + i != a.end && best.takes", "best.takes"),
            ("&& !repeats(r, first + i)", ""),
        ],
        "bias_of": [("a.word_mask.batch ? s : 0", "0")],
        "put_bias": [
            ("word < a.V && (!may_come || may_come[word])", "word < a.V"),
            ("comes ? bias : -(C)__builtin_inf()", "bias"),
            ("biased && a.bias_vocab.data", "a.bias_vocab.data"),
        ],
        "add_bias": [("bias == never ? never :", "")],
        "embed": [
            ("word < a.V ? word : a.unknown", "word < a.V ? word : 0"),
            ("* (C)a.embedding_scale", ""),
        ],
        "join": [("{step.H, step.Dv, step.E};", "{step.H, step.H, step.E};")],
        "normalise": [
            ("row<C>(attention.weights, i, r - i * K)", "row<C>(attention.weights, i, 0)"),
        ],
        "score_of": [
            ("copies() && source.has(s, word)", "false"),
            ("word < a.V ? (C)(logit + shift)", "true ? (C)(logit + shift)"),
        ],
        "forced": [("t < a.prefix_length ?", "t < 0 ?")],
        "score": [
            ("logits[a.end % P]", "logits[0]"),
            ("logits[word % P]", "logits[0]"),
            ("all_lanes[r].mass()", "lanes[r].mass()"),
            ("if (best[r].n < K) best[r].at[best[r].n].word = -1;", ""),
        ],
        "keep_weights": [
            ("(s * a.most + t) * K + k) * Tk", "(s * a.most + t) * K) * Tk"),
            ("sums[j] += from[j];", "sums[j] = from[j];"),
        ],
        "coverage_of": [("t % 2 * a.B + s", "s")],
        "penalty_of": [
            ("attention.lengths ? attention.lengths[i] : a.step.Tk", "a.step.Tk"),
            ("sums[j] > 1 ? 1 :", ""),
            ("continue;", ""),
        ],
        "draw": [
            ("if (shift != shift) return", "if (false) return"),
            ("t ? links[k - K]", "t ? links[k]"),
            ("all_ended = false;", ""),
        ],
        "draw_row": [
            ("if (t + 1 >= a.limits[s]) return", "if (false) return"),
            ("if (!may_end && a.end >= 0) scores[a.end] = never;", ""),
            ("a.numbers[at * a.most + t]", "a.numbers[at * a.most]"),
            ("scores[room.repeated[at * a.most + i]] = never;", ""),
            ("c < room.padded_words() ? load(scores + c) + (C)shift : splat(never)",
             "load(scores + c) + (C)shift"),
        ],
        "choose": [
            ("t + 1 >= a.limits[s]", "t >= a.limits[s]"),
            ("if (shift != shift) return", "if (false) return"),
            ("if (word != a.end && !repeats(r, word))", ""),
            ("if (copies() && source.has(s, word)) continue;", ""),
            ("(word == a.end ? (C)0 : (C)a.length_bonus)", "(C)a.length_bonus"),
            ("if (a.end >= 0 && t >= a.min_length)", "if (a.end >= 0)"),
            ("if (next >= 0) {", "if (false) {"),
        ],
        "continue_beam": [
            ("if (ends && rank < K)", "if (ends)"),
            ("x.score - before[x.slot]", "x.score"),
            ("if (ends || going == K) continue;", "if (ends) continue;"),
            ("going && !(enough &&", "going && !(true &&"),
            ("totals[0] / normaliser", "totals[0]"),
            ("coverage_of(s, x.slot, t), a.step", "coverage_of(s, going, t), a.step"),
        ],
        "finish": [
            ("all[i - 1].score < x.score", "all[i - 1].score > x.score"),
            ("n == K && !(x.score > all[--i].score)", "n == K"),
        ],
        "go_on": [
            ("from * K + link.parent", "from * K + k"),
            ("if (feeds) put(fed, room.feed, step.F);", ""),
            ("history_of(parent, t), step", "history_of(r, t), step"),
            ("of.log_weights.data ? of.log_weights : of.weights", "of.weights"),
            ("row<C>(weights, from, link.parent)", "row<C>(weights, from, k)"),
        ],
        "find_repetitions": [
            ("k = link.parent;", ""),
            ("words + t + 2 - n", "words + t + 1 - n"),
            ("i + n <= t + 1", "i + n <= t"),
        ],
        "history_of": [("t % 2 * a.B * K + r", "r")],
        "step_at": [
            ("shift_to_step(of.key_bounds, t, sizeof(int64_t));", ""),
            ("of.key_bounds.row = 0;", ""),
            ("shift_to_step(of.transition_prob, t, sizeof(C));", ""),
        ],
        "begin": [
            ("if (feeds) put(a.feed", "if (false) put(a.feed"),
            ("put(step.attention.previous, room.previous, step.Tk);", ""),
            ("k && !a.numbers ?", "k ?"),
        ],
        "leave_out": [
            ("if (item == 0) keep(", "if (item == 9) keep("),
            ("if (item == 3) keep(", "if (item == 9) keep("),
            ("if (item == 4) keep(", "if (item == 9) keep("),
            ("if (item == 6) keep(", "if (item == 9) keep("),
            ("if (item == 7) keep(", "if (item == 9) keep("),
            ("of.mask.row = 0;", ""),
            ("of.transition_prob.row = 1;", ""),
            ("if (of.lengths) of.lengths = room.lengths;", ""),
            ("keep(View{room.sentence, 1}, room.sentence, n, 1, 1);", ""),
        ],
        "keep": [("if (from.column == 1)", "if (true)")],
        "write": [
            ("* K + link.parent];", "* K];"),
            ("* K + link.parent) * Tk", "* K) * Tk"),
        ],
    },
    ("csrc/cpu/int8.h", "tests/test_search.py -k 'cpu and int8'"): {
        "round_vector": [("x * inverse + 12582912.f", "x * inverse + 12582911.f")],
        "scale_of": [
            ("size > largest ? size : largest", "size"),
            ("v < 0.f ? -v : v", "v"),
            ("/ 127.f", "/ 100.f"),
        ],
        "pack_bytes": [
            ("-= 128 * sums[lane]", "-= 127 * sums[lane]"),
            ("(2 + k / 4) * P", "2 * P"),
            ("+ i * stride, depth) : 0.f", "+ i * stride, min(depth, 64)) : 0.f"),
        ],
        "round_row": [("bytes[i] ^= 0x80;", "bytes[i] ^= 0x40;")],
        "multiply_bytes": [("tile(a, first + r, depth", "tile(a, r, depth")],
    },
    ("csrc/cpu/recurrent.cpp", "tests/test_search.py -k 'cpu and not opcheck'"): {
        "search": [
            ("of.exponentials.head = 0;", ""),
            ("if (given.word_mask && given.word_mask->size(0) == 1) a.word_mask.batch = 0;", ""),
            ('kernels().packed(step, a), "packed");', '64, "packed");'),
        ],
        "SearchChecker": [
            ('given.n_best == given.beam, "n_best"', 'true, "n_best"'),
            ('check(!given.bias_pointer || given.weight_pointer, "bias_pointer");', ""),
        ],
        "put_source": [
            ("fit.check(std::all_of(all, all + a.B * Tk, possible)", "fit.check((true)"),
            ("b * a.word_mask.batch;", "0;"),
            ("last = std::unique(first, last);", ""),
        ],
    },
    ("csrc/cpu/panels.h", "tests/test_recurrent.py -k narrow"): {
        "multiply_rows": [("x.column != 1 || narrow;", "x.column != 1;")],
        "multiply_rounded": [("(depth + 1) / 2", "depth / 2")],
    },
    ("csrc/cpu/narrow.h", "tests/test_recurrent.py tests/test_search.py -k 'narrow or bfloat16'"): {
        "pack_rows": [
            ("x[0] | (k + 1 < depth ? (uint32_t)x[1] << 16 : 0)", "x[1] | ((uint32_t)x[0] << 16)"),
            ("k = depth / 16 * 16;", "k = depth / 8 * 8;"),
        ],
        "pack": [("k + 1 < depth ? weight + stride : nullptr", "weight + stride")],
        "round_pairs": [("_mm512_cvtne2ps_pbh(high, low)", "_mm512_cvtne2ps_pbh(low, high)")],
        "store_pairs": [("_mm512_cvtneps_pbh((__m512)high)", "_mm512_cvtneps_pbh((__m512)low)")],
        "round_columns": [("load(x + stride + i) :", "load(x + i) :")],
        "multiply_pairs": [("run(narrow_tile<8>, 8)", "run(narrow_tile<4>, 8)")],
        "multiply_narrow": [
            ("panel += kPairs * kNarrowPanel", "panel += 2 * kPairs * kNarrowPanel"),
        ],
    },
    ("csrc/launch_recurrent.h", "tests/test_recurrent.py -k 'cpu and invalid_calls'"): {
        "LayerChecker": [
            ('needs(given.coverage, given.previous, "previous");', ""),
            ('check(!given.coverage || !given.key_bounds, "key_bounds");', ""),
            ('needs(given.dropout_output, given.weight_output, "dropout_output");', ""),
            ('needs(given.dropout_cell, given.cell, "dropout_cell");', ""),
            ('check(layers > 1, "hidden")', "0"),
        ],
        "ATTNFAST_RECURRENT_BACKWARD": [
            ("X(Optional, grad_loss, after, given.coverage, {B})", "X(Optional, grad_loss, any)"),
            ('X(Tensor, gates, of_layers, given.mode != "tanh", 4 * H)', "X(Tensor, gates, any)"),
        ],
        "ATTNFAST_LAYER_TERMS": [
            ("X(Optional, dropout, layered, dtype, {B, H})", "X(Optional, dropout, any)"),
        ],
    },
    ("csrc/cpu/team.h", RECURRENT): {
        "share": [("expected += items;", "")],
    },
    ("csrc/cpu/rows.h", "tests/test_attention.py -k 'diverged and cpu'"): {
        "fill_nan_row": [("if (seen == -(C)__builtin_inf()) continue;", "")],
        "finish_row": [
            ("!(mass > 0) && fill_nan_row<T>", "false && fill_nan_row<T>"),
            ('statistics[x] = diverged ? __builtin_nan("") : 0;', "statistics[x] = 0;"),
        ],
    },
    ("csrc/cpu/rows.h", "tests/test_statistics.py -k two_million"): {
        "add_up": [("kBlock = 256 * kLanes;", "kBlock = INT64_MAX / 2;")],
    },
    ("csrc/cpu/rows.h", "tests/test_statistics.py -k cpu"): {
        "exponentiate": [
            ("sums[1] += e == 0 ? e : e * x;", "sums[1] += e * x;"),
            ("(x == 0) & (-number > earliest);", "x == 0;"),
            ("number = numbers - mean;", "number = numbers;"),
            ("statistics[kMean] = (C)first + mean;", "statistics[kMean] = mean;"),
        ],
    },
    ("attnfast/ops/lowering.py", "tests/test_statistics.py -k 'span or nothing'"): {
        "LoweredCall._on_all_keys": [
            ("k * position + first, k * mean + first", "k * position, k * mean"),
            ("* (largest != 0)", "* 1"),
            ("k * k * variance", "k * variance"),
        ],
    },
    ("attnfast/ops/attention.py", "tests/test_statistics.py -k 'cpu or steps or compiled'"): {
        "_through_weights": [
            ("through = through - of_entropy", "through = through + of_entropy"),
            ("of_mean + of_variance * j", "of_mean + 2 * of_variance * j"),
            ("j = j - (weights * j)", "j = j - 0 * (weights * j)"),
        ],
        "_AttentionOperator.arguments": [("more = more + of.grad_weights", "pass")],
    },
    ("kernels/attention.py", "tests/test_statistics.py -k 'triton and not fuzz'"): {
        "_described": [
            ("b_rescale * (b_entropy_sum + b_l * b_gap)", "b_rescale * b_entropy_sum"),
            ("tl.where((b_l == 0) | (b_rescale == 0), 0, b_m - b_shift)",
             "tl.where(b_l == 0, 0, b_m - b_shift)"),
            ("tl.where(b_highest > b_m,", "tl.where(b_highest >= b_m,"),
            ("b_squares += b_step * b_step * b_old * b_share", "pass"),
        ],
    },
    ("csrc/cuda/tile.cuh", CUDA.format("statistics")): {
        "join": [
            ("step * step * mass * fade * share;", "0;"),
            ("if (its_top > top) row.position", "row.position"),
            ("fade * (row.drop + mass * gap)", "fade * row.drop"),
            ("gap = fade == 0 ? C(0) : top - both,", "gap = top - both,"),
        ],
    },
    ("csrc/cpu/span.h", SPANS): {
        "spread": [("clear_outside(out, n, own.from, own.to);", "")],
    },
    ("csrc/cuda/attention.cuh", CUDA.format("table or owes or large or vanish")): {
        "__launch_bounds__": [
            ("? 0 : p * (x(j) - mean + extra);", "? 0 : p * (x(j) - mean);"),
            ("context[r][x] *= softmax.factor[r];", ";"),
            ("const C share = share_of(softmax.highest[r], softmax.mass[r]);",
             "const C share = 1 / softmax.mass[r];"),
        ],
        "add_values": [("if (decltype(finite)::value || p != 0)", "if (true)")],
        "finish_sums": [("block < gridDim.y; ++block) total +=", "block < 1; ++block) total +=")],
    },
    ("csrc/cuda/attention.cuh", CUDA.format("table or owes or statistics")): {
        "__launch_bounds__": [
            ("if (out - out == 0) return;", "return;"),
            ("factor != 0) sum += factor *", "true) sum += factor *"),
            ("position = fmin(position, block.position);", "position = block.position;"),
            ("const C shift = top == -INFINITY ? 0 : top;", "const C shift = top;"),
        ],
    },
    ("csrc/cuda/attention_products.h", CUDA.format("products or owes or temperature")): {
        "run_backward": [("rest.grad_value = View{};", "rest.grad_score_given = false;")],
        "multiplies": [("return even(a, x) &&", "return")],
        "multiplies_keys": [("dense(a, a.grad_key, a.Tk, a.A);", "true;")],
        "multiply": [("0., x.scale));", "0., 1.));")],
        "run_forward": [("sums.scale = 1;", ""), ("sums.mask = sums.bias = View{};", "")],
    },
    ("csrc/cuda/attention.cuh", CUDA.format("parts")): {
        "put_part": [("if (a.statistics.data) end->row = softmax.described[r];", "")],
        "join_blocks": [
            ("* exp(softmax_of(block)->highest[r] - shift)", ""),
            ("exp(softmax.highest[r] - shift) * share_of(highest, total)",
             "share_of(highest, total)"),
            ("softmax_of(block)->described[r]};", "softmax.described[r]};"),
            ("warp + kWarps * blockIdx.y; r < rows;", "warp; r < rows;"),
            ("tile.row + first + r)[c]", "tile.row + r)[c]"),
        ],
    },
    ("csrc/cuda/step.cuh", "tests/test_cuda_build.py -k 'sanitizers and address'"): {
        "keys_of_part": [
            ("return {from, min(from + share, end)};", "return {from, from + share};"),
        ],
    },
    ("csrc/cuda/score.cuh", CUDA.format("test_table or near_zero")): {
        "score_tile": [
            ("wait_for_copies<1>();", "wait_for_copies<2>();"),
            ("else score_features<S, false>(rows, weights, part);\n      __syncwarp();",
             "else score_features<S, false>(rows, weights, part);"),
            ("copy(first + stride, turn ^= 1);", "copy(first + stride, turn);"),
            ("if (lane <= kFeatures)", "if (lane < kFeatures)"),
        ],
        "factor_rows": [
            ("near.x[i] = keys ? 0 : w[u][i];", "near.x[i] = 0;"),
        ],
        "load_quads": [
            ("v = c + 128 * u < width ? v : 0;", "v = v;"),
            ("min(c + 128 * u, width - 4)", "min(c, width - 4)"),
            ("load(row + c + 128 * u, false, width - c - 128 * u, x[u])",
             "load(row + c + 128 * u, false, width - c, x[u])"),
        ],
    },
    ("csrc/cuda/step.cuh", CUDA.format("owes or divided_among_blocks")): {
        "weighted_sums": [("sum[n][m] += p == 0 ? C(0) : p * more;", "sum[n][m] += p * more;")],
        "score_gradient": [("p == 0 ? C(0) : p * (x - mean + extra)", "p * (x - mean + extra)")],
    },
    ("csrc/cuda/step.cuh", CUDA.format("parts or step or frozen or divide")): {
        "__launch_bounds__": [
            ("if (mass[x] == 0) top[x] = -INFINITY;", ""),
            ("for (C& x : factor) x *= all.share();", ""),
            ("all.mass += mass[x] * faded;", "all.mass += mass[x];"),
            ("at<C>(parts, tile, tile.row * count + first)", "at<C>(parts, tile, first)"),
            ("if constexpr (in_parts) share[1][j] = 0;", "share[0][j] = 1;"),
            ("if (a.grad_score_given) return;", ""),
            ("i < count; i += kThreads) product +=", "i < 64; i += kThreads) product +="),
            ("if (first + kWarps * x < count) sum +=", "sum +="),
            ("first += kWarps * kAtOnce) {\n    C centred", "first += count) {\n    C centred"),
            ("(its_mean[x] - mean) * slopes[x];", "(its_mean[x] - mean);"),
            ("sums[2][lane] + sums[3][lane])", "sums[2][lane])"),
            ("score_gradient(weights[j], grad_score[j], mean, extra)",
             "score_gradient(weights[j], grad_score[j], mean, C(0))"),
        ],
        "differentiate_scores": [
            ("mean = mass == 0 ? C(0) : sum / mass;", "mean = sum / mass;"),
            ("share[1][j] = weight;", "share[1][j] = 0;"),
            ("in_parts ? of_weight : share[0][j];", "share[0][j];"),
        ],
        "step_blocks": [("min(rounds * kRound, int64_t{kStepKeys})", "rounds * kRound")],
        "launch_combine": [("while (count > kJoined) {", "while (false) {")],
    },
    ("csrc/launch_coverage.h", CUDA.format("of_no_rows")): {
        "coverage_gradients": [
            (
                "if (need_grad_score_vector) vector_parts",
                "if (need_grad_score_vector && a.Tq) vector_parts",
            ),
        ],
    },
    ("csrc/cuda/tile.cuh", CUDA.format("diverged")): {
        "share_of": [("top == kLeast<C> ? C(NAN) :", "")],
        "finish_score": [("? least : least * (1 - kUlp<C>);", "? least : s;")],
    },
    ("csrc/cuda/attention.cuh", CUDA.format("spans")): {
        "__launch_bounds__": [
            ("last = tile.row + 31 - __clz(lanes);", "last = tile.row + 30 - __clz(lanes);"),
        ],
    },
    ("csrc/cuda/coverage.cuh", CUDA.format("coverage or owes")): {
        "__launch_bounds__": [
            ("loss += p <= c ? p : c;", "loss += p;"),
            ("if (!smaller) s.grad_coverage[j] = c + grad_loss;", ""),
            ("s.grad_coverage[j] -= s.penalty * x;", ""),
        ],
        "past_backward": [("i < j + 2 && i < n; ++i)", "i < j + 1; ++i)")],
    },
    ("csrc/cuda/coverage.cuh", "tests/test_cuda_build.py -k 'sanitizers and thread'"): {
        "__launch_bounds__": [
            ("if (s.K || logarithms) wait_for_blocks();", "if (s.K) wait_for_blocks();"),
        ],
    },
    ("csrc/cuda/recurrent.cuh", CUDA.format("recurrent")): {
        "run_unit": [
            ("sums[sum_index(K, gate)] +=", "sums[gate] +="),
            ("a.t >= a.target_lengths[b]) u = Unit<C>{};", "false) u = Unit<C>{};"),
            ("if (a.dropout_cell.data) u.cell", "if (false) u.cell"),
        ],
        "run_unit_backward": [
            ("u.gates[sum_index(K, gate)];", "u.gates[gate];"),
            ("u.state += past_state;", ";"),
            ("cell = gates[1] * cell_before + gates[0] * gates[2];", ";"),
            ("state = undropped(state, before, factor, a.zoneout);", ";"),
        ],
        "put_copies": [("state * read<C>(masks.rows[n], b, i);", "state;")],
        "__launch_bounds__": [
            ("own.i / columns >= target_lengths", "own.i / columns > target_lengths"),
            ("staged.score(row, lane) + *at<C>(a.state_products, b + row, i + lane)",
             "staged.score(row, lane)"),
            ("m == 0 || !has_tanh ? C(0) : *at<C>(attentional, own.b, own.i) / m;",
             "has_tanh ? *at<C>(attentional, own.b, own.i) : C(0);"),
            ("a.has_tanh ? Math<C>::tanh(sum) : sum;", "Math<C>::tanh(sum);"),
            ("*to = adds ? *to + product : product;", "*to = product;"),
            ("*at<C>(gated, own.b, own.i) * (C(1) - gate);", "*at<C>(gated, own.b, own.i);"),
            ("*grad *= gate;", ";"),
            ("own.exists && own.i < target_lengths[own.b])", "own.exists)"),
            ("? *at<C>(inverse_fertility, own.b, own.i) * w : w;", "? w : w;"),
            ("n * a.H + own.i) = 0;", "n * a.H + own.i) *= 1;"),
        ],
        "sum": [
            ("+ read<C>(grad_query, b, i);", ";"),
            ("* read<C>(masks.rows[n], b, i);", ";"),
        ],
    },
    ("csrc/cuda/coverage.cuh", CUDA.format("recurrent")): {
        "begin": [
            ("if (grad_last) (a.transition_prob.data", "if (false) (a.transition_prob.data"),
            ("if (grad_inverse_fertility && !a.sums)", "if (grad_inverse_fertility)"),
        ],
        "__launch_bounds__": [
            ("grad_penalty + (a.sums ? *s.row(a.grad_penalty) : C(0));", "grad_penalty;"),
            ("(int j, C x) { products[j] = x; });", "(int j, C x) { products[j] = 0 * x; });"),
        ],
        "sum_values": [("(j == s.from ? C(0) : sums[c]) + *sum;", "*sum;")],
    },
    ("csrc/cuda/step.cuh", CUDA.format("recurrent")): {
        "__launch_bounds__": [
            ("put_context<T>(a, added, tile, c, total);", "put_context<T>(a, {}, tile, c, total);"),
            ("put_context<T>(a, added, tile, c, *sum * all.share());",
             "put_context<T>(a, {}, tile, c, *sum * all.share());"),
        ],
    },
    ("csrc/cuda/recurrent_loop.h", CUDA.format("recurrent")): {
        "StateParameters": [
            ("last(given.bias_hh), gates, of_gates);", "last(given.bias_hh), gates, 0);"),
            ("given.bias_gate, context_gate, of_query);", "given.bias_gate, context_gate, 0);"),
        ],
        "before": [
            ("of_step(query, a.attends_first ? t : t - 1, 0);", "of_step(query, t - 1, 0);"),
            ("of_step(joined, t - 1, a.Dv);", "of_step(joined, t - 1, 0);"),
        ],
        "project_values": [("given.weight_gate || given.dropout_joined ||", "")],
    },
    ("csrc/cuda/recurrent_forward.h", CUDA.format("recurrent")): {
        "copy_queries": [
            ("a.attends_first ? 0 : 1, a.T, 0, a.A), made.queries",
             "0, a.T, 0, a.A), made.queries"),
            ("if (masks.query) scale(made.queries, *masks.query);", ""),
        ],
        "multiply_weights": [("cuda::run_backward(sum, last().hidden);", "")],
        "read_below": [("of_layer(dropout_between, number - 1, true), t);", "Optional(), t);")],
        "run_steps": [("loop.masked(*fed, masks.feed, t)", "*fed")],
        "add_context": [("masks.joined, t);", "Optional(), t);")],
        "attend": [("copy_of(*last().seen, of.of_query, a);", "copy_of(*last().seen, 0, a);")],
    },
    ("csrc/cuda/recurrent_backward.h", CUDA.format("recurrent")): {
        "BackwardLoop": [
            ("asks_last || t + 1 < a.T) multiply_gradients(t + 1)",
             "t + 1 < a.T) multiply_gradients(t + 1)"),
            ("projected(given.grad_contexts ? Optional() :", "projected(false ? Optional() :"),
            ("if (projected && given.need_grad_key)", "if (false)"),
        ],
        "write_initial_grads": [("a.attends_first && query_is_state();", "false;")],
        "multiply_inputs": [
            ("loop.clear(a, input);", ";"),
            ("if (masks.feed) fed = masked_rows(fed, *masks.feed);", ""),
        ],
        "multiply_through": [
            ("loop.put_masked(product, *mask, t, out, adds);", "copy(product, out);"),
        ],
        "multiply_gradients_below": [("x.carried, 0, a.B, H, H)", "x.carried, 0, a.B, 0, H)")],
        "multiply_layer": [("if (x.mask) scale_steps(before, *x.mask);", "")],
        "multiply_states": [
            ("? 0 : 1, a.T, 0, H), *masks.query);", "? 0 : 0, a.T, 0, H), *masks.query);"),
            ("steps(*masks.joined, 0, a.T, a.Dv, H));", "steps(*masks.joined, 0, a.T, 0, H));"),
            ("if (masks.joined) read =", "if (false) read ="),
        ],
    },
    ("csrc/cuda/persistent.cuh", CUDA.format("all_steps_at_once")): {
        "split": [("low[i] = x[i] - high[i];", "low[i] = 0;")],
        "multiply": [
            ("int q0 = 0; q0 < fours; q0 +=", "int q0 = 0; q0 < kStaged; q0 +="),
            ("multiply_add(more, high[step], x_low);", ""),
        ],
        "clear_unseen": [("row[c] = 0;", ";")],
    },
    ("csrc/cuda/persistent_forward.cuh", CUDA.format("all_steps_at_once")): {
        "multiply_state": [("a.state_bias[output] + sums(i, row)", "sums(i, row)")],
        "attend": [
            ("mine.mass == 0 ? -INFINITY : mine.top", "mine.top"),
            ("put_context<float>(given, a.added, tile, c, sum * all.share());",
             "put_context<float>(given, a.added, tile, c, sum);"),
        ],
        "run_cells": [("fed_now ? rows_of_step", "t ? rows_of_step")],
    },
    ("csrc/cuda/persistent_backward.cuh", CUDA.format("all_steps_at_once")): {
        "run_cells_backward": [
            ("if (a.copies > 1) g +=", "if (a.copies > 2) g +="),
            ("a.mask.data ? 1 : 0}, a.grad_state}", "a.mask.data ? 1 : 0}, {}}"),
        ],
        "multiply_fed": [
            ("return void(*at<float>(a.grad_feed, b, f) = sum(0));", "return;"),
            ("const float all = *grad + sum(0);", "const float all = sum(0);"),
        ],
        "attend_backward": [
            ("sum += from[0] + (end(i)->mean - mean) * from[width];", "sum += from[0];"),
            ("more ? x + more[j] : x", "x"),
        ],
    },
    ("csrc/cuda/copying.cuh", CUDA.format("copying")): {
        "sort_keys": [
            ("before += source[j] == w;", ""),
            ("before == 0 ? same : 0", "same"),
        ],
        "sweep": [("first += of_block * gridDim.y", "first += of_block")],
        "for_each_word": [
            ("i = threadIdx.x + kThreads * blockIdx.y", "i = threadIdx.x"),
            ("k < count; ++k) mass", "k < 1; ++k) mass"),
        ],
        "__launch_bounds__": [
            ("all += of_blocks<Add>(plus, turn);", ""),
            ("if (highest > top) part *= exp(top - highest);", ""),
        ],
        "generates": [("w < V && widen(logits[w]) != -INFINITY", "w < V")],
    },
    ("csrc/cuda/copying.cuh", "tests/test_cuda_build.py -k 'sanitizers and thread'"): {
        "__launch_bounds__": [
            ("wait_for_blocks(); r.for_each_word", "__syncthreads(); r.for_each_word"),
            ("w = r.V + threadIdx.x + kThreads * blockIdx.y", "w = r.V + threadIdx.x"),
        ],
    },
}  # fmt: skip
