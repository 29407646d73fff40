// The backward pass of attention without a mask but the causal one, in bf16; see cpu_attention.py.
//
// A head's keys and values stay in the cache while its queries pass, BLOCK at a time (Dao et al. 2022,
// "FlashAttention", algorithm 4). Products of blocks are PyTorch's own (oneDNN's brgemm: AMX, or AVX-512's bf16), summed
// in float32; their right side is given with pairs of rows interleaved ("VNNI"), as the instructions read it. Scores
// stand with a row for each key, so that they can be a left side as they are.

#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "numbers.h"

namespace {

using namespace artel;

constexpr int64_t BLOCK = 64;  // queries at a time

int64_t up_to_even(int64_t number) { return number + number % 2; }

// left (rows, inner) times right (inner, columns), interleaved, to (or, with `add`, onto) result (rows, columns).
// `left_stride` is that of left's rows, `right_width` how many columns right has; result is without gaps.
void multiply(int64_t rows, int64_t columns, int64_t inner, const BFloat16* left, int64_t left_stride,
              const BFloat16* right, int64_t right_width, float* result, bool add) {
  at::native::cpublas::brgemm(rows, columns, inner, left_stride, right_width, columns, add,
                              reinterpret_cast<const at::BFloat16*>(left),
                              reinterpret_cast<const at::BFloat16*>(right), result, true);
}

// Where heads of one row of the batch lie: the first number of head h at place t is at h * head + t * place.
struct Strides {
  int64_t row, head, place;
};

struct Shape {
  int64_t rows, heads, groups, length, size;  // `groups` heads of queries share one of keys and values
  bool causal;
  float scale;

  int64_t shared() const { return heads / groups; }
  int64_t even() const { return up_to_even(length); }
  // Keys that the queries of a block see.
  int64_t seen(int64_t start) const { return causal ? std::min(length, start + BLOCK) : length; }
};

// The transposed of places (count, size), interleaved: (size / 2, width, 2); places from `count` on are 0.
void turned(const BFloat16* from, int64_t stride, int64_t count, int64_t width, int64_t size, BFloat16* to) {
  constexpr int64_t TILE = 16;  // places that are read at a time, so that what is written lies together
  for (int64_t tile = 0; tile < count; tile += TILE)
    for (int64_t two = 0; two < size / 2; ++two)
      for (int64_t place = tile; place < std::min(tile + TILE, count); ++place)
        std::memcpy(to + 2 * (two * width + place), from + place * stride + 2 * two, 2 * sizeof(BFloat16));
  for (int64_t two = 0; two < size / 2; ++two)
    std::memset(to + 2 * (two * width + count), 0, 2 * (width - count) * sizeof(BFloat16));
}

// (pairs, width, 2) as (2 * pairs, width).
void parted(const BFloat16* from, int64_t pairs, int64_t width, BFloat16* to) {
  for (int64_t two = 0; two < pairs; ++two)
    for (int64_t place = 0; place < width; ++place) {
      to[2 * two * width + place] = from[2 * (two * width + place)];
      to[(2 * two + 1) * width + place] = from[2 * (two * width + place) + 1];
    }
}

// Places (count, size), interleaved: (height / 2, size, 2); places from `count` on are 0.
void interleaved(const BFloat16* from, int64_t stride, int64_t count, int64_t height, int64_t size, BFloat16* to) {
  for (int64_t place = 0; place < height; place += 2) {
    const BFloat16* const first = from + place * stride;
    const BFloat16* const second = first + stride;
    BFloat16* const both = to + place * size;
    if (place + 1 < count)
      for (int64_t column = 0; column < size; ++column) {
        both[2 * column] = first[column];
        both[2 * column + 1] = second[column];
      }
    else
      for (int64_t column = 0; column < size; ++column) {
        both[2 * column] = place < count ? first[column] : BFloat16{0};
        both[2 * column + 1] = BFloat16{0};
      }
  }
}

// What a thread needs for the backward pass of one head.
struct Scratch {
  std::vector<BFloat16> turned_keys, queries, turned_queries, slopes, turned_slopes, shares, of_scores, interleaved;
  std::vector<float> scores, of_shares, of_query, of_key, of_value;

