// What a rank puts into a partial sum, and what divides it in the end: the one place of this, for every port.
#pragma once

#include "call.h"

namespace ring_reduce {

// 2^exponent; -1022 <= exponent <= 1023. A product with it is rounded as ldexp() rounds.
RING_REDUCE_PORTABLE inline double power_of_two(int exponent) {
  const std::uint64_t bits = static_cast<std::uint64_t>(1023 + exponent) << 52;
  double power = 0;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}

// ceil(log2 x), exactly; 0 for 0. x is a count or a number of ranks, so never denormal.
RING_REDUCE_PORTABLE inline int exponent_above(double x) {
  if (!(x > 0)) return 0;
  std::uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  const int floor = static_cast<int>(bits >> 52) - 1023;
  return (bits << 12) == 0 ? floor : floor + 1;
}

// Whether the wire carries partial * 2^-exponent_above(K), so that it overflows only where the result does.
RING_REDUCE_PORTABLE constexpr bool wire_is_scaled(const Fingerprint& call) {
  if (call.normalization == Normalization::weighted_mean) return true;
  return call.type == ElementType::float16 && call.normalization != Normalization::sum;
}

// What move k adds up: received * received_scale + own * own_scale, either of which may be left out; that times
// 2^exponent is the sum so far.
struct Mix {
  bool with_received;
  bool with_own;
  double received_scale;
  double own_scale;
  int exponent;
};

// `received_count` is that of the segment from left (0 where none is received), `own_count` that of this rank, 1 where
// the normalization does not use it.
RING_REDUCE_PORTABLE inline Mix mix_of(const Fingerprint& call, int k, bool receives, double received_count,
                                       double own_count) {
  Mix mix{receives, true, 1.0, 1.0, 0};
  if (wire_is_scaled(call)) {
    const bool weighted = call.normalization == Normalization::weighted_mean;
    mix.exponent = exponent_above(weighted ? received_count + own_count : k + 1);
    mix.received_scale = power_of_two(exponent_above(weighted ? received_count : k) - mix.exponent);
    mix.own_scale = (weighted ? own_count : 1.0) * power_of_two(-mix.exponent);
  }
  // A count of 0 leaves the data out, by choice and not by a product: 0 * NaN is NaN.
  if (uses_count(call.normalization)) {
    if (received_count == 0) mix.with_received = false;
    if (own_count == 0) mix.with_own = false;
  }
  return mix;
}

// What a finished sum is divided by; `total_count` is that of all ranks.
RING_REDUCE_PORTABLE inline double divisor_of(const Fingerprint& call, int world, double total_count) {
  switch (call.normalization) {
    case Normalization::sum: return 1.0;
    case Normalization::mean: return world;
    case Normalization::divide_by: return call.divisor;
    case Normalization::divide_by_count:
    case Normalization::weighted_mean: return total_count;
  }
  return 1.0;
}

}  // namespace ring_reduce
