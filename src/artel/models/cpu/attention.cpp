// Attention in bf16, causal or not, of documents that share rows: the backward pass, and for dropout or padding also
// the forward pass; see attention.py, documents.py and attention_dropout.py.
//
// The keys and values of a head stay in the cache while its queries stream by, BLOCK at a time (Dao et al. 2022,
// "FlashAttention", algorithm 4). PyTorch multiplies blocks (oneDNN's brgemm: AMX, or AVX-512's bf16) and sums in
// float32. The right matrix has pairs of rows interleaved ("VNNI"), as the instructions need it. Scores have a row per
// key, so that they can be a left matrix without a transpose.

#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "numbers.h"

namespace {

using namespace artel;

constexpr int64_t BLOCK = 64;  // queries at a time

int64_t up_to_even(int64_t number) { return number + number % 2; }

// result (rows, columns), contiguous, = (with `add`: +=) left (rows, inner) times right (inner, columns), interleaved.
// `left_stride`: stride of left's rows. `right_width`: number of right's columns.
void multiply(int64_t rows, int64_t columns, int64_t inner, const BFloat16* left, int64_t left_stride,
              const BFloat16* right, int64_t right_width, float* result, bool add) {
  at::native::cpublas::brgemm(rows, columns, inner, left_stride, right_width, columns, add,
                              reinterpret_cast<const at::BFloat16*>(left),
                              reinterpret_cast<const at::BFloat16*>(right), result, true);
}

// Strides of a tensor of heads: head h at position t of row r starts at r * row + h * head + t * place.
struct Strides {
  int64_t row, head, place;

  const BFloat16* at(const BFloat16* tensor, int64_t r, int64_t h, int64_t t) const {
    return tensor + r * row + h * head + t * place;
  }
};

struct Shape {
  int64_t heads, groups, length, size;  // `groups` heads of queries share one of keys and values; `length` of a row
  bool causal, every_query;             // `every_query` of a row sees its document, also those outside
  float scale;

  int64_t shared() const { return heads / groups; }
};

// Dropout of weights. A hash of the weight's position decides, so the backward pass can repeat it and nothing is
// stored. The hash is the last step of MurmurHash3 (Appleby 2011).
struct Dropout {
  uint32_t threshold;  // of 2^32: the share that is dropped
  float factor;        // by which the others grow
  uint64_t seed;

  bool is_on() const { return threshold != 0; }

  // The start of one head's counter: the last step of SplitMix64 (Steele et al. 2014).
  uint32_t begin(int64_t document, int64_t head, int64_t heads) const {
    uint64_t mixed = seed + 0x9e3779b97f4a7c15ull * uint64_t(document * heads + head + 1);
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
    return uint32_t(mixed >> 32);
  }

  // The factor of the weight of query `at` and key `key`.
  float of(uint32_t begin, uint32_t at, uint32_t key) const {
    uint32_t hash = begin + at * 0x9e3779b1u + key * 0x85ebca77u;
    hash = (hash ^ (hash >> 16)) * 0x85ebca6bu;
    hash = (hash ^ (hash >> 13)) * 0xc2b2ae35u;
    return (hash ^ (hash >> 16)) < threshold ? 0.0f : factor;
  }
};

// Tokens of a row that see each other: `length` of them, from position `start` of the row.
struct Document {
  int64_t row, start, length;

  // The queries that see the document.
  int64_t first_query(const Shape& shape) const { return shape.every_query ? 0 : start; }
  int64_t queries(const Shape& shape) const { return shape.every_query ? shape.length : length; }

