// coverage_attention on the CPU, for one instruction set (see vector.h); the launcher is
// coverage.cpp, the formula is in attnfast/ops/coverage.py.
//
// One item is a (sequence, head), whose rows run in order. Without features in the tanh,
// attention's pass has computed the scores of all rows before. With features, a row's scores are
// computed here, see coverage_features.h.
#include "coverage_features.h"

namespace attnfast {
namespace VARIANT {
namespace {

// Load the weights of the row before the first.
template <class C>
void load_previous(const Problem& a, const History& h, const Item& item, C* out) {
  const C* x = row_of<C>(h.previous, item);
  if (!h.transition_prob.data) return copy(x, a.Tk, out);
  for (int64_t j = 0; j < a.Tk; j += Vector<C>::width)
    store_part(out + j, weight_of<C>(load_part(x + j, a.Tk - j, (C)0)), a.Tk - j);
}

template <class C>
void load_state(const Problem& a, const History& h, const Item& item, Buffers<C>& p) {
  p.state.clear(a.Tk, p.taps);
  if (h.previous.data) load_previous(a, h, item, p.state.channel[0]);
  if (h.coverage_in.data) copy(row_of<C>(h.coverage_in, item), a.Tk, p.state.channel[1]);
}

// Load the log-weights of a row, with -inf before the first key.
template <class C>
void load_logarithms(const C* x, int64_t Tk, C* out) {
  out[-1] = -__builtin_inf();
  copy(x, Tk, out);
}

// Replace the scores of a row by the logarithms of their sigmoids; return the sum of the sigmoids.
template <class C>
C log_sigmoids(int64_t n, C* s) {
  Vec<C> total = {};
  for (int64_t j = 0; j < n; j += Vector<C>::width) {
    const Vec<C> x = load_part(s + j, n - j, -(C)__builtin_inf());
    const Vec<C> least = x > 0 ? Vec<C>{} : x, y = least - log_of_one_more(weight_of<C>(x > 0 ? -x : x));
    total += weight_of<C>(y);
    store_part(s + j, y, n - j);
  }
  return sum<C>(total);
}

template <class T, class C = typename Accumulate<T>::type>
void forward(const CoverageForward& a, const Plan&, int64_t index, void* buffer) {
  const Item item(a, index);
  Scratch<C> scratch{static_cast<C*>(buffer)};
  Buffers<C> p(a, a, scratch, false);
  C* past = take_logarithms(scratch, a.transition_prob.data ? a.Tk : 0);
  C *last = p.state.channel[0], *coverage = p.state.channel[1];
  load_state(a, a, item, p);
  if (a.transition_prob.data) load_logarithms(row_of<C>(a.previous, item), a.Tk, past);
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
    if (a.sigmoid) *row_of<C>(a.sigmoid_sum, item, t) = log_sigmoids(n, row);
    if (a.transition_prob.data) {
      const C u = row_of<C>(a.transition_prob, item)[t];
      transition_softmax(u, n, a.Tk, past, row_of<C>(a.log_weights, item, t), row);
    } else {
      Flags<C> zeros = {};
      softmax_of_row(row, n, zeros);
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

// Compute the coverage before every row, as the forward does.
template <class C>
void cover_rows(const CoverageBackward& a, const Item& item, const C* inverse_fertility,
                BackwardBuffers<C>& p) {
  if (a.Tq) copy(p.state.channel[1], a.Tk, p.coverages);
  for (int64_t t = 1; t < a.Tq; ++t) {
    C* now = p.coverages + t * a.Tk;
    cover(now - a.Tk, row_of<C>(a.weights, item, t - 1), inverse_fertility, a.Tk, now);
  }
}

// Runs the rows of a (sequence, head) from the last to the first. grad_score holds grad_context .
// value and becomes the scores' gradient. Channel 0 of `grad` is the gradient of the row's weights
// through the next row's history; channel 1 is that of the coverage after the row, then before it.
template <class T, class C = typename Accumulate<T>::type>
class Rewind {
  static constexpr int V = Vector<C>::width;
  const CoverageBackward& a;
  const Item item;
  Scratch<C> scratch;
  BackwardBuffers<C> p;
  const int64_t n;
  const C *const inverse_fertility, penalty, grad_loss;
  C *const grad_coverage, *const grad_inverse_fertility;
  double grad_penalty = 0;

  C* row(const View& v, int64_t t = 0) const { return v.data ? row_of<C>(v, item, t) : nullptr; }
  C number(const View& v) const { return v.data ? *row(v) : 0; }

  // Turn g into the gradient of row t's weights; return its mean, weighted by the weights.
  C weights_backward(int64_t t, const C* weights, const C* coverage, C* g) {
    if (a.grad_weights.data) add_up(g, row(a.grad_weights, t), n);
    const int64_t n = this->n;  // local copies, which stores cannot change
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

  // Add the gradient of row t's log-weights to the one from the next row; return the sum.
  C logarithms_backward(int64_t t) {
    const C *given = row(a.grad_log_weights, t), *logarithms = row(a.log_weights, t);
    C sum = 0;
    for (int64_t j = 0; j < n; ++j) {
      if (given && logarithms[j] != -(C)__builtin_inf()) p.grad_past[j] += given[j];
      sum += p.grad_past[j];
    }
    return sum;
  }

  // Turn g into the gradient of row t's scores; `mean` is g's mean by the weights, `total` the sum
  // of the log-weights' gradients. The two are kept separate, so that a row of one key has no
  // gradient.
  void softmax_backward(int64_t t, const C* weights, const C* coverage, C mean, C total, C* g) {
    const C sigmoids = a.sigmoid ? *row(a.sigmoid_sum, t) : 0;  // a weight's sigmoid over the weight
    const int64_t n = this->n;
    const C penalty = this->penalty, *past = a.transition_prob.data ? p.grad_past : nullptr;
    C* grad_coverage = this->grad_coverage;
    Vec<C> penalties = {};
    for (int64_t j = 0; j < n; j += V) {
      const auto part = [&](const C* x) { return load_part(x + j, n - j, (C)0); };
      const Vec<C> w = part(weights);
      Vec<C> x = w == 0 ? w : w * (part(g) - mean);
      if (past) x += part(past) - w * total;
      x *= (C)1 - w * sigmoids;
      store_part(g + j, x, n - j);
      penalties += x * part(coverage);
      store_part(grad_coverage + j, part(grad_coverage) - penalty * x, n - j);
    }
    grad_penalty -= sum<C>(penalties);
    for (int64_t j = n; j < a.Tk; ++j) g[j] = 0;
  }

  void row_backward(int64_t t) {
    const C *weights = row(a.weights, t), *coverage = p.coverages + t * a.Tk;
    C* g = row(a.grad_score, t);
    const bool transition = a.transition_prob.data;
    const C mean = weights_backward(t, weights, coverage, g);
    const C total = transition ? logarithms_backward(t) : 0;
    p.grad_before.clear(a.Tk, p.taps);
    C* grad_previous = p.grad_before.channel[0];
    softmax_backward(t, weights, coverage, mean, total, g);
    if (transition) {
      load_logarithms(t ? row(a.log_weights, t - 1) : row(a.previous), a.Tk, p.past);
      const C u = row(a.transition_prob)[t];
      row(a.grad_transition_prob)[t] = transition_backward(u, n, a.Tk, p.past, g, p.shifted, p.grad_past);
    }
    if (p.K) {
      p.state.clear(a.Tk, p.taps);
      if (t) copy(row(a.weights, t - 1), a.Tk, p.state.channel[0]);
      else if (a.previous.data) load_previous(a, a, item, p.state.channel[0]);
      copy(coverage, a.Tk, p.state.channel[1]);
      grad_features<T>(a, item, t, g, p);
    }
    // Discard the filters' gradients past the ends, and at keys that no row sees.
    for (int64_t j = 0; j < a.Tk; ++j) p.grad.channel[0][j] = grad_previous[j];
  }

 public:
  Rewind(const CoverageBackward& a, int64_t index, void* buffer)
      : a(a), item(a, index), scratch{static_cast<C*>(buffer)}, p(a, scratch), n(item.seen),
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
    p.grad.clear(a.Tk, p.taps);
    if (a.grad_coverage_out.data) copy(row(a.grad_coverage_out), a.Tk, grad_coverage);
    if (a.transition_prob.data) fill(p.grad_past, a.Tk, (C)0);
    C* const grad_last = a.transition_prob.data ? p.grad_past : p.grad.channel[0];
    if (a.grad_last.data) copy(row(a.grad_last), a.Tk, grad_last);
    for (int64_t j = 0; grad_inverse_fertility && !a.sums && j < a.Tk; ++j) grad_inverse_fertility[j] = 0;
    for (int64_t t = a.Tq - 1; t >= 0; --t) row_backward(t);
    if (p.K) put_grad_keys<T>(a, item, p);
    if (p.K && !a.parameter_sums.data) put_grad_parameters(a, item, p);
    if (a.grad_penalty.data) *row(a.grad_penalty) = grad_penalty + (a.sums ? *row(a.grad_penalty) : 0);
    if (a.grad_coverage_in.data) copy(grad_coverage, a.Tk, row(a.grad_coverage_in));
    if (a.grad_previous.data) put_grad_previous();
  }

  // Store the gradient of `previous`. With a transition, the filters' gradient of the weights also
  // goes to their logarithms.
  void put_grad_previous() {
    C* const out = row(a.grad_previous);
    if (!a.transition_prob.data) return copy(p.grad.channel[0], a.Tk, out);
    load_previous(a, a, item, p.past);
    for (int64_t j = 0; j < a.Tk; ++j) {
      const C x = p.past[j];
      out[j] = p.grad_past[j] + (x == 0 ? 0 : x * p.grad.channel[0][j]);
    }
  }
};

template <class T>
void backward(const CoverageBackward& a, const Plan&, int64_t index, void* buffer) {
  Rewind<T>(a, index, buffer).run();
}

// ---- for steps that share their parameters ------------------------------------------------------

template <class T, class C = typename Accumulate<T>::type>
void pack_parameters(const Problem& a, const History& h, bool back) {
  Scratch<C> nowhere{nullptr};
  Buffers<C> p(a, h, nowhere, back);
  prepare_features<T>(a, h, Item(a, 0), back, p);
}
template <class C>
size_t bytes_of_features(const Problem& a, const History& h, bool back) {
  Scratch<C> nowhere{nullptr}, room{nullptr};
  Buffers<C>(a, h, nowhere, back).take_parameters(room, back);
  return (size_t)room.next;
}
template <class C>
size_t bytes_of_sums(const CoverageBackward& a) {
  Scratch<C> nowhere{nullptr}, room{nullptr};
  BackwardBuffers<C>(a, nowhere).take_sums(room);
  return (size_t)room.next;
}
template <class T, class C = typename Accumulate<T>::type>
void finish(const CoverageBackward& a, const Plan&, int64_t index, void*) {
  Scratch<C> nowhere{nullptr}, sums{row_of<C>(a.parameter_sums, Item(a, index))};
  BackwardBuffers<C> p(a, nowhere);
  p.take_sums(sums);
  put_grad_parameters(a, Item(a, index), p);
}

// ---- the table --------------------------------------------------------------------------------

template <class C>
size_t forward_bytes(const CoverageForward& a) {
  Scratch<C> scratch{nullptr};
  Buffers<C> p(a, a, scratch, false);
  take_logarithms(scratch, a.transition_prob.data ? a.Tk : 0);
  return (size_t)scratch.next;
}
template <class C>
size_t backward_bytes(const CoverageBackward& a) {
  Scratch<C> scratch{nullptr};
  BackwardBuffers<C> p(a, scratch);
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
                ATTNFAST_BY_DTYPE(forward)},
    .backward_scratch = backward_scratch,
    .backward = {[](const CoverageBackward& a, const Plan&) { return a.B * a.H; },
                 ATTNFAST_BY_DTYPE(backward)},
    .features_size =
        [](const Problem& a, const History& h, bool back) {
          const bool wide = a.dtype == Dtype::f64;
          return wide ? bytes_of_features<double>(a, h, back) : bytes_of_features<float>(a, h, back);
        },
    .sums_size =
        [](const CoverageBackward& a) {
          return a.dtype == Dtype::f64 ? bytes_of_sums<double>(a) : bytes_of_sums<float>(a);
        },
    .pack_parameters =
        [](const Problem& a, const History& h, bool back) {
          a.dtype == Dtype::f64 ? pack_parameters<double>(a, h, back) : pack_parameters<float>(a, h, back);
        },
    .finish = {[](const CoverageBackward& a, const Plan&) { return a.filters_count ? a.B * a.H : 0; },
               ATTNFAST_BY_DTYPE(finish)},
};

}  // namespace VARIANT
}  // namespace attnfast