  Scratch(int64_t even, int64_t size)
      : turned_keys(size * even), queries(BLOCK * size), turned_queries(BLOCK * size), slopes(BLOCK * size),
        turned_slopes(BLOCK * size), shares(even * BLOCK), of_scores(even * BLOCK),
        interleaved(even * std::max(BLOCK, size)),  // of the slopes of scores, and before them of the keys
        scores(even * BLOCK), of_shares(even * BLOCK), of_query(size * BLOCK), of_key(even * size),
        of_value(even * size) {}
};

// For `seen` keys and a block of queries, from scores and the slopes of shares (keys, BLOCK): the shares and the
// slopes of scores, in bf16; the latter interleaved as well. A query's key is seen from `first` on; negative: always.
void slopes_of_scores(int64_t seen, int64_t first, float scale, const float* log_sums, const float* own, Scratch& with) {
  for (int64_t key = 0; key < seen; ++key) {
    float* const scores = with.scores.data() + key * BLOCK;
    float* const of_shares = with.of_shares.data() + key * BLOCK;
    for (int64_t at = 0; at < BLOCK; ++at) {
      const float share = exponential(scores[at] * scale - log_sums[at]);
      scores[at] = at >= key - first ? share : 0.0f;
      of_shares[at] = (of_shares[at] - own[at]) * scores[at] * scale;
      narrow(scores[at], with.shares[key * BLOCK + at]);
      narrow(of_shares[at], with.of_scores[key * BLOCK + at]);
    }
  }
  for (int64_t at = 0; at < (up_to_even(seen) - seen) * BLOCK; ++at) with.of_scores[seen * BLOCK + at] = BFloat16{0};
  interleaved(with.of_scores.data(), BLOCK, up_to_even(seen), up_to_even(seen), BLOCK, with.interleaved.data());
}

void backward(const Shape& shape, const BFloat16* query, Strides of_query, const BFloat16* key, Strides of_key,
              const BFloat16* value, Strides of_value, const BFloat16* mixed, const float* log_sums,
              const BFloat16* slopes, Strides of_slopes, int threads, BFloat16* query_slopes, BFloat16* key_slopes,
              BFloat16* value_slopes) {
  const int64_t length = shape.length, even = shape.even(), size = shape.size, heads = shape.heads;
#pragma omp parallel num_threads(threads)
  {
    Scratch with(even, size);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < shape.rows * shape.shared(); ++task) {
      const int64_t row = task / shape.shared(), head_of_keys = task % shape.shared();
      const BFloat16* const keys = key + row * of_key.row + head_of_keys * of_key.head;
      const BFloat16* const values = value + row * of_value.row + head_of_keys * of_value.head;
      turned(keys, of_key.place, length, even, size, with.interleaved.data());
      parted(with.interleaved.data(), size / 2, even, with.turned_keys.data());
      std::fill(with.of_key.begin(), with.of_key.end(), 0.0f);
      std::fill(with.of_value.begin(), with.of_value.end(), 0.0f);
      for (int64_t head = head_of_keys * shape.groups; head < (head_of_keys + 1) * shape.groups; ++head) {
        for (int64_t start = 0; start < length; start += BLOCK) {
          const int64_t count = std::min(BLOCK, length - start), seen = shape.seen(start);
          const BFloat16* const queries = query + row * of_query.row + head * of_query.head + start * of_query.place;
          const BFloat16* const given = slopes + row * of_slopes.row + head * of_slopes.head + start * of_slopes.place;
          float block_sums[BLOCK], own[BLOCK];
          for (int64_t at = 0; at < BLOCK; ++at) {
            // Of queries behind the last the shares are e^-inf.
            block_sums[at] = std::numeric_limits<float>::infinity();
            own[at] = 0.0f;
            if (at >= count) continue;
            block_sums[at] = log_sums[(row * heads + head) * length + start + at];
            const BFloat16* const result = mixed + ((row * length + start + at) * heads + head) * size;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t column = 0; column < size; ++column)
              sum += widen(given[at * of_slopes.place + column]) * widen(result[column]);
            own[at] = sum;
          }
          turned(queries, of_query.place, count, BLOCK, size, with.turned_queries.data());
          turned(given, of_slopes.place, count, BLOCK, size, with.turned_slopes.data());
          interleaved(queries, of_query.place, count, BLOCK, size, with.queries.data());
          interleaved(given, of_slopes.place, count, BLOCK, size, with.slopes.data());

          multiply(seen, BLOCK, size, keys, of_key.place, with.turned_queries.data(), BLOCK,
                   with.scores.data(), false);
          multiply(seen, BLOCK, size, values, of_value.place, with.turned_slopes.data(), BLOCK,
                   with.of_shares.data(), false);
          slopes_of_scores(seen, shape.causal ? start : seen, shape.scale, block_sums, own, with);
          multiply(seen, size, BLOCK, with.shares.data(), BLOCK, with.slopes.data(), size,
                   with.of_value.data(), true);
          multiply(seen, size, BLOCK, with.of_scores.data(), BLOCK, with.queries.data(), size, with.of_key.data(),
                   true);
          multiply(size, BLOCK, up_to_even(seen), with.turned_keys.data(), even, with.interleaved.data(), BLOCK,
                   with.of_query.data(), false);
          for (int64_t at = 0; at < count; ++at) {
            BFloat16* const result = query_slopes + ((row * length + start + at) * heads + head) * size;
            for (int64_t column = 0; column < size; ++column) narrow(with.of_query[column * BLOCK + at], result[column]);
          }
        }
      }
      for (int64_t place = 0; place < length; ++place) {
        const int64_t result = ((row * length + place) * shape.shared() + head_of_keys) * size;
        for (int64_t column = 0; column < size; ++column) {
          narrow(with.of_key[place * size + column], key_slopes[result + column]);
          narrow(with.of_value[place * size + column], value_slopes[result + column]);
        }
      }
    }
    at::native::cpublas::brgemm_release();
  }
}

}  // namespace