  // The number of keys that the queries of a block see.
  int64_t seen(int64_t block, bool causal) const { return causal ? std::min(length, block + BLOCK) : length; }
};

int64_t longest(const std::vector<Document>& documents) {
  int64_t length = 0;
  for (const Document& document : documents) length = std::max(length, document.length);
  return length;
}

// (count, size) transposed and interleaved: (size / 2, width, 2); positions from `count` on are 0.
void transpose(const BFloat16* from, int64_t stride, int64_t count, int64_t width, int64_t size, BFloat16* to) {
  constexpr int64_t TILE = 16;  // positions read at a time, so that writes are contiguous
  for (int64_t tile = 0; tile < count; tile += TILE)
    for (int64_t two = 0; two < size / 2; ++two)
      for (int64_t place = tile; place < std::min(tile + TILE, count); ++place)
        std::memcpy(to + 2 * (two * width + place), from + place * stride + 2 * two, 2 * sizeof(BFloat16));
  for (int64_t two = 0; two < size / 2; ++two)
    std::memset(to + 2 * (two * width + count), 0, 2 * (width - count) * sizeof(BFloat16));
}

// (pairs, width, 2) to (2 * pairs, width).
void deinterleave(const BFloat16* from, int64_t pairs, int64_t width, BFloat16* to) {
  for (int64_t two = 0; two < pairs; ++two)
    for (int64_t place = 0; place < width; ++place) {
      to[2 * two * width + place] = from[2 * (two * width + place)];
      to[(2 * two + 1) * width + place] = from[2 * (two * width + place) + 1];
    }
}

// (count, size) interleaved: (height / 2, size, 2); positions from `count` on are 0.
void interleave(const BFloat16* from, int64_t stride, int64_t count, int64_t height, int64_t size, BFloat16* to) {
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

// One thread's buffers for the backward pass of one head.
struct Scratch {
  std::vector<BFloat16> transposed_keys, queries, transposed_queries, grads, transposed_grads, weights, grad_scores,
      interleaved;
  std::vector<float> scores, grad_weights, grad_query, grad_key, grad_value;

  Scratch(int64_t even, int64_t size)
      : transposed_keys(size * even), queries(BLOCK * size), transposed_queries(BLOCK * size), grads(BLOCK * size),
        transposed_grads(BLOCK * size), weights(even * BLOCK), grad_scores(even * BLOCK),
        interleaved(even * std::max(BLOCK, size)),  // of the keys, later of the gradient of the scores
        scores(even * BLOCK), grad_weights(even * BLOCK), grad_query(size * BLOCK), grad_key(even * size),
        grad_value(even * size) {}
};

// For `seen` keys and a block of queries: computes the weights and the gradient of the scores in bf16, the latter also
// interleaved, from scores and the gradient of the weights, float32 (keys, BLOCK). Query `at` of the block sees key
// `key` if at >= key - first. `dot`: grad_output times output for each query. `begin` and `start`, the position of the
// block's first query, determine dropout.
template <bool DROPS>
void scores_backward(int64_t seen, int64_t first, float scale, const float* log_sums, const float* dot, Dropout dropout,
                     uint32_t begin, int64_t start, Scratch& with) {
  for (int64_t key = 0; key < seen; ++key) {
    float* const scores = with.scores.data() + key * BLOCK;
    float* const grad_weights = with.grad_weights.data() + key * BLOCK;
    for (int64_t at = 0; at < BLOCK; ++at) {
      const float weight = exponential(scores[at] * scale - log_sums[at]);
      const float kept = DROPS ? dropout.of(begin, uint32_t(start + at), uint32_t(key)) : 1.0f;
      scores[at] = at >= key - first ? weight : 0.0f;
      grad_weights[at] = (grad_weights[at] * kept - dot[at]) * scores[at] * scale;
      narrow(scores[at] * kept, with.weights[key * BLOCK + at]);
      narrow(grad_weights[at], with.grad_scores[key * BLOCK + at]);
    }
  }
  for (int64_t at = 0; at < (up_to_even(seen) - seen) * BLOCK; ++at) with.grad_scores[seen * BLOCK + at] = BFloat16{0};
  interleave(with.grad_scores.data(), BLOCK, up_to_even(seen), up_to_even(seen), BLOCK, with.interleaved.data());
}

// One thread's buffers for the forward pass of one head.
struct ForwardScratch {
  std::vector<BFloat16> transposed_values, transposed_queries, weights, interleaved;
  std::vector<float> scores, result;

  ForwardScratch(int64_t even, int64_t size)
      : transposed_values(size * even), transposed_queries(BLOCK * size), weights(even * BLOCK),
        interleaved(even * std::max(BLOCK, size)), scores(even * BLOCK), result(size * BLOCK) {}
};

// Allocates a thread's buffers. Out of memory returns null and sets a flag: an exception that leaves a parallel region
// would end the process.
template <typename Buffers>
std::unique_ptr<Buffers> buffers(int64_t even, int64_t size, std::atomic<bool>& out_of_memory) {
  try {
    return std::make_unique<Buffers>(even, size);
  } catch (const std::bad_alloc&) {
    out_of_memory = true;
    return nullptr;
  }
}

// For `seen` keys and a block of queries: computes the weights in bf16, not yet divided by each query's `sum`, from
// scores, float32 (keys, BLOCK). `begin` and `start` as in scores_backward.
template <bool DROPS>
void weights_forward(int64_t seen, const float* scores, const float* highest, Dropout dropout, uint32_t begin,
                     int64_t start, float* sum, BFloat16* weights) {
  for (int64_t place = 0; place < seen; ++place)
    for (int64_t at = 0; at < BLOCK; ++at) {
      const float weight = exponential(scores[place * BLOCK + at] - highest[at]);
      const float kept = DROPS ? dropout.of(begin, uint32_t(start + at), uint32_t(place)) : 1.0f;
      sum[at] += weight;
      narrow(weight * kept, weights[place * BLOCK + at]);
    }
}

// Computes the output (rows, length, heads, size) and the log-sum-exp of each query's scores. False if out of memory.
bool forward(const Shape& shape, const std::vector<Document>& documents, const BFloat16* query, Strides query_strides,
             const BFloat16* key, Strides key_strides, const BFloat16* value, Strides value_strides, Dropout dropout,
             int threads, BFloat16* output, float* log_sums) {
  const int64_t size = shape.size, heads = shape.heads;
  std::atomic<bool> out_of_memory{false};
#pragma omp parallel num_threads(threads)
  {
    const auto own = buffers<ForwardScratch>(up_to_even(longest(documents)), size, out_of_memory);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < int64_t(documents.size()) * heads; ++task) {
      if (out_of_memory) continue;
      auto& [transposed_values, transposed_queries, weights, interleaved, scores, result] = *own;
      const int64_t number = task / heads, head = task % heads, key_head = head / shape.groups;
      const auto [row, first_key, length] = documents[number];
      const int64_t first = documents[number].first_query(shape), asked = documents[number].queries(shape);
      const int64_t even = up_to_even(length);
      const uint32_t begin = dropout.begin(number, head, heads);
      const BFloat16* const keys = key_strides.at(key, row, key_head, first_key);
      transpose(value_strides.at(value, row, key_head, first_key), value_strides.place, length, even, size,
                interleaved.data());
      deinterleave(interleaved.data(), size / 2, even, transposed_values.data());
      for (int64_t start = 0; start < asked; start += BLOCK) {
        const int64_t count = std::min(BLOCK, asked - start);
        const int64_t seen = documents[number].seen(start, shape.causal);
        transpose(query_strides.at(query, row, head, first + start), query_strides.place, count, BLOCK, size,
                  transposed_queries.data());
        multiply(seen, BLOCK, size, keys, key_strides.place, transposed_queries.data(), BLOCK, scores.data(), false);
        float highest[BLOCK], sum[BLOCK] = {};
        std::fill_n(highest, BLOCK, -std::numeric_limits<float>::infinity());
        for (int64_t place = 0; place < seen; ++place)
          for (int64_t at = 0; at < BLOCK; ++at) {
            float& score = scores[place * BLOCK + at];
            score = shape.causal && at < place - start ? -std::numeric_limits<float>::infinity() : score * shape.scale;
            highest[at] = std::max(highest[at], score);
          }
        const auto weights_pass = dropout.is_on() ? weights_forward<true> : weights_forward<false>;
        weights_pass(seen, scores.data(), highest, dropout, begin, start, sum, weights.data());
        interleave(weights.data(), BLOCK, seen, up_to_even(seen), BLOCK, interleaved.data());
        multiply(size, BLOCK, up_to_even(seen), transposed_values.data(), even, interleaved.data(), BLOCK,
                 result.data(), false);
        for (int64_t at = 0; at < count; ++at) {
          const int64_t place = first + start + at;
          log_sums[(row * heads + head) * shape.length + place] = highest[at] + std::log(sum[at]);
          BFloat16* const to = output + ((row * shape.length + place) * heads + head) * size;
          for (int64_t column = 0; column < size; ++column) narrow(result[column * BLOCK + at] / sum[at], to[column]);
        }
      }
    }
    at::native::cpublas::brgemm_release();
  }
  return !out_of_memory;
}

// Computes the three gradients. False if out of memory.
bool backward(const Shape& shape, const std::vector<Document>& documents, const BFloat16* query, Strides query_strides,
              const BFloat16* key, Strides key_strides, const BFloat16* value, Strides value_strides,
              const BFloat16* output, const float* log_sums, const BFloat16* grad_output, Strides grad_strides,
              Dropout dropout, int threads, BFloat16* grad_query, BFloat16* grad_key, BFloat16* grad_value) {
  const int64_t size = shape.size, heads = shape.heads;
  std::atomic<bool> out_of_memory{false};
#pragma omp parallel num_threads(threads)
  {
    const auto own = buffers<Scratch>(up_to_even(longest(documents)), size, out_of_memory);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < int64_t(documents.size()) * shape.shared(); ++task) {
      if (out_of_memory) continue;
      Scratch& with = *own;
      const int64_t number = task / shape.shared();
      const Document& document = documents[number];
      const int64_t row = document.row, first_key = document.start, length = document.length;
      const int64_t first = document.first_query(shape), asked = document.queries(shape), even = up_to_even(length);
      const int64_t key_head = task % shape.shared();
      const BFloat16* const keys = key_strides.at(key, row, key_head, first_key);
      const BFloat16* const values = value_strides.at(value, row, key_head, first_key);
      transpose(keys, key_strides.place, length, even, size, with.interleaved.data());
      deinterleave(with.interleaved.data(), size / 2, even, with.transposed_keys.data());
      std::fill_n(with.grad_key.begin(), length * size, 0.0f);
      std::fill_n(with.grad_value.begin(), length * size, 0.0f);
      for (int64_t head = key_head * shape.groups; head < (key_head + 1) * shape.groups; ++head) {
        const uint32_t begin = dropout.begin(number, head, heads);
        for (int64_t start = 0; start < asked; start += BLOCK) {
          const int64_t count = std::min(BLOCK, asked - start), seen = document.seen(start, shape.causal);
          const BFloat16* const queries = query_strides.at(query, row, head, first + start);
          const BFloat16* const grads = grad_strides.at(grad_output, row, head, first + start);
          float block_sums[BLOCK], dot[BLOCK];
          for (int64_t at = 0; at < BLOCK; ++at) {
            // Weights of queries after the last are e^-inf.
            block_sums[at] = std::numeric_limits<float>::infinity();
            dot[at] = 0.0f;
            if (at >= count) continue;
            block_sums[at] = log_sums[(row * heads + head) * shape.length + first + start + at];
            const BFloat16* const outputs = output + ((row * shape.length + first + start + at) * heads + head) * size;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t column = 0; column < size; ++column)
              sum += widen(grads[at * grad_strides.place + column]) * widen(outputs[column]);
            dot[at] = sum;
          }
          transpose(queries, query_strides.place, count, BLOCK, size, with.transposed_queries.data());
          transpose(grads, grad_strides.place, count, BLOCK, size, with.transposed_grads.data());
          interleave(queries, query_strides.place, count, BLOCK, size, with.queries.data());
          interleave(grads, grad_strides.place, count, BLOCK, size, with.grads.data());

          multiply(seen, BLOCK, size, keys, key_strides.place, with.transposed_queries.data(), BLOCK,
                   with.scores.data(), false);
          multiply(seen, BLOCK, size, values, value_strides.place, with.transposed_grads.data(), BLOCK,
                   with.grad_weights.data(), false);
          const auto scores_pass = dropout.is_on() ? scores_backward<true> : scores_backward<false>;
          scores_pass(seen, shape.causal ? start : seen, shape.scale, block_sums, dot, dropout, begin, start, with);
          multiply(seen, size, BLOCK, with.weights.data(), BLOCK, with.grads.data(), size,
                   with.grad_value.data(), true);
          multiply(seen, size, BLOCK, with.grad_scores.data(), BLOCK, with.queries.data(), size, with.grad_key.data(),
                   true);
          multiply(size, BLOCK, up_to_even(seen), with.transposed_keys.data(), even, with.interleaved.data(), BLOCK,
                   with.grad_query.data(), false);
          for (int64_t at = 0; at < count; ++at) {
            BFloat16* const result = grad_query + ((row * shape.length + first + start + at) * heads + head) * size;
            for (int64_t column = 0; column < size; ++column)
              narrow(with.grad_query[column * BLOCK + at], result[column]);
          }
        }
      }
      for (int64_t place = 0; place < length; ++place) {
        const int64_t result = ((row * shape.length + first_key + place) * shape.shared() + key_head) * size;
        for (int64_t column = 0; column < size; ++column) {
          narrow(with.grad_key[place * size + column], grad_key[result + column]);
          narrow(with.grad_value[place * size + column], grad_value[result + column]);
        }
      }
    }
    at::native::cpublas::brgemm_release();
  }
  return !out_of_memory;
}

