// The passes, written once in vector extensions of g++ and clang, compiled once for each width (passes_*.cpp).
// The including file defines RING_REDUCE_ISA (a namespace), RING_REDUCE_VECTOR_BYTES and, where there is one,
// RING_REDUCE_F16C (hardware conversion of float16).
// No include guard: one translation unit, one width. Nothing here calls an inline function of a library, which the
// linker could take from the file compiled for the widest vectors.

#include "passes.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ring_reduce::RING_REDUCE_ISA {

inline constexpr std::size_t kVectorBytes = RING_REDUCE_VECTOR_BYTES;

template <class T, std::size_t kCount>
using Vector [[gnu::vector_size(kCount * sizeof(T))]] = T;

#define RING_REDUCE_INLINE [[gnu::always_inline]] static inline

// Values of an element type in registers: `Value` is what is computed in.
template <class T>
struct Lanes {  // float64, float32, int32, int64: computed as they are stored
  using Value = T;
  static constexpr std::size_t kCount = kVectorBytes / sizeof(T);
  using Values = Vector<T, kCount>;
  RING_REDUCE_INLINE Values load(const T* in) {
    Values v;
    std::memcpy(&v, in, sizeof v);
    return v;
  }
  RING_REDUCE_INLINE void store(T* out, Values v) { std::memcpy(out, &v, sizeof v); }
};

inline constexpr std::size_t kFloats = kVectorBytes / sizeof(float);
using Floats = Vector<float, kFloats>;
using Words = Vector<std::uint32_t, kFloats>;
using HalfWords = Vector<std::uint16_t, kFloats>;

RING_REDUCE_INLINE Words load_half_words(const void* in) {
  HalfWords bits;
  std::memcpy(&bits, in, sizeof bits);
  return __builtin_convertvector(bits, Words);
}

RING_REDUCE_INLINE void store_half_words(void* out, Words words) {
  const HalfWords bits = __builtin_convertvector(words, HalfWords);
  std::memcpy(out, &bits, sizeof bits);
}

template <class To, class From>
RING_REDUCE_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// `mask` is a comparison of vectors.
template <class Mask>
RING_REDUCE_INLINE Words select(Mask mask, Words yes, Words no) {
  return mask ? yes : no;
}

// In the upper halves of words; what stands in the lower ones doesn't matter.
RING_REDUCE_INLINE Words rounded_to_bfloat16(Floats v) {
  const Words bits = bits_as<Words>(v);
  const Words rounded = bits + 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even
  const Words quiet_nan = bits | 0x400000;
  return select(v != v, quiet_nan, rounded);
}

template <>
struct Lanes<BFloat16> {
  using Value = float;
  static constexpr std::size_t kCount = kFloats;
  using Values = Floats;
  RING_REDUCE_INLINE Floats load(const BFloat16* in) { return bits_as<Floats>(load_half_words(in) << 16); }
  RING_REDUCE_INLINE void store(BFloat16* out, Floats v) { store_half_words(out, rounded_to_bfloat16(v) >> 16); }
};

template <>
struct Lanes<Half> {
  using Value = float;
  static constexpr std::size_t kCount = kFloats;
  using Values = Floats;
#if defined(RING_REDUCE_F16C) && RING_REDUCE_VECTOR_BYTES == 64
  // The masked forms, all lanes on: g++ 12 warns of its own undefined operand in the plain ones.
  RING_REDUCE_INLINE Floats load(const Half* in) {
    return bits_as<Floats>(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in))));
  }
  RING_REDUCE_INLINE void store(Half* out, Floats v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm512_maskz_cvtps_ph(0xffff, bits_as<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(RING_REDUCE_F16C)
  RING_REDUCE_INLINE Floats load(const Half* in) {
    return bits_as<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in))));
  }
  RING_REDUCE_INLINE void store(Half* out, Floats v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(bits_as<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
  }
#else
  RING_REDUCE_INLINE Floats load(const Half* in) {
    const Words half = load_half_words(in);
    const Words sign = (half & 0x8000) << 16;
    const Words magnitude = (half & 0x7fff) << 13;
    // The exponent is 112 too small: the product sets it right, for denormals too, without a branch.
    const Floats finite = bits_as<Floats>(magnitude) * 0x1p112f;
    const Words special = magnitude | 0x7f800000;  // infinity and NaN keep their mantissa
    return bits_as<Floats>(sign | select(magnitude >= 0x0f800000, special, bits_as<Words>(finite)));
  }
  RING_REDUCE_INLINE void store(Half* out, Floats v) {
    const Words bits = bits_as<Words>(v);
    const Words magnitude = bits & 0x7fffffff;
    const Words sign = (bits >> 16) & 0x8000;
    // Normal: rebias the exponent by -112, round to nearest even at bit 13. 65520 and above carry into infinity.
    const Words normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Denormal: adding 0.5 makes the FPU round at bit 2^-24, and leaves the result in the low bits.
    const Words denormal = bits_as<Words>(bits_as<Floats>(magnitude) + 0.5f) - 0x3f000000;
    const Words finite = select(magnitude < (113u << 23), denormal, normal);
    const Words infinite = select(magnitude >= 0x477ff000, (magnitude & 0) + 0x7c00, finite);
    const Words nan = 0x7e00 | ((magnitude >> 13) & 0x1ff);
    store_half_words(out, sign | select(magnitude > 0x7f800000, nan, infinite));
  }
#endif
};

// Elements as the passes take them that read and write one type: two bfloat16 lie in a word, and neither has to be
// moved out of it to be a float.
template <class T>
struct Packed : Lanes<T> {};

