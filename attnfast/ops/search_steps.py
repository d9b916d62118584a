"""Searches in steps of fixed shapes, which a GPU repeats as one CUDA graph.

A step is a function from tensors to tensors of the same shapes that never synchronizes: finished
sentences are computed too, and their results are ignored. On a GPU the second step is captured, and
every later one replays it. After every eighth step the search synchronizes, to test whether all
sentences are finished.

PyTorch computes products and cells. Without a history, the best backend computes attention, with
the K hypotheses of a sentence as K queries of its keys; with a history PyTorch does, on a copy of
the keys for each hypothesis.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from attnfast._utils.checks import raise_value_error
from attnfast.ops import dispatch
from attnfast.ops.attention import AttentionInputs
from attnfast.ops.backends import select_backend
from attnfast.ops.reference import recurrent, widen_weights
from attnfast.ops.reference_search import next_words
from attnfast.ops.search import LEAST_COVERAGE, SearchInputs, SearchOutputs, layer_of

#: The number of steps after which a search tests whether all sentences are finished.
STEPS_PER_SYNC = 8

#: The arguments of which each hypothesis needs a row.
REPEATED = ("hidden", "cell", "feed", "coverage", "previous", "source", "prefix")
#: The arguments of attention; one with a history has each row for one hypothesis.
OF_ATTENTION = ("key", "value", "mask", "lengths", "inverse_fertility", "transition_prob")


def search(call: SearchInputs) -> SearchOutputs:
    """Continue the hypotheses of each sentence, by the best words or those drawn, at every step."""
    if call.int8:
        raise_value_error("int8", "False: products in 8 bits are for CPUs", "True")
    steps = (_Beam if call.numbers is None else _Draws)(call)
    if call.most and len(call.limits):
        steps.run()
    return steps.outputs()


def draw_words(logits: Tensor, numbers: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Return the word ``[R]`` of each row of ``logits [R, V]`` at its number in [0, 1).

    It is the first word at which the sum of the probabilities so far exceeds the number, from the
    most probable word on if there is a ``top_k`` or ``top_p``.
    """
    probs = logits.double().softmax(-1)
    words = None
    if top_k or top_p < 1:
        probs, words = probs.sort(dim=-1, descending=True, stable=True)
        if top_k:
            probs[:, top_k:] = 0
        before = probs.cumsum(-1) - probs
        probs = probs.masked_fill(before >= top_p * probs.sum(-1, keepdim=True), 0)
    sums = probs.cumsum(-1)
    index = (sums <= numbers.unsqueeze(-1) * sums[:, -1:]).sum(-1, keepdim=True)
    index = index.clamp_max(logits.shape[-1] - 1)
    return (index if words is None else words.gather(-1, index)).squeeze(-1)


def repeated_ngrams(words: Tensor, n: int, V: int, length: int | Tensor) -> Tensor:
    """Return where a word would end an n-gram of the first ``length`` of ``words [R, T]``, [R, V].

    ``length`` is an integer, or a tensor of one.
    """
    (R, T), device = words.shape, words.device
    repeated = words.new_zeros(R, V, dtype=torch.int32)
    if n > T:
        return repeated > 0
    ngrams = words.unfold(1, n, 1)  # [R, T − n + 1, n]
    places = (torch.arange(n - 1, device=device) + length - n + 1).clamp_min(0)
    same = (ngrams[..., :-1] == words[:, places].unsqueeze(1)).all(-1)
    same &= torch.arange(T - n + 1, device=device) + n <= length
    return repeated.scatter_add_(1, ngrams[..., -1], same.int()) > 0


def _rows(index: Tensor, columns: int) -> Tensor:
    """Return an index ``[B, N]`` of rows as ``[B, N, columns]``."""
    return index.unsqueeze(-1).expand(-1, -1, columns)