// Whether PyTorch has such products for this processor: one is tried.
extern "C" int attention_works() {
  constexpr int64_t SIZE = 32;
  std::vector<BFloat16> left(SIZE * SIZE), right(SIZE * SIZE);
  std::vector<float> found(SIZE * SIZE);
  for (int64_t at = 0; at < SIZE * SIZE; ++at) {  // small whole numbers, whose sums are exact
    narrow(float(at % 7 - 3), left[at]);
    narrow(float(at % 5 - 2), right[at]);
  }
  try {
    multiply(SIZE, SIZE, SIZE, left.data(), SIZE, right.data(), SIZE, found.data(), false);
    at::native::cpublas::brgemm_release();
  } catch (...) {
    return 0;
  }
  for (int64_t row = 0; row < SIZE; ++row)
    for (int64_t column = 0; column < SIZE; ++column) {
      float sum = 0.0f;
      for (int64_t at = 0; at < SIZE; ++at)
        sum += widen(left[row * SIZE + at]) * widen(right[(at / 2) * 2 * SIZE + 2 * column + at % 2]);
      if (sum != found[row * SIZE + column]) return 0;
    }
  return 1;
}

// query, key, value and slopes of any strides (of a row of the batch, a head, a place), without gaps within a head;
// sizes: rows, heads of queries, of them to one of keys, length, numbers in a head; mixed and the three gradients
// (rows, length, heads, size) without gaps, log_sums (rows, heads, length).
extern "C" void attention_backward(const int64_t* sizes, int causal, float scale, const BFloat16* query,
                                   const int64_t* of_query, const BFloat16* key, const int64_t* of_key,
                                   const BFloat16* value, const int64_t* of_value, const BFloat16* mixed,
                                   const float* log_sums, const BFloat16* slopes, const int64_t* of_slopes, int threads,
                                   BFloat16* query_slopes, BFloat16* key_slopes, BFloat16* value_slopes) {
  backward({sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], causal != 0, scale}, query,
           {of_query[0], of_query[1], of_query[2]}, key, {of_key[0], of_key[1], of_key[2]}, value,
           {of_value[0], of_value[1], of_value[2]}, mixed, log_sums, slopes,
           {of_slopes[0], of_slopes[1], of_slopes[2]}, threads, query_slopes, key_slopes, value_slopes);
}