Strides strides(const int64_t* of) { return {of[0], of[1], of[2]}; }

// Row, start and length of each document.
std::vector<Document> listed(const int64_t* documents, int64_t count) {
  std::vector<Document> all(count);
  for (int64_t at = 0; at < count; ++at) all[at] = {documents[3 * at], documents[3 * at + 1], documents[3 * at + 2]};
  return all;
}

}  // namespace

// True if PyTorch supports such products on this processor. Runs one.
extern "C" int attention_works() {
  constexpr int64_t SIZE = 32;
  std::vector<BFloat16> left(SIZE * SIZE), right(SIZE * SIZE);
  std::vector<float> product(SIZE * SIZE);
  for (int64_t at = 0; at < SIZE * SIZE; ++at) {  // small whole numbers, whose sums are exact
    narrow(float(at % 7 - 3), left[at]);
    narrow(float(at % 5 - 2), right[at]);
  }
  try {
    multiply(SIZE, SIZE, SIZE, left.data(), SIZE, right.data(), SIZE, product.data(), false);
    at::native::cpublas::brgemm_release();
  } catch (...) {
    return 0;
  }
  for (int64_t row = 0; row < SIZE; ++row)
    for (int64_t column = 0; column < SIZE; ++column) {
      float sum = 0.0f;
      for (int64_t at = 0; at < SIZE; ++at)
        sum += widen(left[row * SIZE + at]) * widen(right[(at / 2) * 2 * SIZE + 2 * column + at % 2]);
      if (sum != product[row * SIZE + column]) return 0;
    }
  return 1;
}

