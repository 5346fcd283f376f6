// 16 bytes in registers: how they are loaded and stored, and as what numbers they are computed.
#pragma once

#include "element.h"

#include <cstring>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace ring_reduce {

struct alignas(kPackBytes) Pack {
  std::uint32_t words[4];
};

// --- memory. Slots stay in L2 and pass L1, which does not see a neighbour's stores; tensors are read and written once.
// Never ld.global.nc: the compiler may move it above the wait for a slot.

RING_REDUCE_PORTABLE inline Pack load_slot(const std::byte* from) {
#if defined(__CUDA_ARCH__)
  const uint4 v = __ldcg(reinterpret_cast<const uint4*>(from));
  return {{v.x, v.y, v.z, v.w}};
#else
  Pack pack;
  std::memcpy(&pack, from, sizeof pack);
  return pack;
#endif
}

RING_REDUCE_PORTABLE inline void store_slot(std::byte* to, const Pack& pack) {
#if defined(__CUDA_ARCH__)
  __stcg(reinterpret_cast<uint4*>(to), make_uint4(pack.words[0], pack.words[1], pack.words[2], pack.words[3]));
#else
  std::memcpy(to, &pack, sizeof pack);
#endif
}

// An unsigned integer of an element's size.
template <std::size_t kBytes>
struct Word;
template <>
struct Word<2> {
  using Type = unsigned short;
};
template <>
struct Word<4> {
  using Type = unsigned int;
};
template <>
struct Word<8> {
  using Type = unsigned long long;
};

// `elements` of kBytes each; a whole pack at an address that is a multiple of 16 in one access.
template <std::size_t kBytes, bool kWide>
RING_REDUCE_PORTABLE inline Pack load_tensor(const std::byte* from, unsigned elements = kPackBytes / kBytes) {
#if defined(__CUDA_ARCH__)
  if constexpr (kWide) {
    const uint4 v = __ldcs(reinterpret_cast<const uint4*>(from));
    return {{v.x, v.y, v.z, v.w}};
  }
#endif
  using Element = typename Word<kBytes>::Type;
  Element parts[kPackBytes / kBytes] = {};
  for (unsigned i = 0; i < kPackBytes / kBytes; ++i) {
#if defined(__CUDA_ARCH__)
    if (i < elements) parts[i] = __ldcs(reinterpret_cast<const Element*>(from) + i);
#else
    if (i < elements) std::memcpy(parts + i, from + i * kBytes, kBytes);
#endif
  }
  Pack pack;
  std::memcpy(&pack, parts, sizeof pack);
  return pack;
}

template <std::size_t kBytes, bool kWide>
RING_REDUCE_PORTABLE inline void store_tensor(std::byte* to, const Pack& pack,
                                              unsigned elements = kPackBytes / kBytes) {
#if defined(__CUDA_ARCH__)
  if constexpr (kWide) {
    __stcs(reinterpret_cast<uint4*>(to), make_uint4(pack.words[0], pack.words[1], pack.words[2], pack.words[3]));
    return;
  }
#endif
  using Element = typename Word<kBytes>::Type;
  Element parts[kPackBytes / kBytes];
  std::memcpy(parts, &pack, sizeof pack);
  for (unsigned i = 0; i < kPackBytes / kBytes; ++i) {
#if defined(__CUDA_ARCH__)
    if (i < elements) __stcs(reinterpret_cast<Element*>(to) + i, parts[i]);
#else
    if (i < elements) std::memcpy(to + i * kBytes, parts + i, kBytes);
#endif
  }
}

// --- numbers

// What an element type is computed in, and a pack of it as such values and back; rounded to nearest, ties to even.
template <class T>
struct Numbers {  // float64, float32; uint32_t, uint64_t, which wrap as torch's integers do
  using Value = T;
  static constexpr unsigned kCount = kPackBytes / sizeof(T);
  RING_REDUCE_PORTABLE static void unpack(const Pack& pack, Value* values) { std::memcpy(values, &pack, sizeof pack); }
  RING_REDUCE_PORTABLE static Pack pack(const Value* values) {
    Pack pack;
    std::memcpy(&pack, values, sizeof pack);
    return pack;
  }
};

RING_REDUCE_PORTABLE inline float float_of(std::uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

RING_REDUCE_PORTABLE inline std::uint32_t bits_of(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

template <>
struct Numbers<BFloat16> {
  using Value = float;
  static constexpr unsigned kCount = 8;
  RING_REDUCE_PORTABLE static void unpack(const Pack& pack, float* values) {
    for (unsigned i = 0; i < 4; ++i) {
      values[2 * i] = float_of(pack.words[i] << 16);
      values[2 * i + 1] = float_of(pack.words[i] & 0xffff0000u);
    }
  }
  RING_REDUCE_PORTABLE static Pack pack(const float* values) {
    Pack pack{};
    for (unsigned i = 0; i < 4; ++i) {
#if defined(__CUDA_ARCH__)
      const __nv_bfloat162 two = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
      std::memcpy(&pack.words[i], &two, sizeof two);
#else
      pack.words[i] = rounded(values[2 * i]) | rounded(values[2 * i + 1]) << 16;
#endif
    }
    return pack;
  }

 private:
  RING_REDUCE_PORTABLE static std::uint32_t rounded(float value) {
    const std::uint32_t bits = bits_of(value);
    if (value != value) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
};

template <>
struct Numbers<Half> {
  using Value = float;
  static constexpr unsigned kCount = 8;
  RING_REDUCE_PORTABLE static void unpack(const Pack& pack, float* values) {
    for (unsigned i = 0; i < 4; ++i) {
#if defined(__CUDA_ARCH__)
      __half2 two;
      std::memcpy(&two, &pack.words[i], sizeof two);
      const float2 wide = __half22float2(two);
      values[2 * i] = wide.x;
      values[2 * i + 1] = wide.y;
#elif !defined(__CUDACC__)
      _Float16 two[2];
      std::memcpy(two, &pack.words[i], sizeof two);
      values[2 * i] = static_cast<float>(two[0]);
      values[2 * i + 1] = static_cast<float>(two[1]);
#endif
    }
  }
  RING_REDUCE_PORTABLE static Pack pack(const float* values) {
    Pack pack{};
    for (unsigned i = 0; i < 4; ++i) {
#if defined(__CUDA_ARCH__)
      const __half2 two = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
      std::memcpy(&pack.words[i], &two, sizeof two);
#elif !defined(__CUDACC__)
      const _Float16 two[2] = {static_cast<_Float16>(values[2 * i]), static_cast<_Float16>(values[2 * i + 1])};
      std::memcpy(&pack.words[i], two, sizeof two);
#endif
    }
    return pack;
  }
};

}  // namespace ring_reduce
