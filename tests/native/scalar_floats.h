// The 16-bit floats in scalar code that is slow and obvious.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

inline float widen_half(std::uint16_t bits) {
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  if (exponent == 31) return mantissa != 0 ? std::nanf("") : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                               : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25));
}

inline float widen_bfloat(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

// The nearest of all 65536 values, ties to the even one, by looking at the neighbours of a first guess.
template <class Widen>
std::uint16_t nearest(float value, Widen widen, std::uint16_t infinity) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  std::uint16_t low = 0, high = infinity;  // low <= magnitude < high, as the bits of positive values are in order
  if (std::isinf(value)) return sign | infinity;
  while (high - low > 1) {
    const std::uint16_t middle = static_cast<std::uint16_t>((low + high) / 2);
    (static_cast<double>(widen(middle)) <= magnitude ? low : high) = middle;
  }
  // Infinity rounds as if it were the next finite value.
  const double below = widen(low), above = high == infinity ? 2 * below - widen(low - 1) : widen(high);
  const double to_low = magnitude - below, to_high = above - magnitude;
  const bool up = to_high < to_low || (to_high == to_low && (low & 1) != 0);
  return sign | (up ? high : low);
}
