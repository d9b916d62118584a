// coverage_attention on the CPU, for one instruction set (see vector.h); the launcher is
// coverage.cpp, the formula is in attnfast/ops/coverage.py.
//
// One item is a (sequence, head), whose rows follow one another. Without features in the tanh the
// scores are there when it begins, taken for all rows at once by attention's own pass. With
// features a row's scores are taken here, see coverage_features.h.
#include "coverage_features.h"

namespace attnfast {
namespace VARIANT {
namespace {

// Forward attention's softmax: weights proportional to r_j exp(e_j); odds are exp(e_j) over the sum.
template <class C>
void softmax_with_odds(C* e, C* odds, int64_t n, const C* r) {
  C top = -__builtin_inf();
  for (int64_t j = 0; j < n; ++j) top = r[j] != 0 && e[j] > top ? e[j] : top;
  if (top == -__builtin_inf()) top = 0;
  constexpr int V = Vector<C>::width;
  Vec<C> total = {};
  for (int64_t j = 0; j < n; j += V) {
    Vec<C> x = load_part(e + j, n - j, (C)-__builtin_inf()) - top;
    const Vec<C> limited = x > (C)kMostExponent ? splat((C)kMostExponent) : x;
    Vec<C> y = exp(limited);
    y = x < (C)-87 ? Vec<C>{} : y;
    y = x == x ? y : x;
    const Vec<C> mass = y * load_part(r + j, n - j, (C)0);
    total += mass;
    store_part(odds + j, y, n - j);
    store_part(e + j, mass, n - j);
  }
  const C mass = sum<C>(total), inverse = mass == 0 ? 0 : 1 / mass;
  for (int64_t j = 0; j < n; ++j) {
    e[j] *= inverse;
    odds[j] = odds[j] * inverse > (C)kMostOdds ? (C)kMostOdds : odds[j] * inverse;
  }
}

template <class C>
void load_state(const Problem& a, const History& h, const Item& item, Place<C>& p) {
  p.state.clear(a.Tk, p.W);
  const View* views[] = {&h.previous, &h.coverage_in};
  for (int i = 0; i < 2; ++i)
    if (views[i]->data) copy(row_of<C>(*views[i], item), a.Tk, p.state.channel[i]);
}

// The scores e of row t become weights proportional to r exp(e), r being what the last weights and the
// transition leave; `odds` and `factor` are scratch.
template <class C>
void weights_of_transition(const CoverageForward& a, const Item& item, int64_t t, const C* last, C* e,
                           C* odds, C* factor) {
  const int64_t n = item.seen;
  const C u = row_of<C>(a.transition_prob, item)[t];
  C* kept = row_of<C>(a.odds, item, t);
  for (int64_t j = 0; j < n; ++j) {
    const C r = transition_odds(u, last[j], j ? last[j - 1] : C{});
    factor[j] = e[j] == -(C)__builtin_inf() ? 0 : r;
  }
  softmax_with_odds(e, odds, n, factor);
  for (int64_t j = 0; j < a.Tk; ++j) kept[j] = j < n ? odds[j] : 0;
}

template <class T, class C = typename Accumulate<T>::type>
void forward(const CoverageForward& a, const Plan&, int64_t index, void* memory) {
  const Item item(a, index);
  Scratch<C> scratch{static_cast<C*>(memory)};
  Place<C> p(a, a, scratch, false);
  C *odds = scratch.take(a.Tk), *factor = scratch.take(a.Tk);
  C *last = p.state.channel[0], *coverage = p.state.channel[1];
  load_state(a, a, item, p);
  if (p.K && !a.features) prepare_features<T>(a, a, item, false, p);
  const C* inverse_fertility = a.inverse_fertility.data ? row_of<C>(a.inverse_fertility, item) : nullptr;
  const C penalty = a.penalty.data ? *row_of<C>(a.penalty, item) : 0;
  constexpr int V = Vector<C>::width;
  const int64_t n = item.seen;
  double loss = 0;
  for (int64_t t = 0; t < a.Tq; ++t) {
    C* row = row_of<C>(a.weights, item, t);
    if (p.K) scores_with_features<T>(a, item, t, p, row);
    multiply_by((C)a.scale, n, row);
    finish_scores<T>(a, item, t, 0, n, row);
    for (int64_t j = 0; penalty != 0 && j < n; ++j) row[j] -= penalty * coverage[j];
    if (a.transition_prob.data) {
      weights_of_transition(a, item, t, last, row, odds, factor);
    } else {
      Flags<C> zeros = {};
      softmax(row, n, zeros);
    }
    Vec<C> lost = {};
    for (int64_t j = 0; j < n; j += V) {
      const auto part = [&](const C* x) { return load_part(x + j, n - j, (C)0); };
      const Vec<C> x = part(row), c = part(coverage);
      lost += x <= c ? x : c;
      store_part(coverage + j, c + (inverse_fertility ? part(inverse_fertility) * x : x), n - j);
      store_part(last + j, x, n - j);
    }
    loss += sum<C>(lost);
    for (int64_t j = n; j < a.Tk; ++j) row[j] = last[j] = 0;
  }
  copy(coverage, a.Tk, row_of<C>(a.coverage_out, item));
  *row_of<C>(a.loss, item) = loss;
}

// ---- backward ---------------------------------------------------------------------------------

// The coverage before every row, as the forward has added it up.
template <class C>
void cover_rows(const CoverageBackward& a, const Item& item, const C* inverse_fertility,
                BackwardPlace<C>& p) {
  if (a.Tq) copy(p.state.channel[1], a.Tk, p.coverages);
  for (int64_t t = 1; t < a.Tq; ++t) {
    C* now = p.coverages + t * a.Tk;
    cover(now - a.Tk, row_of<C>(a.weights, item, t - 1), inverse_fertility, a.Tk, now);
  }
}

// The rows of a (sequence, head) from the last to the first. grad_score holds grad_context . value and
// becomes the scores' gradient; channel 0 of `grad` is the gradient of the row's weights as the next row's
// past, channel 1 that of the coverage after it, then before it.
template <class T, class C = typename Accumulate<T>::type>
class Rewind {
  static constexpr int V = Vector<C>::width;
  const CoverageBackward& a;
  const Item item;
  Scratch<C> scratch;
  BackwardPlace<C> p;
  const int64_t n;
  const C *const inverse_fertility, penalty, grad_loss;
  C *const grad_coverage, *const grad_inverse_fertility;
  double grad_penalty = 0;

