// Cross-entropy of rows of logits and its gradient, softmax minus target, in the logits' place; see cpu_slopes.py.
//
// A row is read once and written once, and between lies in the cache in float32. And what the head's gradient is summed
// with, a product that lies transposed.

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

// Fills `scores` with a row; its highest goes to `best`, the first place of that is returned.
template <typename Number>
int64_t highest(const Number* row, int64_t columns, float* scores, float& best) {
  best = -std::numeric_limits<float>::infinity();
  int64_t place = 0;
  for (int64_t start = 0; start < columns; start += BLOCK) {
    float here = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : here)
    for (int64_t column = start; column < end_of(start, columns); ++column) {
      const float score = widen(row[column]);
      scores[column] = score;
      here = score > here ? score : here;
    }
    if (here > best) {
      best = here;
      place = start;
    }
  }
  while (place < columns - 1 && scores[place] != best) ++place;
  return place;
}

// Puts e^(score - best) in the place of each score and returns their sum.
double exponentials(float* scores, int64_t columns, float best) {
  double total = 0.0;
  for (int64_t start = 0; start < columns; start += BLOCK) {
    float here = 0.0f;
#pragma omp simd reduction(+ : here)
    for (int64_t column = start; column < end_of(start, columns); ++column) {
      const float value = exponential(scores[column] - best);
      scores[column] = value;
      here += value;
    }
    total += here;
  }
  return total;
}

// logits (count, columns), replaced by the gradient; targets (count,), below 0 where there is none; losses and
// guesses (count,). One thread for each part of the rows.
template <typename Number>
void slopes(Number* logits, const int64_t* targets, int64_t count, int64_t columns, int threads, float* losses,
            int64_t* guesses) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> held(columns);
    float* const scores = held.data();
#pragma omp for schedule(static)
    for (int64_t at = 0; at < count; ++at) {
      Number* const row = logits + at * columns;
      const int64_t target = targets[at];
      float best;
      guesses[at] = highest(row, columns, scores, best);
      losses[at] = 0.0f;
      if (target < 0) {
        std::memset(row, 0, columns * sizeof(Number));  // all bits 0 are the number 0
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

constexpr int64_t HIGH = 32, WIDE = 256;  // of a tile, which the first level of cache holds

// To total (columns, rows) is added what lies in product (rows, columns); total is only written to if `first`.
void add_turned(const BFloat16* product, int64_t rows, int64_t columns, bool first, int threads, float* total) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t left = 0; left < columns; left += WIDE) {
    const int64_t wide = left + WIDE < columns ? WIDE : columns - left;
    for (int64_t top = 0; top < rows; top += HIGH) {
      const int64_t high = top + HIGH < rows ? HIGH : rows - top;
      BFloat16 tile[HIGH][WIDE];
      for (int64_t row = 0; row < high; ++row)
        std::memcpy(tile[row], product + (top + row) * columns + left, wide * sizeof(BFloat16));
      for (int64_t column = 0; column < wide; ++column) {
        float* const to = total + (left + column) * rows + top;
        if (first) {
          for (int64_t row = 0; row < high; ++row) to[row] = widen(tile[row][column]);
        } else {
          for (int64_t row = 0; row < high; ++row) to[row] += widen(tile[row][column]);
        }
      }
    }
  }
}

}  // namespace

extern "C" void add_turned_bfloat16(const BFloat16* product, int64_t rows, int64_t columns, int first, int threads,
                                    float* total) {
  add_turned(product, rows, columns, first != 0, threads, total);
}

extern "C" void slopes_float32(float* logits, const int64_t* targets, int64_t count, int64_t columns, int threads,
                               float* losses, int64_t* guesses) {
  slopes(logits, targets, count, columns, threads, losses, guesses);
}

extern "C" void slopes_bfloat16(BFloat16* logits, const int64_t* targets, int64_t count, int64_t columns, int threads,
                                float* losses, int64_t* guesses) {
  slopes(logits, targets, count, columns, threads, losses, guesses);
}