template <>
struct Packed<BFloat16> {
  using Value = float;
  static constexpr std::size_t kCount = 2 * kFloats;
  struct Values {
    Floats low, high;  // halves of words
    [[gnu::always_inline]] Values operator*(float x) const { return {low * x, high * x}; }
    [[gnu::always_inline]] Values operator/(float x) const { return {low / x, high / x}; }
    [[gnu::always_inline]] Values operator+(const Values& x) const { return {low + x.low, high + x.high}; }
  };
  RING_REDUCE_INLINE Values load(const BFloat16* in) {
    Words words;
    std::memcpy(&words, in, sizeof words);
    return {bits_as<Floats>(words << 16), bits_as<Floats>(words & 0xffff0000)};
  }
  RING_REDUCE_INLINE void store(BFloat16* out, const Values& v) {
    const Words words = (rounded_to_bfloat16(v.low) >> 16) | (rounded_to_bfloat16(v.high) & 0xffff0000);
    std::memcpy(out, &words, sizeof words);
  }
};

template <class T, bool kTwo, bool kScaled, bool kDivide>
RING_REDUCE_INLINE void combine_vector(T* out, const T* x, const T* y, const Combine& c) {
  using L = Packed<T>;
  using Value = typename L::Value;
  typename L::Values v = L::load(x);
  if constexpr (kScaled) v = v * static_cast<Value>(c.x_scale);
  if constexpr (kTwo) {
    typename L::Values w = L::load(y);
    if constexpr (kScaled) w = w * static_cast<Value>(c.y_scale);
    v = v + w;
  }
  // A division, as torch's div_ does: multiplying by the reciprocal rounds differently.
  if constexpr (kDivide) v = v / static_cast<Value>(c.divisor);
  L::store(out, v);
}

template <class T, bool kTwo, bool kScaled, bool kDivide>
static void combine_loop(const Combine& c) {
  constexpr std::size_t kCount = Packed<T>::kCount;
  T* out = reinterpret_cast<T*>(c.out);
  const T* x = reinterpret_cast<const T*>(c.x);
  const T* y = reinterpret_cast<const T*>(c.y);
  std::size_t i = 0;
  for (; i + kCount <= c.elements; i += kCount) {
    combine_vector<T, kTwo, kScaled, kDivide>(out + i, x + i, kTwo ? y + i : nullptr, c);
  }
  if (const std::size_t rest = c.elements - i; rest != 0) {
    T padded_out[kCount], padded_x[kCount] = {}, padded_y[kCount] = {};
    std::memcpy(padded_x, x + i, rest * sizeof(T));
    if (kTwo) std::memcpy(padded_y, y + i, rest * sizeof(T));
    combine_vector<T, kTwo, kScaled, kDivide>(padded_out, padded_x, padded_y, c);
    std::memcpy(out + i, padded_out, rest * sizeof(T));
  }
}

template <class T, bool kTwo>
static void combine_scaled(const Combine& c) {
  const bool scaled = c.x_scale != 1.0 || (kTwo && c.y_scale != 1.0);
  const bool divide = c.divisor != 1.0;
  if (scaled && divide) return combine_loop<T, kTwo, true, true>(c);
  if (scaled) return combine_loop<T, kTwo, true, false>(c);
  if (divide) return combine_loop<T, kTwo, false, true>(c);
  if constexpr (kTwo) return combine_loop<T, kTwo, false, false>(c);
  if (c.out != c.x) std::memcpy(c.out, c.x, c.elements * sizeof(T));
}

template <class T>
static void combine_float(const Combine& c) {
  c.y != nullptr ? combine_scaled<T, true>(c) : combine_scaled<T, false>(c);
}

// Unsigned, so that an overflow wraps, as torch's sum does, and is defined.
template <class T>
static void combine_integer(const Combine& c) {
  if (c.y != nullptr) return combine_loop<T, true, false, false>(c);
  if (c.out != c.x) std::memcpy(c.out, c.x, c.elements * sizeof(T));
}

#if defined(__x86_64__)
static void stream_copy(std::byte* out, const std::byte* in, std::size_t bytes) {
  constexpr std::size_t kLine = 64;  // whole lines, or the write-combining buffer is flushed half full
  std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(out) % kLine) % kLine;
  if (head > bytes) head = bytes;
  std::memcpy(out, in, head);
  std::size_t i = head;
  for (; i + kLine <= bytes; i += kLine) {
#if RING_REDUCE_VECTOR_BYTES == 64
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), _mm512_loadu_si512(in + i));
#elif RING_REDUCE_VECTOR_BYTES == 32
    const auto* from = reinterpret_cast<const __m256i*>(in + i);
    auto* to = reinterpret_cast<__m256i*>(out + i);
    for (int j = 0; j < 2; ++j) _mm256_stream_si256(to + j, _mm256_loadu_si256(from + j));
#else
    const auto* from = reinterpret_cast<const __m128i*>(in + i);
    auto* to = reinterpret_cast<__m128i*>(out + i);
    for (int j = 0; j < 4; ++j) _mm_stream_si128(to + j, _mm_loadu_si128(from + j));
#endif
  }
  std::memcpy(out + i, in + i, bytes - i);
  _mm_sfence();  // a release store does not order streaming stores
}
#else
static void stream_copy(std::byte* out, const std::byte* in, std::size_t bytes) { std::memcpy(out, in, bytes); }
#endif

}  // namespace ring_reduce::RING_REDUCE_ISA
