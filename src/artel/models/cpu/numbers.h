// Numbers in float32 and bf16, for all kernels in this folder; see build.py.
//
// Plain C++ that the compiler vectorizes: nothing here depends on the processor.

#pragma once

#include <cstdint>
#include <cstring>

namespace artel {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct BFloat16 {
  uint16_t bits;
};

inline float widen(float value) { return value; }
inline float widen(BFloat16 value) { return from_bits(uint32_t(value.bits) << 16); }

// The nearest bf16 (ties to even) in the upper half; the lower half is undefined. A NaN from arithmetic stays a NaN.
inline uint32_t rounded(float value) {
  const uint32_t bits = bits_of(value);
  return bits + 0x7fff + ((bits >> 16) & 1);
}

inline void narrow(float value, float& to) { to = value; }
inline void narrow(float value, BFloat16& to) { to.bits = uint16_t(rounded(value) >> 16); }

// e^x for x <= 0 or slightly above, within 1e-7 of it; 0 below -87. As in Cephes' expf (Moshier 1992):
// 2^n times a polynomial of the rest, which is at most ln(2)/2. Adding 1.5 * 2^23 rounds x / ln(2) to the integer n,
// which is then in the lowest bits of the sum.
inline float exponential(float x) {
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float rest = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln(2) in two parts
  float sum = 1.9875691500e-4f;
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * (rest * rest) + rest + 1.0f;
  const float value = sum * from_bits((bits_of(shifted) << 23) + 0x3f800000u);
  return x < -87.0f ? 0.0f : value;
}

}  // namespace artel
