// What passes share: the item that they work on, and rows of scores that become weights.
#pragma once
#include "attention.h"
#include "product.h"

namespace attnfast {
namespace VARIANT {
namespace {

int64_t parts(int64_t n, int64_t size) { return n > size ? (n + size - 1) / size : 1; }

int64_t keys_seen(const Attention& a, int64_t b) {
  const int64_t n = a.lengths ? a.lengths[b] : a.Tk;
  return n < 0 ? 0 : min(n, a.Tk);
}

int64_t row_blocks(const Attention& a) { return (a.Tq + a.rows - 1) / a.rows; }

// Parts of a (sequence, head) in grad_inputs: slices of the features, and of the values' columns.
int64_t slices(const Attention& a) {
  return parts(a.A, a.columns) + (a.grad_value.data ? parts(a.Dv, a.columns) : 0);
}

// Item `index` of a pass.
struct Item {
  int64_t b, h, bh, row, rows, part, seen;
  Item(const Attention& a, int64_t index, int64_t row_blocks, int64_t parts) {
    part = index % parts;
    row = index / parts % row_blocks * a.rows;
    rows = min(a.rows, a.Tq - row);
    bh = index / parts / row_blocks;
    b = bh / a.H;
    h = bh % a.H;
    seen = keys_seen(a, b);
  }
};

template <class T>
T* at(const View& v, const Item& i, int64_t row) {
  return static_cast<T*>(v.data) + i.b * v.batch + i.h * v.head + row * v.row;
}

template <class C>
int64_t padded(int64_t width) {
  return round_up(width, 2 * Vector<C>::width);
}

// Where the scores of an item lie: the weights' place, or the end of a thread's scratch.
template <class C>
Rows<C> scores_of(const Attention& a, const Item& item, C* scratch) {
  if (a.scores.data) return {at<C>(a.scores, item, item.row), a.W};
  return {scratch, a.W};
}

// Room for them there.
int64_t scores_scratch(const Attention& a) {
  return a.scores.data ? 0 : round_up(a.rows * a.W, 16);
}

// Columns of scores that hold any: those of the keys in the sequence, or of a span, -inf included.
int64_t columns_seen(const Attention& a, const Item& item) {
  return a.span.data ? a.W : item.seen;
}

// Turn a row of scores into weights in place; return log sum exp. An empty row becomes zeros.
// `zeros` marks the lanes where a weight is 0.
template <class C>
C softmax(C* s, int64_t n, Flags<C>& zeros) {
  constexpr int W = Vector<C>::width;
  const C infinity = __builtin_inf();
  Vec<C> highest = splat(-infinity), total = {};
  for (int64_t j = 0; j < n; j += W) {
    const Vec<C> x = load_part(s + j, n - j, -infinity);
    highest = x > highest ? x : highest;
  }
  C top = -infinity;
  for (int i = 0; i < W; ++i) top = highest[i] > top ? highest[i] : top;
  const C shift = top == -infinity ? 0 : top;
  for (int64_t j = 0; j < n; j += W) {
    const Vec<C> x = load_part(s + j, n - j, -infinity) - shift;
    Vec<C> e = exp(x);
    e = x < (C)-87 ? Vec<C>{} : e;
    e = x == x ? e : x;  // NaN stays, and makes the whole row NaN
    total += e;
    store_part(s + j, e, n - j);
  }
  const C mass = sum<C>(total);
  if (mass == 0) {
    zeros = ~zeros | zeros;
    return -infinity;
  }
  for (int64_t j = 0; j < n; j += W) {
    const Vec<C> e = load_part(s + j, n - j, (C)1);
    const Vec<C> p = e == 0 ? e : e / mass;  // 0 also where mass is NaN
    zeros |= p == 0;
    store_part(s + j, p, n - j);
  }
  if constexpr (sizeof(C) == 4) return top + ::logf(mass);
  return top + ::log(mass);
}

template <class C>
void tell_of_zeros(const Attention& a, const Item& item, Flags<C> zeros) {
  if (a.hides && (item.seen < a.Tk || any<C>(zeros)))
    __atomic_store_n(a.hides, true, __ATOMIC_RELAXED);
}

// Turn n products into scores: scale, bias, mask.
template <class T, class C>
void finish_scores(const Attention& a, const Item& item, int64_t i, int64_t n, C* s) {
  const C scale = a.scale, hidden = -__builtin_inf();
  if (scale != 1)
    for (int64_t j = 0; j < n; ++j) s[j] = s[j] == hidden ? hidden : s[j] * scale;
  if (a.bias.data) {
    const T* bias = at<T>(a.bias, item, i);
    for (int64_t j = 0; j < n; ++j) {
      const C x = widen(bias[j * a.bias.column]);
      s[j] = x == hidden || s[j] == hidden ? hidden : s[j] + x;  // also where either is NaN
    }
  }
  if (a.mask.data) {
    const uint8_t* mask = at<uint8_t>(a.mask, item, i);
    for (int64_t j = 0; j < n; ++j) s[j] = mask[j * a.mask.column] ? s[j] : hidden;
  }
}

#define ATTNFAST_BY_DTYPE(function)                                \
  [](const Attention& a, int64_t item, void* scratch) {            \
    switch (a.dtype) {                                             \
      case Dtype::f32: return function<float>(a, item, scratch);   \
      case Dtype::f64: return function<double>(a, item, scratch);  \
      case Dtype::f16: return function<Half>(a, item, scratch);    \
      case Dtype::bf16: return function<BFloat>(a, item, scratch); \
    }                                                              \
  }

}  // namespace
}  // namespace VARIANT
}  // namespace attnfast