  C* row(const View& v, int64_t t = 0) const { return v.data ? row_of<C>(v, item, t) : nullptr; }
  C number(const View& v) const { return v.data ? *row(v) : 0; }

  // g becomes the gradient of row t's weights; returns their mean, by the weights.
  C weights_backward(int64_t t, const C* weights, const C* coverage, C* g) {
    if (a.grad_weights.data) add_up(g, row(a.grad_weights, t), n);
    const int64_t n = this->n;  // locals, which stores cannot change
    const C *rate = inverse_fertility, *past = p.grad.channel[0], loss = grad_loss;
    C *grad_rate = grad_inverse_fertility, *grad_coverage = this->grad_coverage;
    Vec<C> products = {};
    for (int64_t j = 0; j < n; j += V) {
      const auto part = [&](const C* x) { return load_part(x + j, n - j, (C)0); };
      const Vec<C> w = part(weights), c = part(grad_coverage), less = splat(loss);
      const auto smaller = w <= part(coverage);
      Vec<C> x = part(g) + part(past) + (rate ? part(rate) * c : c);
      x += smaller ? less : Vec<C>{};
      products += w == 0 ? w : w * x;
      store_part(g + j, x, n - j);
      if (grad_rate) store_part(grad_rate + j, part(grad_rate) + c * w, n - j);
      store_part(grad_coverage + j, c + (smaller ? Vec<C>{} : less), n - j);
    }
    return sum<C>(products);
  }