def _at(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return new rows ``[B, ..]`` where a mask ``[B]`` is True, old ones elsewhere."""
    return torch.where(mask.view(-1, *[1] * (new.dim() - 1)), new, old)


class _Steps:
    """The state of a search of B sentences with K hypotheses each, as tensors by name."""

    def __init__(self, call: SearchInputs):
        call = widen_weights(call)
        like, B, K, T = call.hidden, len(call.limits), call.beam, call.most
        self.B, self.K, self.T, self.device = B, K, T, like.device
        names = REPEATED if call.coverage is None else (*REPEATED, *OF_ATTENTION)
        given = {name: x for name in names if (x := getattr(call, name)) is not None}
        if call.word_mask is not None:
            given["word_mask"] = call.word_mask.expand(B, -1)
        repeated = {name: self.of_rows(name, x) for name, x in given.items()}
        self.call = call = call._replace(**repeated)  # type: ignore[arg-type]
        self.Tk = call.key.shape[1]  # type: ignore[union-attr]
        self.slots, self.places = self.arange(K), self.arange(T)
        self.first_rows = self.arange(B).unsqueeze(1) * K
        self.vocabulary = self.arange(len(call.weight_vocab) + call.num_oov)  # of the words
        state: dict[str, Tensor | None] = {
            "t": self.long(1), "word": self.long(B * K) + call.begin, "words": self.long(B, K, T),
            "word_scores": like.new_zeros(B, K, T), "totals": like.new_zeros(B, K),
            "ended": call.limits <= 0, "is_nan": torch.zeros_like(call.limits, dtype=torch.bool),
            **{name: getattr(call, name) for name in ("hidden", "cell", "coverage", "previous")},
        }  # fmt: skip
        if not call.attends_first and call.weight_ih.shape[1] > call.embedding.shape[1]:
            size = call.weight_ih.shape[1] - call.embedding.shape[1]
            state["feed"] = like.new_zeros(B * K, size) if call.feed is None else call.feed
        self.state = {name: x.clone() for name, x in state.items() if x is not None}
        # For every step: the slots that its new hypotheses continue, and the attention weights.
        self.parents = self.long(T, B, K)
        self.weights = like.new_zeros((T, B, K, self.Tk) if call.need_weights else 0)

    def long(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.long, device=self.device)

    def arange(self, n: int) -> Tensor:
        return torch.arange(n, device=self.device)

    def of_rows(self, name: str, x: Tensor) -> Tensor:
        """Return a tensor with the row of each sentence K times."""
        axis = x.dim() - 2 if name in ("hidden", "cell") else 0
        if name == "mask":
            x = x.expand(self.B, -1, -1)
        shape = [*x.shape[:axis], self.B, self.K, *x.shape[axis + 1 :]]
        return x.unsqueeze(axis + 1).expand(shape).flatten(axis, axis + 1)

    def run(self) -> None:
        """Take steps until all sentences have ended."""
        graph = None
        captures = self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        for t in range(self.T):
            if t and t % STEPS_PER_SYNC == 0 and bool(self.state["ended"].all()):
                return
            if captures and t == 1:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self.step()
            if graph is None:
                self.step()
            else:
                graph.replay()

    def step(self) -> None:
        """Take a step; write the next state to the memory of the one before."""
        for name, x in self.next_state().items():
            self.state[name].copy_(x)

    def next_state(self) -> dict[str, Tensor]:
        """Return the state after the next step."""
        raise NotImplementedError

    def attend(self, call: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Return contexts ``[R, 1, Dv]`` and weights ``[R, 1, Tk]`` of queries ``[R, 1, A]``."""
        bounds = call.key_bounds
        several = call._replace(
            query=call.query.view(self.B, self.K, call.query.shape[-1]), need_weights=True,
            key_bounds=None if bounds is None else bounds.expand(-1, self.K, -1).contiguous(),
        )  # fmt: skip
        backend = select_backend(None, self.device, call.query.dtype, score=call.score)
        context, weights, *_ = dispatch.run_attention(several, backend)
        assert weights is not None
        rows = self.B * self.K
        return context.reshape(rows, 1, context.shape[-1]), weights.reshape(rows, 1, self.Tk)

    def score(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return log-probabilities ``[B, K, V]``, those of words that may come, and the next state.

        The state is the layer's, and the weights ``[B, K, Tk]``.
        """
        call, state, t, B, K = self.call, self.state, self.state["t"], self.B, self.K
        word = state["word"].masked_fill(state["word"] >= len(call.embedding), call.unknown)
        x = call.embedding[word] * call.embedding_scale
        steps = ("key_bounds", "transition_prob")
        now = {n: y.index_select(1, t) for n in steps if (y := getattr(call, n)) is not None}
        names = ("hidden", "cell", "feed", "coverage", "previous")
        step = call._replace(**now, **{n: state[n] for n in names if n in state})  # type: ignore[arg-type]
        own = None if call.coverage is not None else self.attend
        made = recurrent(layer_of(step, x.unsqueeze(1)), attend=own)
        log_probs, after = next_words(step, made, x)
        found = {name: y for name, y in after.items() if y is not None}
        left = log_probs.masked_fill(self.forbidden(), -math.inf)
        found["weights"] = made.weights.view(B, K, self.Tk)
        return log_probs.view(B, K, -1), left.view(B, K, -1), found

    def forbidden(self) -> Tensor:
        """Return where a rule forbids a word, ``[R, V]``."""
        call, t, words = self.call, self.state["t"], self.vocabulary
        is_end = words == call.end
        last = self.of_rows("limits", call.limits <= t + 1).unsqueeze(-1)
        hidden = (last & ~is_end) | ((t < call.min_length) & is_end)
        if call.no_repeat_ngram:
            so_far = self.state["words"].flatten(0, 1)
            hidden = hidden | repeated_ngrams(so_far, call.no_repeat_ngram, len(words), t)
        if call.prefix is not None and call.prefix.shape[1]:
            most = call.prefix.shape[1]
            given = call.prefix.index_select(1, t.clamp_max(most - 1)).masked_fill(t >= most, -1)
            hidden = torch.where(given >= 0, words != given, hidden)
        return hidden

    def continued(self, name: str, slots: Tensor, values: Tensor) -> Tensor:
        """Return rows of ``state[name] [B, K, T]`` of some slots, with values at this step."""
        rows = self.state[name].gather(1, _rows(slots, self.T))
        return torch.where(self.places == self.state["t"], values.unsqueeze(-1), rows)

    def moved(self, after: dict[str, Tensor], parents: Tensor) -> dict[str, Tensor]:
        """Return the layer's state in the slots that continue ``parents [B, K]``; keep both."""
        t = self.state["t"]
        self.parents.index_copy_(0, t, parents.unsqueeze(0))
        weights = after.pop("weights")
        if self.call.need_weights:
            self.weights.index_copy_(0, t, weights.unsqueeze(0))
        rows = (self.first_rows + parents).flatten()
        axes = {"hidden": -2, "cell": -2}
        return {name: x.index_select(axes.get(name, 0), rows) for name, x in after.items()}

    def trace_weights(self, lengths: Tensor, slots: Tensor) -> Tensor:
        """Return the weights ``[B, N, T, Tk]``; ``slots`` are those at the steps of last words."""
        if not self.call.need_weights:
            return self.weights
        found = self.weights.new_zeros(*lengths.shape, self.T, self.Tk)
        for t in range(self.T - 1, -1, -1):
            here = t < lengths
            place = _rows(slots, self.Tk)
            rows = self.weights[t].gather(1, place)  # NaN after the end of a sentence's words
            found[:, :, t] = rows.masked_fill(~here.unsqueeze(-1), 0)
            if t:
                slots = torch.where(here, self.parents[t - 1].gather(1, slots), slots)
        return found

    def outputs(self) -> SearchOutputs:
        """Return the hypotheses that were found."""
        raise NotImplementedError

    def as_outputs(
        self, words: Tensor, word_scores: Tensor, lengths: Tensor, scores: Tensor, slots: Tensor
    ) -> SearchOutputs:
        """Return N hypotheses, without those of sentences with NaN."""
        is_nan = self.state["is_nan"].unsqueeze(-1)
        lengths = lengths.masked_fill(is_nan, 0)
        exists = self.places < lengths.unsqueeze(-1)
        return SearchOutputs(
            words.masked_fill(~exists, 0), word_scores.masked_fill(~exists, 0),
            lengths.masked_fill(is_nan, -1), scores.masked_fill(is_nan, -math.inf),
            self.trace_weights(lengths, slots),
        )  # fmt: skip


class _Beam(_Steps):
    """The best hypotheses."""

    def __init__(self, call: SearchInputs):
        super().__init__(call)
        B, K, state = self.B, self.K, self.state
        state["totals"][:, 1:] = -math.inf  # only the first hypothesis may continue at first
        for name in ("words", "word_scores"):
            state[f"finished {name}"] = state[name].clone()
        state["finished scores"] = torch.full_like(state["totals"], -math.inf)
        state["finished lengths"], state["finished slots"] = self.long(B, K), self.long(B, K)
        state["count"] = self.long(B)  # of all that have finished
        if call.coverage_penalty:
            state["covered"] = state["totals"].new_zeros(B, K, self.Tk)

    def next_state(self) -> dict[str, Tensor]:
        call, state, K, t = self.call, self.state, self.K, self.state["t"]
        log_probs, left, after = self.score()
        V, alive = left.shape[-1], state["totals"] > -math.inf
        live = ~state["ended"]
        is_nan = live & (log_probs.isnan().any(-1) & alive).any(-1)
        total = state["totals"].unsqueeze(-1) + left
        if call.length_bonus:
            total = total + call.length_bonus * (self.vocabulary != call.end)
        best, index = total.flatten(1).topk(min(2 * K, K * V))
        slots, words = index // V, index % V
        scores = left.flatten(1).gather(1, index)
        if best.shape[1] < 2 * K:
            more = (0, 2 * K - best.shape[1])
            best = F.pad(best, more, value=-math.inf)
            slots, words, scores = (F.pad(x, more) for x in (slots, words, scores))
        ends = words == call.end
        normaliser = ((6 + t.to(best.dtype)) / 6) ** call.length_penalty
        if call.coverage_penalty:
            after["covered"] = state["covered"] + after["weights"]
        kept, count = self.finish(best, slots, words, scores, ends, normaliser, after)

        # The K best of the others go on.
        goes_on = ~ends & (best > -math.inf)
        first = (~goes_on).int().sort(dim=-1, stable=True).indices[:, :K]
        totals = best.masked_fill(~goes_on, -math.inf).gather(1, first)
        parents, words, scores = (x.gather(1, first) for x in (slots, words, scores))
        enough = (count >= K) & (kept["scores"][:, 0] >= totals[:, 0] / normaliser)
        ends_now = live & (is_nan | (totals[:, 0] == -math.inf) | enough)
        # Where no hypothesis could end, the result is the best so far.
        unfinished = ends_now & (count == 0)
        before = self.parents.index_select(0, (t - 1).clamp_min(0))[0, :, :1]
        so_far = {
            "words": state["words"], "word_scores": state["word_scores"],
            "lengths": t, "slots": before,
        }  # fmt: skip
        for name, x in so_far.items():
            kept[name] = _at(unfinished, x.expand_as(kept[name]), kept[name])
        count = count + unfinished

        covered = after.pop("covered", None)
        new = self.moved(after, parents)
        if covered is not None:
            new["covered"] = covered.gather(1, _rows(parents, self.Tk))
        for name, x in (*kept.items(), ("count", count)):
            name = name if name == "count" else f"finished {name}"
            new[name] = _at(live, x, state[name])
        return new | {
            "t": t + 1, "totals": totals,
            "ended": ~live | ends_now, "is_nan": state["is_nan"] | is_nan,
            "word": torch.where(totals > -math.inf, words, call.begin).flatten(),
            "words": self.continued("words", parents, words),
            "word_scores": self.continued("word_scores", parents, scores),
        }  # fmt: skip

    def finish(
        self, best: Tensor, slots: Tensor, words: Tensor, scores: Tensor, ends: Tensor,
        normaliser: Tensor, after: dict[str, Tensor],
    ) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
        """Return the K best that have finished or finish now, and the number of all."""
        call, state, K = self.call, self.state, self.K
        finishes = ends & (best > -math.inf) & (self.arange(2 * K) < K)
        final = best / normaliser
        if call.coverage_penalty:
            penalty = call.coverage_penalty * self.uncovered(after["covered"])
            final = final + penalty.gather(1, slots)
        final = final.masked_fill(~finishes, -math.inf)
        every = torch.cat([state["finished scores"], final], 1)
        order = every.sort(dim=-1, descending=True, stable=True).indices[:, :K]
        new = {
            "words": self.continued("words", slots, words),
            "word_scores": self.continued("word_scores", slots, scores),
            "lengths": (state["t"] + 1).expand_as(slots), "slots": slots,
        }  # fmt: skip
        kept = {"scores": every.gather(1, order)}
        for name, x in new.items():
            both = torch.cat([state[f"finished {name}"], x], 1)
            kept[name] = both.gather(1, order if x.dim() == 2 else _rows(order, self.T))
        return kept, state["count"] + finishes.sum(-1)

    def uncovered(self, covered: Tensor) -> Tensor:
        """Return Σ_j log min(covered, 1) over the keys that exist, ``[B, K]``."""
        call, logs = self.call, covered.clamp(LEAST_COVERAGE, 1).log()
        lengths, mask = call.lengths, call.mask
        if lengths is not None:
            exists = self.arange(self.Tk) < lengths.view(-1, 1, 1)  # [B or R, 1, Tk]
            logs = logs.masked_fill(~self.of_slots(exists), 0)
        if mask is not None:
            logs = logs.masked_fill(~self.of_slots(mask), 0)
        return logs.sum(-1)

    def of_slots(self, x: Tensor) -> Tensor:
        """Return ``[B, 1 or K, Tk]`` of a tensor with a row for each sentence or hypothesis."""
        shared = len(x) < self.B  # one mask for all
        return x if shared else x.reshape(self.B, len(x) // self.B, self.Tk)

    def outputs(self) -> SearchOutputs:
        N, state = self.call.n_best, self.state
        lengths = state["finished lengths"].masked_fill(
            self.slots >= state["count"].unsqueeze(-1), 0
        )
        names = ("words", "word_scores", "scores", "slots")
        words, word_scores, scores, slots = (state[f"finished {x}"][:, :N] for x in names)
        return self.as_outputs(words, word_scores, lengths[:, :N], scores, slots)


class _Draws(_Steps):
    """Hypotheses that continue independently of each other, with drawn words."""

    def __init__(self, call: SearchInputs):
        super().__init__(call)
        self.state["done"] = torch.zeros(self.B, self.K, dtype=torch.bool, device=self.device)
        self.state["lengths"] = self.long(self.B, self.K)

    def next_state(self) -> dict[str, Tensor]:
        call, state, t = self.call, self.state, self.state["t"]
        log_probs, left, after = self.score()
        is_nan = ~state["ended"] & log_probs.isnan().flatten(1).any(-1)
        live = ~(state["ended"] | is_nan).unsqueeze(-1) & ~state["done"]
        number = call.numbers.index_select(2, t).flatten()  # type: ignore[union-attr]
        odds = left.flatten(0, 1).double() / call.temperature
        words = draw_words(odds, number, call.top_k, call.top_p).view(self.B, self.K)
        scores = left.gather(-1, words.unsqueeze(-1)).squeeze(-1)
        stuck = live & (left == -math.inf).all(-1)  # no word may come
        says = live & ~stuck
        done = state["done"] | stuck | (says & (words == call.end))
        totals = state["totals"].masked_fill(stuck, -math.inf)
        own = self.slots.expand(self.B, -1)
        put = {
            name: torch.where(says.unsqueeze(-1), self.continued(name, own, x), state[name])
            for name, x in (("words", words), ("word_scores", scores))
        }
        return self.moved(after, own) | put | {
            "t": t + 1, "totals": torch.where(says, totals + scores, totals), "done": done,
            "lengths": state["lengths"] + says, "is_nan": state["is_nan"] | is_nan,
            "word": torch.where(done, call.begin, words).flatten(),
            "ended": state["ended"] | is_nan | done.all(-1),
        }  # fmt: skip

    def outputs(self) -> SearchOutputs:
        state = self.state
        scores = state["totals"].masked_fill((self.call.limits <= 0).unsqueeze(-1), -math.inf)
        slots = self.slots.expand(self.B, -1)
        return self.as_outputs(
            state["words"], state["word_scores"], state["lengths"], scores, slots
        )
