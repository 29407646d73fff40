// Cross-entropy of rows of logits and its gradient, factor x (softmax minus target), in place; see cross_entropy.py.
//
// A row is read once and written once; in between it stays in the cache in float32. Also adds a transposed product to
// the gradient of the output head.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "numbers.h"

namespace {

using namespace artel;

constexpr int64_t BLOCK = 256;  // columns whose exponentials are summed in float32; blocks are summed in float64

int64_t end_of(int64_t start, int64_t columns) { return start + BLOCK < columns ? start + BLOCK : columns; }

// Replaces each score by cap * tanh(score / cap), and writes the derivative to `slopes`.
void bound(float* scores, float* slopes, int64_t count, float cap) {
#pragma omp simd
  for (int64_t at = 0; at < count; ++at) {
    const float x = scores[at] / cap;
    const float decay = exponential(-2.0f * std::fabs(x));
    const float tanh = std::copysign((1.0f - decay) / (1.0f + decay), x);
    scores[at] = cap * tanh;
    slopes[at] = 1.0f - tanh * tanh;
  }
}

// Copies a row to `scores`, bounded by `cap` if it is not 0. Writes the maximum to `best`, at least the lowest finite
// number. Returns the first column of the maximum.
template <typename Number>
int64_t load(const Number* row, int64_t columns, float cap, float* scores, float* slopes, float& best) {
  best = std::numeric_limits<float>::lowest();
  int64_t argmax = 0;
  for (int64_t start = 0; start < columns; start += BLOCK) {
    const int64_t end = end_of(start, columns);
    float block_max = best;
    if (cap > 0) {
#pragma omp simd
      for (int64_t column = start; column < end; ++column) scores[column] = widen(row[column]);
      bound(scores + start, slopes + start, end - start, cap);
#pragma omp simd reduction(max : block_max)
      for (int64_t column = start; column < end; ++column)
        block_max = scores[column] > block_max ? scores[column] : block_max;
    } else {
#pragma omp simd reduction(max : block_max)
      for (int64_t column = start; column < end; ++column) {
        const float score = widen(row[column]);
        scores[column] = score;
        block_max = score > block_max ? score : block_max;
      }
    }
    if (block_max > best) {
      best = block_max;
      argmax = start;
    }
  }
  while (argmax < columns - 1 && scores[argmax] != best) ++argmax;
  return argmax;
}

struct Sums {
  double exponentials = 0.0, weighted = 0.0;
};

// Replaces each score by e = exp(score - best). Returns the sums of e and of e * (score - best).
Sums exponentials(float* scores, int64_t columns, float best) {
  Sums sums;
  for (int64_t start = 0; start < columns; start += BLOCK) {
    float block_sum = 0.0f, block_weighted = 0.0f;
#pragma omp simd reduction(+ : block_sum, block_weighted)
    for (int64_t column = start; column < end_of(start, columns); ++column) {
      const float distance = scores[column] - best;
      const float value = exponential(distance);
      scores[column] = value;
      block_sum += value;
      block_weighted += value * (distance < -1e4f ? -1e4f : distance);  // a score of -inf must give 0, not NaN
    }
    sums.exponentials += block_sum;
    sums.weighted += block_weighted;
  }
  return sums;
}

// logits (count, stride): the first `columns` belong to the ids from `first_id` on. Computes the statistics (4, count) and
// guesses (count,) `with_statistics`; otherwise the first two statistics are inputs. Replaces the logits by the gradient
// `with_grad`. targets (count,), negative for none; factors (count,) or null. Each thread takes a range of rows.
template <typename Number>
void cross_entropy(Number* logits, const int64_t* targets, const float* factors, float* statistics, int64_t* guesses,
                   int64_t count, int64_t stride, int64_t columns, int64_t first_id, float cap, bool with_statistics,
                   bool with_grad, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> buffer(columns), slopes(cap > 0 ? columns : 0);
    float* const scores = buffer.data();
#pragma omp for schedule(static)
    for (int64_t at = 0; at < count; ++at) {
      Number* const row = logits + at * stride;
      const int64_t target = targets[at] - first_id;
      const bool is_local = target >= 0 && target < columns;
      const float factor = factors ? factors[at] : 1.0f;
      if (!with_statistics && (targets[at] < 0 || factor == 0.0f)) {
        std::memset(row, 0, columns * sizeof(Number));  // a number whose bits are all 0 is 0
        continue;
      }
      float best;
      const int64_t argmax = load(row, columns, cap, scores, slopes.data(), best);
      double total = statistics[count + at];
      if (with_statistics) {
        guesses[at] = argmax;
      } else {
        best = statistics[at];
      }
      const float score = is_local ? scores[target] : 0.0f;
      const Sums sums = exponentials(scores, columns, best);
      if (with_statistics) {
        total = sums.exponentials;
        statistics[at] = best;
        statistics[count + at] = float(total);
        statistics[2 * count + at] = score;
        statistics[3 * count + at] = float(sums.weighted);
      }
      if (!with_grad) continue;
      if (targets[at] < 0) {
        std::memset(row, 0, columns * sizeof(Number));
        continue;
      }
      const float scale = float(factor / total);
      float at_target = is_local ? scores[target] * scale - factor : 0.0f;
      if (cap > 0) {
        if (is_local) at_target *= slopes[target];
#pragma omp simd
        for (int64_t column = 0; column < columns; ++column) narrow(scores[column] * scale * slopes[column], row[column]);
      } else {
#pragma omp simd
        for (int64_t column = 0; column < columns; ++column) narrow(scores[column] * scale, row[column]);
      }
      if (is_local) narrow(at_target, row[target]);
    }
  }
}