// query, key, value and grad_output may have any strides (batch row, head, position), but are contiguous within a head.
// sizes: query heads, query heads per key head, row length, head size. documents: row, start and length of each;
// positions outside of documents are not written. output and the three gradients are contiguous
// (rows, length, heads, size), log_sums (rows, heads, length). every_query: see Shape. threshold, factor, seed: see
// Dropout. Both return 1, or 0 if out of memory.
extern "C" int attention_forward(const int64_t* sizes, const int64_t* documents, int64_t count, int causal,
                                  int every_query, float scale, const BFloat16* query, const int64_t* query_strides,
                                  const BFloat16* key, const int64_t* key_strides, const BFloat16* value,
                                  const int64_t* value_strides, uint32_t threshold, float factor, uint64_t seed,
                                  int threads, BFloat16* output, float* log_sums) {
  try {
    return forward({sizes[0], sizes[1], sizes[2], sizes[3], causal != 0, every_query != 0, scale},
                   listed(documents, count), query, strides(query_strides), key, strides(key_strides), value,
                   strides(value_strides), {threshold, factor, seed}, threads, output, log_sums);
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

extern "C" int attention_backward(const int64_t* sizes, const int64_t* documents, int64_t count, int causal,
                                   int every_query, float scale, const BFloat16* query, const int64_t* query_strides,
                                   const BFloat16* key, const int64_t* key_strides, const BFloat16* value,
                                   const int64_t* value_strides, const BFloat16* output, const float* log_sums,
                                   const BFloat16* grad_output, const int64_t* grad_strides, uint32_t threshold,
                                   float factor, uint64_t seed, int threads, BFloat16* grad_query,
                                   BFloat16* grad_key, BFloat16* grad_value) {
  try {
    return backward({sizes[0], sizes[1], sizes[2], sizes[3], causal != 0, every_query != 0, scale},
                    listed(documents, count), query, strides(query_strides), key, strides(key_strides), value,
                    strides(value_strides), output, log_sums, grad_output, strides(grad_strides),
                    {threshold, factor, seed}, threads, grad_query, grad_key, grad_value);
  } catch (const std::bad_alloc&) {
    return 0;
  }
}
