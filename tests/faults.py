"""The faults of tests/mutants.py: a file, the tests that concern it, text and what it becomes.

One line each, as a slip of the hand would make it: a term left out, a bound off by one, a sign, a
case forgotten. What no test could tell from the right text (a shortcut taken or not) is no fault.
"""

OURS = "not (triton or cuda or reference or fuzz or compile or opcheck or gradcheck)"
CPU = f"tests/test_attention.py -k '{OURS}'"
ORACLE = "tests/test_attention.py -k '(reference or scale) and not (check or compile or fuzz)'"
STEPS = f"tests/test_memory.py -k '{OURS}'"
HISTORY = f"tests/test_coverage.py -k '{OURS}'"
SPANS = f"tests/test_span.py -k '{OURS}'"
TRITON = "tests/test_attention.py -k 'triton and not fuzz and not check and not compile'"
TRITON_HISTORY = "tests/test_coverage.py -k 'triton and not fuzz and not check and not compile'"
REFUSALS = "tests/test_attention.py tests/test_memory.py -k 'bad or forward_mode or autocast'"
RECURRENT = "tests/test_recurrent.py -k 'cpu and (table or fuzz or nothing or bits)'"
CUDA = "tests/test_cuda.py -k '{}'"

FAULTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("attnfast/decoding/steps.py", "tests/test_coverage.py -k 'in_place_between or hidden_rows'"): [
        ("a[0] is not b[0] or a[1] != b[1]", "a[0] is not b[0]"),
        (".masked_fill(hidden, 0)", ""),
    ],
    ("attnfast/decoding/steps.py", STEPS): [
        ("            and source[4] == score\n", ""),
        ("source[0] is key", "True"),
        ("scale=1.0, score=ctx.shared.score,", "scale=1.0, score='tanh',"),
        ("if x._version != version:", "if False:"),
        ("number_of_backward() == self.task", "number_of_backward() != -2"),
        ("if saves_elsewhere():", "if False:"),
        ("if is_intercepted():", "if False:"),
    ],
    ("attnfast/decoding/waiting.py", STEPS): [
        ("if not torch.is_grad_enabled() or not roots:", "if True:"),
    ],
    ("attnfast/decoding/steps.py", "tests/test_memory.py -k several"): [
        ("zip(grads, more)) if grads else more", "zip(grads, more)) if False else more"),
        ("            grad_score = grad_score * of.scale\n", "            pass\n"),
    ],
    ("attnfast/ops/operators.py", "tests/test_attention.py -k 'table and cpu'"): [
        ("grad_score.sum_to_size(shape).to(dtype)", "grad_score * 0"),
    ],
    ("attnfast/decoding/steps.py", HISTORY): [
        ("gradients.grad_score * of.scale", "gradients.grad_score"),
    ],
    ("attnfast/decoding/memory.py", "tests/test_history.py -k reorder"): [
        ('names = ("key", "value", "lengths", "mask", "fertility")',
         'names = ("key", "value", "lengths", "mask")'),
    ],
    ("attnfast/decoding/memory.py", f"tests/test_sparse.py {STEPS}"): [
        ("is sigma is None and not isinstance(need_weights, str)", "is sigma is None"),
        ("isinstance(place.span, Span) and place.span.stride == 1", "isinstance(place.span, Span)"),
    ],
    ("attnfast/reference.py", ORACLE): [
        ("visible = visible & (call.bias != -math.inf)", "pass"),
        ("e = call.scale * score(call.query, k,", "e = score(call.query, k,"),
    ],
    ("attnfast/reference.py", CPU): [
        ("log_sum_exp = log_sum_exp.masked_fill(empty.squeeze(-1), -math.inf)", "pass"),
        ("ACTIVATIONS[name](features)", "features.tanh()"),
    ],
    ("attnfast/functional.py", CPU): [
        ("scale=max(call.query.shape[-1], 1) ** -0.5", "scale=max(call.query.shape[-1], 1) ** 0.5"),
        ("bias = None if call.bias is None else call.bias / temperature\n            call",
         "bias = call.bias\n            call"),
    ],
    ("attnfast/ops/attention.py", CPU): [
        ('"need_grad_key": ("key", "value", "weight")', '"need_grad_key": ("key", "value")'),
    ],
    ("attnfast/functional.py", SPANS): [
        ("sigma * temperature**0.5", "sigma * temperature"),
    ],
    ("attnfast/lowering.py", SPANS): [
        ("(lengths + (k - 1)).div(k", "lengths.div(k"),
        ("weight = weight.repeat_interleave(k, 0)", "weight = weight.repeat(k, 1)"),
        ("query.shape[-2], Tk) % span.stride", "query.shape[-2], Tk) * 0"),
        ("neighbours = all(index[-1] - index[0] < len(index) for index in groups.values())",
         "neighbours = True"),
        ("prior if call.bias is None else call.bias + prior", "prior"),
    ],
    ("attnfast/ops/span.py", SPANS): [
        ("return left, 0 if self.causal else right", "return left, right"),
        ("right // self.stride + 1\n", "right // self.stride\n"),
        ("(p + right).floor()", "(p + right).ceil()"),
        ("phase = 0 if self.fixed else p % k", "phase = p % k"),
        ('return Tk - Tq if position == "end"', 'return Tq - Tk if position == "end"'),
        ("return rows * ends / max(Tq, 1)", "return rows * Tk / max(Tq, 1)"),
        ("return -0.5 * ((keys", "return -1.0 * ((keys"),
        ("(row < 0) | (row >= Tq)", "row >= Tq"),
        ("stop = torch.minimum(stop, _steps(ends - phase, k))", "pass"),
        ("inside, 0))\n\n\ndef to_columns", "inside, 1))\n\n\ndef to_columns"),
        ("return _steps(Tk, self.stride)\n        if", "return Tk // self.stride\n        if"),
    ],
    ("attnfast/reference.py", HISTORY): [
        ("(p if call.inverse_fertility is None else call.inverse_fertility * p)", "p"),
        ("(e - top).clamp(max=80).exp()", "(e - top).exp()"),
        ("e = e - call.penalty.unsqueeze(-1) * c", "e = e - call.penalty.unsqueeze(-1)"),
        ("u * torch.nn.functional.pad(p, (1, 0))[..., :-1]",
         "u * torch.nn.functional.pad(p, (0, 1))[..., 1:]"),
    ],
    ("attnfast/ops/coverage.py", HISTORY): [
        ('("filters", "projection"),\n    },', '("filters",),\n    },'),
        ("or filters.shape[-1] % 2 == 0:", ":"),
    ],
    ("attnfast/ops/copying.py", "tests/test_copying.py -k 'not triton and not fuzz'"): [
        ("if not 0 <= word < V + extra_words:", "if not 0 <= word <= V + extra_words:"),
        ("or not 0 <= extra_words < 2**31", "or not -1 <= extra_words < 2**31"),
    ],
    ("attnfast/reference.py", "tests/test_copying.py -k 'not triton and not fuzz'"): [
        ("masked_fill(never, LOWEST)", "masked_fill(never, -math.inf)"),
    ],
    ("attnfast/ops/arguments.py", REFUSALS): [
        ("if not 0 <= length <= keys:", "if not 0 <= length:"),
        ("if not is_finite(scale):", "if False:"),
        ("narrow = (torch.float32, *HALF)", "narrow = (torch.float32,)"),
        ('if v[:-1] != k[:-1]:', 'if v[:-2] != k[:-2]:'),
    ],
    ("attnfast/_torch.py", REFUSALS): [
        ("forward_ad._current_level >= 0", "forward_ad._current_level > 0"),
    ],
    ("attnfast/ops/operators.py", "tests/test_attention.py -k lies_in"): [
        ("key=lambda axis: -lead[axis]", "key=lambda axis: lead[axis]"),
    ],
    ("attnfast/ops/operators.py", "tests/test_attention.py -k gradcheck"): [
        ("torch.float64 if dtype == torch.float64 else torch.float32", "torch.float32"),
    ],
    ("attnfast/nn/attention.py", "tests/test_nn.py -k 'not compile and not parallel'"): [
        ("scale = scale / self.temperature", "scale = scale * self.temperature"),
        ('None if score == "scaled_dot" else 1.0', "1.0"),
        ("bound = weight_shape[-1] ** -0.5", "bound = weight_shape[-1] ** 0.5"),
        ("self.query_proj = nn.Linear(query_dim, attn_dim, bias=bias)",
         "self.query_proj = nn.Linear(query_dim, attn_dim, bias=True)"),
    ],
    ("attnfast/nn/history.py", "tests/test_history.py"): [
        ("result.loss if history.loss is None else history.loss + result.loss", "result.loss"),
        ("first[:, :1] = 1", "first[:, -1:] = 1"),
        ("self.activation = activation", "pass"),
        ("fertility=self.fertility * asked", "fertility=asked"),
        ("seen if mask is None else seen & mask", "seen"),
        ('"coverage" if self.channels == "cumulative" else "previous"', '"previous"'),
        ("1 + (channels == \"both\")", "1"),
    ],
    ("attnfast/nn/sparse.py", "tests/test_sparse.py"): [
        ("history._replace(rows=history.rows + Tq)", "history._replace(rows=history.rows)"),
        ("key = key + best if self.span.compact else best", "key = best"),
        ("memory.lengths.unsqueeze(-1) * share", "memory.key.shape[-2] * share"),
        ("sigma = (left or 0) / 2", "sigma = left or 0"),
        ("context = context * scale", "pass"),
    ],
    ("attnfast/nn/copying.py", "tests/test_history.py -k pointer"): [
        ("log=log, backend", "log=True, backend"),
        ("extra_words=extra_words, log", "log"),
    ],
    ("attnfast/losses.py", "tests/test_losses.py"): [
        ("return loss + _unseen(aligned, inside, kind)", "return loss"),
        ("return loss.masked_fill(~exists, 0)", "return loss"),
        ("- 2 * aligned + 1)", "- 2 * aligned)"),
        ("SMALLEST = 1e-8", "SMALLEST = 1e-6"),
        ("masked_fill(keys < 0, 0)", "masked_fill(keys < 1, 0)"),
    ],
    ("attnfast/models/search.py", "tests/test_models.py -k 'beam or search or gnmt or said'"): [
        ("((5 + step) / 6)", "((6 + step) / 6)"),
        ("topk(2 * beam)", "topk(beam + 1)"),
        ("    logits[:, :EOS] = -math.inf", "    pass"),
        ("2 * lengths.cpu() + 10", "2 * lengths.cpu() + 11"),
        ("scores[:, 0] = 0 ", "scores[:] = 0 "),
        ("return [max(hypotheses)[1]", "return [min(hypotheses)[1]"),
        ("index // vocab + offset", "index // vocab"),
    ],
    ("attnfast/models/decoders.py", "tests/test_models.py"): [
        ("state._replace(feed=done.attentional[:, -1])", "state"),
        ("target_mask=target_mask, need_weights", "target_mask=None, need_weights"),
        ("torch.zeros_like(hidden) if lstm", "torch.ones_like(hidden) if lstm"),
        ("hidden=hx[0][0], cell=hx[1][0])", "hidden=hx[0][0])"),
    ],
    ("attnfast/models/seq2seq.py", "tests/test_models.py tests/test_translate.py -k 'not train'"): [
        ("words >= self.embedding.num_embeddings", "words > self.embedding.num_embeddings"),
        ("return states * exists.unsqueeze(-1)", "return states"),
        ("            words != PAD,\n", "            None,\n"),
        ("self.dropout(self.embedding(words) * self.embedding.embedding_dim**0.5)",
         "self.dropout(self.embedding(words))"),
        ("            self.embedding.weight[PAD] = 0\n", "            pass\n"),
    ],
    ("attnfast/training.py", "tests/test_training.py"): [
        ("    nn.utils.clip_grad_norm_(model.parameters(), options.clip)\n", ""),
        ('group["lr"] = rate', "pass"),
        ("smoothing = 0.0 if copying else options.label_smoothing",
         "smoothing = options.label_smoothing"),
        ("batch.target_out).item() * count", "batch.target_out).item()"),
        ("optimizer.zero_grad(set_to_none=True)", "pass"),
        ("coverage.sum() / words", "coverage.mean()"),
        ("    model.eval()\n    total", "    total"),
        ("label_smoothing=label_smoothing", "label_smoothing=0.0"),
    ],
    ("attnfast/data.py", "tests/test_translate.py -k 'batch or pairs or tokenizers or words_of'"): [
        ("    order.sort(key=lambda example: (len(example.target), len(example.source)))\n", ""),
        ("elif longer > max_length:", "elif longer >= max_length:"),
        ("words[: vocab_size - 4]", "words[:vocab_size]"),
        ('f"{seed} {epoch}"', 'f"{seed}"'),
        ("[len(ids) + 1 for ids in sources]", "[len(ids) for ids in sources]"),
    ],
    ("attnfast/backends.py", "tests/test_package.py -k 'runs_on or triton_needs or goes_'"): [
        ("any(own >= x for x in alike)", "any(own <= x for x in alike)"),
        ("own >= built[-1]", "own >= built[0]"),
        ("OLDEST_FOR_TRITON = (8, 0)", "OLDEST_FOR_TRITON = (7, 5)"),
        ("return 0 if request.step or", "return 2 if request.step or"),
        ("ranks[name] < math.inf", "True"),
        ("if request.filters > self.most_filters:", "if False:"),
    ],
    ("attnfast/nn/layer.py", "tests/test_nn_recurrent.py -k 'not compile and not table'"): [
        ("history.loss is None else history.loss + done.loss", "True else None"),
        ("done.weights[:, -1] if done.weights.shape[1]", "history.previous if False"),
        ("mask = seen if mask is None else seen & mask", "pass"),
        ("history.coverage, history.previous, None,", "history.coverage, history.coverage, None,"),
        ("\"cell\": -2, \"feed\": 0}", "\"cell\": -2}"),
        ("all(x is y for x, y in zip(parameters, before.parameters))", "True"),
        ("(steps >= target_lengths[:, None]).unsqueeze(-1), 0)", "steps.view(1, -1, 1) < 0, 0)"),
        ("of_memory.check_unchanged()", "pass"),
        ("return x.flip(1)", "return x"),
        ("lengths[:, None] - 1 - steps, steps)", "lengths[:, None] - 1 - steps, 0)"),
    ],
    ("attnfast/integrations/cache.py", "tests/test_replace_cache.py"): [
        ("return x._version, x.data_ptr()", "return 0, x.data_ptr()"),
        ("self.way == way\n", "True\n"),
        ("_state(x) == self.state and _part(x) == self.part", "_state(x) == self.state"),
    ],
    ("attnfast/integrations/decoders.py", "tests/integrations/test_decoders.py"): [
        ("x.training and x.p > 0", "x.training and x.p > 1"),
        ("is_plain(attention, type(attention))", "True"),
        ("backend_of(None, None, like, stack=drops or layers > 1) is not None", "True"),
        ("x.shape[:2] == (layers, len(source))", "True"),
        ("zip(dropouts, masks)", "zip(dropouts[::-1], masks[::-1])"),
        (".movedim(0, 2)", ".movedim(1, 0).movedim(1, 2)"),
    ],
    ("attnfast/integrations/d2l.py", "tests/integrations/test_decoders.py -k d2l"): [
        (".roll(-source.shape[2], 1)", ""),
        ("valid_lens is not None and valid_lens.dim() != 1", "False"),
        ("attention.attention_weights = self._attention_weights[-1]", "pass"),
    ],
    ("attnfast/integrations/tutorials.py", "tests/integrations/test_decoders.py"): [
        ("words[:, : T - 1]", "words[:, 1:T]"),
        ("torch.cat([self.dropout(x) for x in embedded.split(1, 1)], 1)", "self.dropout(embedded)"),
    ],
    ("attnfast/integrations/onmt.py", "tests/integrations/test_decoders.py"): [
        ("*hidden, feed=feed[0])", "*hidden)"),
        ("not all(is_plain(x, nn.LSTMCell, nn.GRUCell) for x in cells)", "False"),
    ],
    ("attnfast/integrations/probe.py", "tests/integrations/test_decoders.py -k copies"): [
        ("(state | HIDDEN)", "state"),
    ],
    ("attnfast/integrations/replace.py", "tests/integrations/test_decoders.py -k left_alone"): [
        ("if x.adapter and not x.adapter.attention]", "if x.adapter]"),
        ("if all(attention is not x.module", "if False and all(attention is not x.module"),
    ],
    ("attnfast/integrations/serve.py", "tests/test_replace.py"): [
        ("x = x + p.flatten()[:0].sum()", "pass"),
    ],
    ("kernels/attention.py", TRITON): [
        ("m_s = m_s & (b_bias != -float(\"inf\"))  # also", "m_s = m_s  # also"),
        ("b_shift = tl.where(b_max == -float(\"inf\"), 0, b_max)", "b_shift = b_max"),
        ("b_l = b_l * b_rescale + tl.sum(b_p, 1)", "b_l = b_l + tl.sum(b_p, 1)"),
        ("m_k = tl.max(m_s.to(tl.int32), 0) > 0", "m_k = o_k < n"),
        ("tl.max(tl.abs(b_chunks), 1) * 2.0**-30, LEAST_WEIGHT)",
         "tl.max(tl.abs(b_chunks), 1) * 0.0, 2.0**-120)"),
        ("FACTORED_LIMIT = tl.constexpr(21.8)", "FACTORED_LIMIT = tl.constexpr(40.0)"),
        ("1.4286068203094172e-06", "1.4286068203094172e-04"),
        ("b_g - b_delta[:, None] + b_dlse[:, None]", "b_g - b_delta[:, None]"),
        ("b_dw = -2 * scale * tl.sum(b_dw, 0)", "b_dw = -2 * tl.sum(b_dw, 0)"),
        ("m_1 = o_x < tl.where(y + 1 < end, Tx, 0)", "m_1 = m_x"),
        ("tl.load(p_lengths + i_b), 0), Tk)", "tl.load(p_lengths), 0), Tk)"),
        ("tl.where(m_diverged, float(\"nan\"), 1 / tl.where(m_empty, 1, b_l))",
         "1 / tl.where(m_empty, 1, b_l)"),
        ("LEAST, b_s * SHORT))", "LEAST, b_s))"),
        ("0.25 * b_ones, 0.05 * b_ones)", "0.25 * b_ones, 0.25 * b_ones)"),
    ],
    ("kernels/coverage.py", TRITON_HISTORY): [
        ("b_g += tl.where(b_p <= b_c, grad_loss, 0)", "b_g += tl.where(b_p < b_c, grad_loss, 0)"),
        ("b_dpenalty -= b_ds * b_c", "b_dpenalty += b_ds * b_c"),
        ("b_dp += u * tl.load(p_dr_k + 1, mask=o_k < Tk - 1, other=0)", "pass"),
        ("b_c + b_rate * b_p", "b_c + b_p"),
        ("m_k = b_ds != 0  #", "m_k = o_k < n  #"),
        ("tl.where(b_exp > most, most, b_exp) * inverse", "b_exp * inverse"),
    ],
    ("kernels/copying.py", "tests/test_copying.py -k 'triton and not check and not compile'"): [
        ("every += tl.sum(b_plus, 0)", "pass"),
        ("tl.where(b_da > HIGHEST, HIGHEST,", "tl.where(b_da > HIGHEST, b_da,"),
        ("b_u = _exp(b_d)", "b_u = tl.exp(b_d)"),
    ],
    ("csrc/score.h", CPU): [
        ("return z < V{} ? z * C(0.2) : z;", "return z < V{} ? z * C(0.21) : z;"),
        ("return f > V{} ? g : g * C(0.2);", "return f > V{} ? g : g;"),
    ],
    ("csrc/arguments.h", "tests/test_schemas.py"): [
        ("TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));", ""),
    ],
    ("csrc/launch_coverage.h", "tests/test_misfits.py tests/test_schemas.py"): [
        ("X(Optional, previous, rows, sums, {Tk})", "X(Optional, previous, any)"),
    ],
    ("csrc/cpu/attention_kernel.cpp", CPU): [
        ("const C rest = a.grad_log_sum_exp.data ?", "const C rest = false ?"),
        ("pj == 0 ? pj : pj * (xj - mean + rest) * scale", "pj * (xj - mean + rest) * scale"),
        ("x = x == x ? x : again[r * width + c];", "x = x;"),
        ("finite ? (v - v == 0 ? v : Vec<C>{})", "finite ? v"),
        ("multiply_by((C)a.scale, item.seen, row(i));", ";"),
    ],
    ("csrc/cpu/coverage_kernel.cpp", HISTORY): [
        ("odds[j] = odds[j] * inverse > (C)kMostOdds ? (C)kMostOdds : ", "odds[j] = "),
        ("lost += x <= c ? x : c;", "lost += x;"),
        ("for (int64_t j = n; j < a.Tk; ++j) row[j] = last[j] = 0;", ""),
    ],
    ("csrc/cpu/coverage_kernel.cpp", RECURRENT): [
        ("(a.sums ? *row(a.grad_penalty) : 0)", "0"),
        ("if (a.grad_last.data) copy(row(a.grad_last)", "if (false) copy(row(a.grad_last)"),
    ],
    ("csrc/cpu/copying_kernel.cpp", "tests/test_copying.py -k 'cpu and not compile'"): [
        ("mass[source[i]] += widen(weights[i]);", "mass[source[i]] = widen(weights[i]);"),
        ("w < V && x[w] != -infinity<C>()", "w < V"),
    ],
    ("csrc/cpu/recurrent_steps.h", RECURRENT): [
        ("if (t) move_on(step.previous = step.weights, -1, sizeof(C));", ""),
        ("if (a.step_lengths) step.lengths =", "if (false) step.lengths ="),
    ],
    ("csrc/cpu/recurrent_forward.h", RECURRENT): [
        ("sum += *row<C>(a.attention.loss, b, t);", "sum = *row<C>(a.attention.loss, b, t);"),
        ("if (pads) unit = Unit<Vec<C>>{};", ""),
        ("out[of_state(a.cell, gate) * width]", "out[gate * width]"),
        ("if (lift) store_part(", "if (false) store_part("),
        ("{masked[t % 2] + (layer * a.B + b) * a.H, a.H}", "{masked[t % 2] + b * a.H, a.H}"),
        ("packed.hidden.at(own)", "packed.hidden.at(panel)"),
        ("in_place.scores = step.weights;", ""),
    ],
    ("csrc/cpu/recurrent_backward.h", RECURRENT): [
        ("clear(row<C>(room.kept, b), room.kept.batch);", "{}"),
        ("row<C>(h.grad_previous, b)[j] = 0;", ""),
        ("if (room.kept.data) finish_history();", ""),
        ("if (!runs(a, b, t)) x = Vec<C>{};", ""),
        ("if (given_cell) grad_cell += part(given_cell);", ""),
        ("if (layer == a.layers - 1 && a.attends_first && a.T) add_attended(0, block, x);", ""),
        ("if (layer == a.layers - 1) add_attended(", "add_attended("),
        ("f = mask == 0 ? Vec<C>{} : f / mask;", ""),
        ("x, at_layer<C>(a.dropout_above, layer - 1), t);", "x, View{}, t);"),
        ("below(a.dropout_above), gates", "none, gates"),
        ("columns_from(rest.left, gates);", "columns_from(rest.left, alike);"),
        ("there = runs(a, b, t) && (!before || x.first.data)", "there = !before || x.first.data"),
        ("if (n > 0 && x.factor.data) v *=", "if (false) v *="),
    ],
    ("csrc/cell.h", RECURRENT): [
        ("u.state = n + z * (state - n);", "u.state = n + z * state;"),
        ("const V to_cell = grad_cell + g * o", "const V to_cell = g * o"),
    ],
    ("csrc/cpu/panels.h", "tests/test_linear.py"): [
        ("if (bias) sum += load_part", "if (false) sum += load_part"),
        ("k ? sum + load_part", "false ? sum + load_part"),
        ("const bool gathers = x.sums || x.column != 1;", "const bool gathers = x.column != 1;"),
        ("gathers ? own : x.left + k;", "gathers ? own : x.left;"),
        ("sums[m] += of_block[m];", "sums[m] = of_block[m];"),
    ],
    ("csrc/cpu/linear_kernel.cpp", "tests/test_linear.py"): [
        ("min(kProductRows, a.M - first_row)", "a.M - first_row"),
        ("if (a.right_column == 1) pack(", "if (a.right_row == 1) pack("),
    ],
    ("csrc/cpu/linear.cpp", "tests/test_linear.py"): [
        ("X(Tensor, grad_output, sizes, own, {M, N})", "X(Tensor, grad_output, any)"),
    ],
    ("attnfast/nn/linear.py", "tests/test_linear.py"): [
        ("        or is_autocast_on()\n", ""),
        ("type(y) in (Tensor, nn.Parameter)", "True"),
        ("x.requires_grad != weight.requires_grad", "False"),
        ("x.dtype in (torch.float32, torch.float64)", "True"),
        (" or backend not in (None, \"cpu\")", ""),
        ("        or is_intercepted()\n", ""),
        ("    if not is_plain(layer, nn.Linear):", "    if not isinstance(layer, nn.Linear):"),
    ],
    ("csrc/cpu/recurrent.cpp", "tests/test_nn_recurrent.py -k pack_once"): [
        ('(given.packed->numel()) == kernels().packed(a), "packed");', '(1), "packed");'),
    ],
    ("attnfast/models/search.py", "tests/test_search.py"): [
        (" or (model.dropout.training and model.dropout.p)", ""),
        ("or words.max_norm ", ""),
        ("begin=BOS, end=EOS", "begin=EOS, end=EOS"),
        ("embedding_scale=words.embedding_dim**0.5, ", ""),
        ("    if isinstance(attention, HistoryAttention):\n        return None\n", ""),
    ],
    ("csrc/cpu/greedy_search.h", "tests/test_search.py -k 'cpu and not opcheck'"): [
        ("~(scores <= score) & (score == score)", "~(scores < score) & (score == score)"),
        ("~(scores <= score) & (score == score) & among", "~(scores <= score) & among"),
        ("lanes_within<C>(word, a.end, a.V)", "lanes_within<C>(word, 0, a.V)"),
        ("score[i] == best.score && word[i] < best.word", "false"),
        ("a.limits[b] <= t + 1", "a.limits[b] <= t"),
        ("{0, H, H + a.even.Dv}, which", "{0, H, H}, which"),
        ("step = t % 2 ? a.odd : a.even", "step = a.even"),
        ("    move_on(of.span, t, sizeof(int64_t));\n", ""),
        ("if (!last.attends_first && last.F) put(", "if (false) put("),
        ("* (C)a.embedding_scale", ""),
        ("if (item == 0) keep(", "if (item == 9) keep("),
        ("if (item == 3) keep(", "if (item == 9) keep("),
        ("if (item == 4) keep(", "if (item == 9) keep("),
        (", in_place(step.cells, step.H)", ""),
        ("      in_place(step.contexts, step.Dv);\n", ""),
        ("      in_place(a.even.input, step.E);\n", ""),
        ("if (of.lengths) of.lengths = room.lengths;", ""),
        ("      keep(View{room.sequence, 1}, room.sequence, n, 1, 1);\n", ""),
        ("if (from.column == 1) __builtin", "if (true) __builtin"),
    ],
    ("csrc/cpu/narrow.h", "tests/test_recurrent.py tests/test_search.py -k 'narrow or bfloat16'"): [
        ("x[0] | (k + 1 < depth ? (uint32_t)x[1] << 16 : 0)", "x[1] | ((uint32_t)x[0] << 16)"),
        ("k + 1 < depth ? weight + stride : nullptr", "weight + stride"),
        ("k = depth / 16 * 16;", "k = depth / 8 * 8;"),
        ("_mm512_cvtne2ps_pbh(high, low)", "_mm512_cvtne2ps_pbh(low, high)"),
        ("run(narrow_tile<8>, 8)", "run(narrow_tile<4>, 8)"),
        ("panel += kPairs * kNarrowPanel", "panel += 2 * kPairs * kNarrowPanel"),
    ],
    ("csrc/launch_recurrent.h", "tests/test_recurrent.py -k 'cpu and misfits'"): [
        ('needs(given.coverage, given.previous, "previous");', ""),
        ('check(!given.coverage || !given.span, "span");', ""),
        ("X(Optional, grad_loss, after, given.coverage, {B})", "X(Optional, grad_loss, any)"),
        ('X(Tensor, gates, of_layers, given.mode != "tanh", 4 * N)', "X(Tensor, gates, any)"),
        ("X(Optional, dropout, layered, own, {B, N})", "X(Optional, dropout, any)"),
        ('needs(given.dropout_output, given.weight_output, "dropout_output");', ""),
        ("check(layers > 1, \"hidden\")", "0"),
    ],
    ("csrc/cpu/team.h", RECURRENT): [
        ("expected += items;", ""),
    ],
    ("csrc/cpu/rows.h", "tests/test_attention.py -k 'diverged and cpu'"): [
        ("if (seen == -(C)__builtin_inf()) continue;", ""),
        ("!(mass > 0) && diverge<T>", "false && diverge<T>"),
        ("statistics[x] = diverged ? __builtin_nan(\"\") : 0;", "statistics[x] = 0;"),
    ],
    ("csrc/cpu/rows.h", "tests/test_statistics.py -k cpu"): [
        ("products += e == 0 ? e : e * x;", "products += e * x;"),
        ("(x == 0) & (-number > earliest);", "x == 0;"),
        ("number = numbers - mean;", "number = numbers;"),
        ("statistics[kMean] = (C)first + mean;", "statistics[kMean] = mean;"),
    ],
    ("attnfast/lowering.py", "tests/test_statistics.py -k 'span or nothing'"): [
        ("k * position + first, k * mean + first", "k * position, k * mean"),
        ("* (largest != 0)", "* 1"),
        ("k * k * variance", "k * variance"),
    ],
    ("attnfast/ops/attention.py", "tests/test_statistics.py -k 'cpu or steps or compiled'"): [
        ("through = through - of_entropy", "through = through + of_entropy"),
        ("of_mean + of_variance * j", "of_mean + 2 * of_variance * j"),
        ("j = j - (weights * j)", "j = j - 0 * (weights * j)"),
        ("more = more + of.grad_weights", "pass"),
    ],
    ("kernels/attention.py", "tests/test_statistics.py -k 'triton and not fuzz'"): [
        ("b_rescale * (b_drop + b_l * b_gap)", "b_rescale * b_drop"),
        ("tl.where((b_l == 0) | (b_rescale == 0), 0, b_m - b_shift)",
         "tl.where(b_l == 0, 0, b_m - b_shift)"),
        ("tl.where(b_highest > b_m,", "tl.where(b_highest >= b_m,"),
        ("b_squares += b_step * b_step * b_old * b_share", "pass"),
    ],
    ("csrc/cuda/tile.cuh", CUDA.format("statistics")): [
        ("step * step * mass * fade * share;", "0;"),
        ("if (its_top > top) row.position", "row.position"),
        ("fade * (row.drop + mass * gap)", "fade * row.drop"),
        ("gap = fade == 0 ? C(0) : top - both,", "gap = top - both,"),
    ],
    ("csrc/cpu/span.h", SPANS): [
        ("clear_outside(out, n, own.from, own.to);", ""),
    ],
    ("csrc/cuda/attention.cuh", CUDA.format("table or owes or large or vanish")): [
        ("? 0 : p * (out[j] - mean + extra);", "? 0 : p * (out[j] - mean);"),
        ("context[r][x] *= softmax.factor[r];", ";"),
        ("if (decltype(finite)::value || p != 0)", "if (true)"),
        ("const C share = share_of(softmax.highest[r], softmax.mass[r]);",
         "const C share = 1 / softmax.mass[r];"),
    ],
    ("csrc/cuda/tile.cuh", CUDA.format("diverged")): [
        ("top == kLeast<C> ? C(NAN) :", ""),
        ("? least : least * (1 - kUlp<C>);", "? least : s;"),
    ],
    ("csrc/cuda/attention.cuh", CUDA.format("spans")): [
        ("last = tile.row + 31 - __clz(lanes);", "last = tile.row + 30 - __clz(lanes);"),
    ],
    ("csrc/cuda/coverage.cuh", CUDA.format("coverage or owes")): [
        ("loss += p <= c ? p : c;", "loss += p;"),
        ("s.past[j] = (1 - u) * r + u * grad_odds(j + 1);", "s.past[j] = (1 - u) * r;"),
        ("if (!smaller) s.grad_coverage[j] = c + grad_loss;", ""),
        ("s.grad_coverage[j] -= s.penalty * x;", ""),
    ],
    ("csrc/cuda/coverage.cuh", "tests/test_cuda_build.py -k 'sanitizers and thread'"): [
        ("if (s.K || odds) wait_for_blocks();", "if (s.K) wait_for_blocks();"),
    ],
    ("csrc/cuda/recurrent.cuh", CUDA.format("recurrent")): [
        ("sums[of_state(K, gate)] +=", "sums[gate] +="),
        ("a.t >= a.target_lengths[b]) u = Unit<C>{};", "false) u = Unit<C>{};"),
        ("u.gates[of_state(K, gate)];", "u.gates[gate];"),
        ("+ read<C>(asked, b, i);", ";"),
        ("place.i / columns >= target_lengths", "place.i / columns > target_lengths"),
    ],
    ("csrc/cuda/recurrent.h", CUDA.format("recurrent")): [
        ("asks_last || t + 1 < a.T) take(t + 1)", "t + 1 < a.T) take(t + 1)"),
        ("given.weight_hh, given.bias_hh, gates, masked(a))",
         "given.weight_hh, given.bias_hh, gates, 0)"),
        ("asks_first ? loop.at(asked, 0) : Rows2{}}", "Rows2{}}"),
        ("a.attends_first ? 0 : 1, a.T, 0, a.A), made.queries",
         "0, a.T, 0, a.A), made.queries"),
        ("      loop.clear(a, input);", "      ;"),
    ],
    ("csrc/cuda/copying.cuh", CUDA.format("copying")): [
        ("all += of_blocks<Add>(plus, turn);", ""),
        ("w < V && widen(logits[w]) != -INFINITY", "w < V"),
    ],
}  # fmt: skip