constexpr int64_t HEIGHT = 32, WIDTH = 256;  // of a tile, which fits into the first level of cache

// Adds product (rows, columns) to total (columns, rows), or writes it there with `overwrite`.
void add_transposed(const BFloat16* product, int64_t rows, int64_t columns, bool overwrite, int threads, float* total) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t left = 0; left < columns; left += WIDTH) {
    const int64_t width = left + WIDTH < columns ? WIDTH : columns - left;
    for (int64_t top = 0; top < rows; top += HEIGHT) {
      const int64_t height = top + HEIGHT < rows ? HEIGHT : rows - top;
      BFloat16 tile[HEIGHT][WIDTH];
      for (int64_t row = 0; row < height; ++row)
        std::memcpy(tile[row], product + (top + row) * columns + left, width * sizeof(BFloat16));
      for (int64_t column = 0; column < width; ++column) {
        float* const to = total + (left + column) * rows + top;
        if (overwrite) {
          for (int64_t row = 0; row < height; ++row) to[row] = widen(tile[row][column]);
        } else {
          for (int64_t row = 0; row < height; ++row) to[row] += widen(tile[row][column]);
        }
      }
    }
  }
}

}  // namespace

extern "C" void add_transposed_bfloat16(const BFloat16* product, int64_t rows, int64_t columns, int overwrite,
                                        int threads, float* total) {
  add_transposed(product, rows, columns, overwrite != 0, threads, total);
}

extern "C" void cross_entropy_float32(float* logits, const int64_t* targets, const float* factors, float* statistics,
                                      int64_t* guesses, int64_t count, int64_t stride, int64_t columns,
                                      int64_t first_id, float cap, int with_statistics, int with_grad, int threads) {
  cross_entropy(logits, targets, factors, statistics, guesses, count, stride, columns, first_id, cap,
                with_statistics != 0, with_grad != 0, threads);
}

extern "C" void cross_entropy_bfloat16(BFloat16* logits, const int64_t* targets, const float* factors, float* statistics,
                                      int64_t* guesses, int64_t count, int64_t stride, int64_t columns,
                                      int64_t first_id, float cap, int with_statistics, int with_grad, int threads) {
  cross_entropy(logits, targets, factors, statistics, guesses, count, stride, columns, first_id, cap,
                with_statistics != 0, with_grad != 0, threads);
}
