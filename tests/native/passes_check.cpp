// The passes against scalar code that is slow and obvious: every float16, every bfloat16, every tail length, every type,
// for the vectors that RING_REDUCE_ISA names. Prints the name of the vectors, then what differs.
#include "passes.h"
#include "scalar_floats.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

using namespace ring_reduce;

namespace {

constexpr std::uint16_t kPoison = 0x5a5a;
int failures = 0;

template <class Widen>
void check_16_bit(ElementType type, Widen widen, std::uint16_t infinity, float scale, float divisor) {
  std::vector<std::uint16_t> x(65536), out(65536, kPoison);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<std::uint16_t>(i);
  passes().combine[static_cast<int>(type)]({.out = reinterpret_cast<std::byte*>(out.data()),
                                            .x = reinterpret_cast<const std::byte*>(x.data()),
                                            .y = nullptr,
                                            .elements = x.size(),
                                            .x_scale = scale,
                                            .divisor = divisor});
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float value = widen(x[i]) * scale / divisor;
    const bool right = std::isnan(value) ? std::isnan(widen(out[i])) : out[i] == nearest(value, widen, infinity);
    if (!right && ++failures < 10) {
      std::printf("%s %04x * %g / %g: %04x\n", element_name(type), x[i], static_cast<double>(scale),
                  static_cast<double>(divisor), out[i]);
    }
  }
}

// x * 0.5 + y, of each length up to some vectors, at an odd address; the element behind the end must stay.
template <class T>
void check_lengths(ElementType type) {
  const bool integer = is_integer(type);
  for (std::size_t n = 0; n < 80; ++n) {
    std::vector<T> x(n + 1), y(n + 1), out(n + 2, T{77});
    for (std::size_t i = 0; i < n; ++i) {
      x[i] = static_cast<T>(i * 6);
      y[i] = static_cast<T>(1000 + i);
    }
    passes().combine[static_cast<int>(type)]({.out = reinterpret_cast<std::byte*>(out.data() + 1),
                                              .x = reinterpret_cast<const std::byte*>(x.data()),
                                              .y = reinterpret_cast<const std::byte*>(y.data()),
                                              .elements = n,
                                              .x_scale = integer ? 1.0 : 0.5});
    for (std::size_t i = 0; i < n; ++i) {
      const T want = static_cast<T>((integer ? i * 6 : i * 3) + 1000 + i);
      if (out[i + 1] != want && ++failures < 10) std::printf("%s length %zu element %zu\n", element_name(type), n, i);
    }
    if ((out[0] != T{77} || (n < out.size() - 1 && out[n + 1] != T{77})) && ++failures < 10) {
      std::printf("%s length %zu wrote outside\n", element_name(type), n);
    }
  }
}

void check_stream_copy() {
  std::vector<std::byte> in(700);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::byte>(i * 7);
  for (std::size_t from = 0; from < 70; from += 23) {
    for (std::size_t n = 0; n < 300; ++n) {
      std::vector<std::byte> out(700, std::byte{0xee});
      passes().stream_copy(out.data() + from, in.data() + 1, n);
      bool right = std::memcmp(out.data() + from, in.data() + 1, n) == 0 && out[from + n] == std::byte{0xee};
      right = right && (from == 0 || out[from - 1] == std::byte{0xee});
      if (!right && ++failures < 10) std::printf("stream_copy of %zu bytes to offset %zu\n", n, from);
    }
  }
}

}  // namespace

int main() {
  std::printf("%s\n", passes().isa);
  check_16_bit(ElementType::float16, widen_half, 0x7c00, 1.5f, 1.0f);  // many ties
  check_16_bit(ElementType::bfloat16, widen_bfloat, 0x7f80, 1.5f, 1.0f);
  for (const float divisor : {3.0f, 0.37f, 1e-5f, 7e4f, 4097.3f, 0.9999999f}) {
    check_16_bit(ElementType::float16, widen_half, 0x7c00, 1.0f, divisor);
    check_16_bit(ElementType::bfloat16, widen_bfloat, 0x7f80, 1.0f, divisor);
  }
  check_lengths<double>(ElementType::float64);
  check_lengths<float>(ElementType::float32);
  check_lengths<std::int32_t>(ElementType::int32);
  check_lengths<std::int64_t>(ElementType::int64);
  check_stream_copy();
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