  // What row t's odds give to the transition and to the weights of the row before.
  void odds_backward(int64_t t, const C* previous, const C* g, C mean, C* grad_previous) {
    const int64_t n = this->n;
    const C u = row(a.transition_prob)[t], *odds = row(a.odds, t);
    double grad_u = 0;
    for (int64_t j = 0; j < n; ++j) {
      const C grad_r = odds[j] == 0 ? 0 : odds[j] * (g[j] - mean);
      grad_previous[j] += (1 - u) * grad_r;
      if (j) grad_previous[j - 1] += u * grad_r;
      if (previous) grad_u += grad_r * ((j ? previous[j - 1] : 0) - previous[j]);
    }
    row(a.grad_transition_prob)[t] = grad_u;
  }

  // g becomes the gradient of row t's scores.
  void softmax_backward(const C* weights, const C* coverage, C mean, C* g) {
    const int64_t n = this->n;
    const C penalty = this->penalty;
    C* grad_coverage = this->grad_coverage;
    Vec<C> penalties = {};
    for (int64_t j = 0; j < n; j += V) {
      const auto part = [&](const C* x) { return load_part(x + j, n - j, (C)0); };
      const Vec<C> w = part(weights), x = w == 0 ? w : w * (part(g) - mean);
      store_part(g + j, x, n - j);
      penalties += x * part(coverage);
      store_part(grad_coverage + j, part(grad_coverage) - penalty * x, n - j);
    }
    grad_penalty -= sum<C>(penalties);
    for (int64_t j = n; j < a.Tk; ++j) g[j] = 0;
  }

  void row_backward(int64_t t) {
    const C *weights = row(a.weights, t), *coverage = p.coverages + t * a.Tk;
    const C* previous = t ? row(a.weights, t - 1) : row(a.previous);
    C* g = row(a.grad_score, t);
    const C mean = weights_backward(t, weights, coverage, g);
    p.grad_before.clear(a.Tk, p.W);
    C* grad_previous = p.grad_before.channel[0];
    if (a.transition_prob.data) odds_backward(t, previous, g, mean, grad_previous);
    softmax_backward(weights, coverage, mean, g);
    if (p.K) {
      p.state.clear(a.Tk, p.W);
      if (previous) copy(previous, a.Tk, p.state.channel[0]);
      copy(coverage, a.Tk, p.state.channel[1]);
      grad_features<T>(a, item, t, g, p);
    }
    // What the filters left past the ends, and at keys that no row sees, belongs to nothing.
    for (int64_t j = 0; j < a.Tk; ++j) p.grad.channel[0][j] = grad_previous[j];
  }

 public:
  Rewind(const CoverageBackward& a, int64_t index, void* memory)
      : a(a), item(a, index), scratch{static_cast<C*>(memory)}, p(a, scratch), n(item.seen),
        inverse_fertility(row(a.inverse_fertility)), penalty(number(a.penalty)),
        grad_loss(number(a.grad_loss)), grad_coverage(p.grad.channel[1]),
        grad_inverse_fertility(row(a.grad_inverse_fertility)) {}

