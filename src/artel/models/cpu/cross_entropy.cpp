// Cross-entropy of rows of logits and its gradient, softmax minus target, in place; see cross_entropy.py.
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

// Copies a row to `scores` and its maximum to `best`. Returns the first column of the maximum.
template <typename Number>
int64_t row_max(const Number* row, int64_t columns, float* scores, float& best) {
  best = -std::numeric_limits<float>::infinity();
  int64_t argmax = 0;
  for (int64_t start = 0; start < columns; start += BLOCK) {
    float block_max = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : block_max)
    for (int64_t column = start; column < end_of(start, columns); ++column) {
      const float score = widen(row[column]);
      scores[column] = score;
      block_max = score > block_max ? score : block_max;
    }
    if (block_max > best) {
      best = block_max;
      argmax = start;
    }
  }
  while (argmax < columns - 1 && scores[argmax] != best) ++argmax;
  return argmax;
}

// Replaces each score by e^(score - best) and returns their sum.
double exponentials(float* scores, int64_t columns, float best) {
  double total = 0.0;
  for (int64_t start = 0; start < columns; start += BLOCK) {
    float block_sum = 0.0f;
#pragma omp simd reduction(+ : block_sum)
    for (int64_t column = start; column < end_of(start, columns); ++column) {
      const float value = exponential(scores[column] - best);
      scores[column] = value;
      block_sum += value;
    }
    total += block_sum;
  }
  return total;
}

// logits (count, columns), overwritten by the gradient; targets (count,), negative for none; losses and
// guesses (count,). Each thread takes a range of rows.
template <typename Number>
void cross_entropy(Number* logits, const int64_t* targets, int64_t count, int64_t columns, int threads,
                   float* losses, int64_t* guesses) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> buffer(columns);
    float* const scores = buffer.data();
#pragma omp for schedule(static)
    for (int64_t at = 0; at < count; ++at) {
      Number* const row = logits + at * columns;
      const int64_t target = targets[at];
      float best;
      guesses[at] = row_max(row, columns, scores, best);
      losses[at] = 0.0f;
      if (target < 0) {
        std::memset(row, 0, columns * sizeof(Number));  // a number whose bits are all 0 is 0
        continue;
      }
      const float score = scores[target];
      const double total = exponentials(scores, columns, best);
      losses[at] = float(std::log(total)) + (best - score);
      const float factor = float(1.0 / total);
#pragma omp simd
      for (int64_t column = 0; column < columns; ++column) narrow(scores[column] * factor, row[column]);
      narrow(scores[target] * factor - 1.0f, row[target]);
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

extern "C" void cross_entropy_float32(float* logits, const int64_t* targets, int64_t count, int64_t columns,
                                      int threads, float* losses, int64_t* guesses) {
  cross_entropy(logits, targets, count, columns, threads, losses, guesses);
}

extern "C" void cross_entropy_bfloat16(BFloat16* logits, const int64_t* targets, int64_t count, int64_t columns,
                                       int threads, float* losses, int64_t* guesses) {
  cross_entropy(logits, targets, count, columns, threads, losses, guesses);
}
