// Few rows times a weight matrix in float32: a linear layer for the tokens of several answers. See packed.py.
//
// Weights are stored in panels of `kPanel` outputs, (panels, inputs, kPanel): each block of rows reads a panel
// sequentially, and the sums of the block stay in registers. Missing outputs of the last panel are zero.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

#ifdef __AVX512F__
constexpr int kWidth = 16, kRows = 12;
#else
constexpr int kWidth = 8, kRows = 6;
#endif
constexpr int kPanel = 32;
constexpr int64_t kAlone = 1 << 16;  // products, for which one thread is enough
typedef float Vector __attribute__((vector_size(kWidth * sizeof(float)), aligned(sizeof(float))));
constexpr int kPass = 2;  // vectors of outputs at once

// sums (rows, kPanel) = inputs (rows, size) times a panel.
template <int rows>
void block(const float* inputs, const float* panel, int64_t size, float* sums) {
  for (int part = 0; part < kPanel; part += kPass * kWidth) {
    Vector sum[rows][kPass] = {};
    const float* weights = panel + part;
    for (int64_t input = 0; input < size; ++input, weights += kPanel) {
      Vector weight[kPass];
      for (int vector = 0; vector < kPass; ++vector)
        std::memcpy(&weight[vector], weights + vector * kWidth, sizeof(Vector));
      for (int row = 0; row < rows; ++row)
        for (int vector = 0; vector < kPass; ++vector) sum[row][vector] += inputs[row * size + input] * weight[vector];
    }
    for (int row = 0; row < rows; ++row)
      for (int vector = 0; vector < kPass; ++vector)
        std::memcpy(sums + row * kPanel + part + vector * kWidth, &sum[row][vector], sizeof(Vector));
  }
}

// The same for a number of rows known at run time, at most `rows`.
template <int rows>
void block_of(int count, const float* inputs, const float* panel, int64_t size, float* sums) {
  if constexpr (rows == 1)
    block<1>(inputs, panel, size, sums);
  else if (count == rows)
    block<rows>(inputs, panel, size, sums);
  else
    block_of<rows - 1>(count, inputs, panel, size, sums);
}

}  // namespace

// outputs (rows, width) = inputs (rows, size) times the weights in panels, plus the bias (width,) if there is one.
extern "C" void multiply_packed(const float* inputs, const float* panels, const float* bias, int64_t rows, int64_t size,
                                int64_t width, int threads, float* outputs) {
  const int64_t blocks = (rows + kRows - 1) / kRows, each = (rows + blocks - 1) / blocks;
  // dynamic: other threads of the server use the cores too, and a delayed thread leaves the rest to the others
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (rows * size * width > kAlone)
  for (int64_t first = 0; first < width; first += kPanel) {
    float sums[kRows * kPanel];
    const int64_t columns = std::min<int64_t>(kPanel, width - first);
    for (int64_t start = 0; start < rows; start += each) {
      const int count = int(std::min(each, rows - start));
      block_of<kRows>(count, inputs + start * size, panels + first * size, size, sums);
      for (int row = 0; row < count; ++row) {
        float* output = outputs + (start + row) * width + first;
        for (int64_t column = 0; column < columns; ++column)
          output[column] = sums[row * kPanel + column] + (bias ? bias[first + column] : 0.0f);
      }
    }
  }
}