  void run() {
    load_state(a, a, item, p);
    cover_rows(a, item, inverse_fertility, p);
    if (p.K) {
      if (!a.features) prepare_features<T>(a, a, item, true, p);
      begin_grad_features(a, item, p);
    }
    p.grad.clear(a.Tk, p.W);
    if (a.grad_coverage_out.data) copy(row(a.grad_coverage_out), a.Tk, grad_coverage);
    if (a.grad_last.data) copy(row(a.grad_last), a.Tk, p.grad.channel[0]);
    for (int64_t j = 0; grad_inverse_fertility && !a.sums && j < a.Tk; ++j) grad_inverse_fertility[j] = 0;
    for (int64_t t = a.Tq - 1; t >= 0; --t) row_backward(t);
    if (p.K) put_grad_keys<T>(a, item, p);
    if (p.K && !a.kept.data) put_grad_parameters(a, item, p);
    if (a.grad_penalty.data) *row(a.grad_penalty) = grad_penalty + (a.sums ? *row(a.grad_penalty) : 0);
    if (a.grad_coverage_in.data) copy(grad_coverage, a.Tk, row(a.grad_coverage_in));
    if (a.grad_previous.data) copy(p.grad.channel[0], a.Tk, row(a.grad_previous));
  }
};

template <class T>
void backward(const CoverageBackward& a, const Plan&, int64_t index, void* memory) {
  Rewind<T>(a, index, memory).run();
}

// ---- for steps that share their parameters ------------------------------------------------------

template <class T, class C = typename Accumulate<T>::type>
void prepare(const Problem& a, const History& h, bool back) {
  Scratch<C> nowhere{nullptr};
  Place<C> p(a, h, nowhere, back);
  prepare_features<T>(a, h, Item(a, 0), back, p);
}
template <class C>
size_t bytes_of_features(const Problem& a, const History& h, bool back) {
  Scratch<C> nowhere{nullptr}, room{nullptr};
  Place<C>(a, h, nowhere, back).take_parameters(room, back);
  return (size_t)room.next;
}
template <class C>
size_t bytes_kept(const CoverageBackward& a) {
  Scratch<C> nowhere{nullptr}, room{nullptr};
  BackwardPlace<C>(a, nowhere).take_sums(room);
  return (size_t)room.next;
}
template <class T, class C = typename Accumulate<T>::type>
void finish(const CoverageBackward& a, const Plan&, int64_t index, void*) {
  Scratch<C> nowhere{nullptr}, kept{row_of<C>(a.kept, Item(a, index))};
  BackwardPlace<C> p(a, nowhere);
  p.take_sums(kept);
  put_grad_parameters(a, Item(a, index), p);
}

// ---- the table --------------------------------------------------------------------------------

template <class C>
size_t forward_bytes(const CoverageForward& a) {
  Scratch<C> scratch{nullptr};
  Place<C> p(a, a, scratch, false);
  scratch.take(a.Tk);
  scratch.take(a.Tk);
  return (size_t)scratch.next;
}
template <class C>
size_t backward_bytes(const CoverageBackward& a) {
  Scratch<C> scratch{nullptr};
  BackwardPlace<C> p(a, scratch);
  return (size_t)scratch.next;
}

size_t forward_scratch(const CoverageForward& a) {
  return a.dtype == Dtype::f64 ? forward_bytes<double>(a) : forward_bytes<float>(a);
}
size_t backward_scratch(const CoverageBackward& a) {
  return a.dtype == Dtype::f64 ? backward_bytes<double>(a) : backward_bytes<float>(a);
}

}  // namespace

extern const CoverageKernels coverage = {
    .forward_scratch = forward_scratch,
    .forward = {[](const CoverageForward& a, const Plan&) { return a.B * a.H; },
                ATTNFAST_BY_DTYPE(CoverageForward, forward)},
    .backward_scratch = backward_scratch,
    .backward = {[](const CoverageBackward& a, const Plan&) { return a.B * a.H; },
                 ATTNFAST_BY_DTYPE(CoverageBackward, backward)},
    .features =
        [](const Problem& a, const History& h, bool back) {
          const bool wide = a.dtype == Dtype::f64;
          return wide ? bytes_of_features<double>(a, h, back) : bytes_of_features<float>(a, h, back);
        },
    .kept =
        [](const CoverageBackward& a) {
          return a.dtype == Dtype::f64 ? bytes_kept<double>(a) : bytes_kept<float>(a);
        },
    .prepare =
        [](const Problem& a, const History& h, bool back) {
          a.dtype == Dtype::f64 ? prepare<double>(a, h, back) : prepare<float>(a, h, back);
        },
    .finish = {[](const CoverageBackward& a, const Plan&) { return a.filters_count ? a.B * a.H : 0; },
               ATTNFAST_BY_DTYPE(CoverageBackward, finish)},
};

}  // namespace VARIANT
}  // namespace attnfast
