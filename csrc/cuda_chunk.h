// The passes of a team over one segment. Its threads take packs in turn; several a thread at once, so that enough loads
// are in flight.
#pragma once

#include "cuda_pack.h"

namespace ring_reduce {

inline constexpr unsigned kPacksAtOnce = 4;
inline constexpr unsigned kQuotientsAtOnce = 2;  // a division takes registers

// sum = received * received_scale + own * own_scale, or one of the two alone, then / divisor: to `sent`, `output` or
// both. Absent ones are null. `received` and `sent` are payloads of slots, so whole packs of them may be touched.
struct Combination {
  const std::byte* received;
  const std::byte* own;
  std::byte* sent;
  std::byte* output;
  unsigned elements;
  bool with_received;  // 0 counts leave data out
  bool with_own;
  double received_scale;
  double own_scale;
  double divisor;
};

template <class T>
inline constexpr bool kIsFloat = true;
template <>
inline constexpr bool kIsFloat<std::uint32_t> = false;
template <>
inline constexpr bool kIsFloat<std::uint64_t> = false;

enum class Sources { both, received, own };

template <class T, Sources kSources, bool kDivide>
RING_REDUCE_PORTABLE inline Pack combine_pack(const Pack& received, const Pack& own, const Combination& c) {
  using N = Numbers<T>;
  using Value = typename N::Value;
  Value x[N::kCount], y[N::kCount];
  N::unpack(received, x);
  N::unpack(own, y);
  for (unsigned i = 0; i < N::kCount; ++i) {
    if constexpr (kIsFloat<T>) {  // times 1 changes no bit
      x[i] *= static_cast<Value>(c.received_scale);
      y[i] *= static_cast<Value>(c.own_scale);
    }
    if constexpr (kSources == Sources::both) x[i] = x[i] + y[i];
    if constexpr (kSources == Sources::own) x[i] = y[i];
    if constexpr (kDivide) x[i] = x[i] / static_cast<Value>(c.divisor);
  }
  return N::pack(x);
}

template <class T, Sources kSources, bool kDivide, bool kWide, unsigned kPacks>
RING_REDUCE_PORTABLE inline void combine_packs(const Combination& c, unsigned first, unsigned step) {
  Pack received[kPacks] = {}, own[kPacks] = {};
  for (unsigned j = 0; j < kPacks; ++j) {
    const std::size_t at = static_cast<std::size_t>(first + j * step) * kPackBytes;
    if constexpr (kSources != Sources::own) received[j] = load_slot(c.received + at);
    if constexpr (kSources != Sources::received) own[j] = load_tensor<sizeof(T), kWide>(c.own + at);
  }
  for (unsigned j = 0; j < kPacks; ++j) {
    const std::size_t at = static_cast<std::size_t>(first + j * step) * kPackBytes;
    const Pack result = combine_pack<T, kSources, kDivide>(received[j], own[j], c);
    if (c.sent != nullptr) store_slot(c.sent + at, result);
    if (c.output != nullptr) store_tensor<sizeof(T), kWide>(c.output + at, result);
  }
}

// The pack at the end of a tensor that is not full.
template <class T, Sources kSources, bool kDivide>
RING_REDUCE_PORTABLE inline void combine_rest(const Combination& c, unsigned pack, unsigned elements) {
  const std::size_t at = static_cast<std::size_t>(pack) * kPackBytes;
  Pack received = {}, own = {};
  if constexpr (kSources != Sources::own) received = load_slot(c.received + at);
  if constexpr (kSources != Sources::received) own = load_tensor<sizeof(T), false>(c.own + at, elements);
  const Pack result = combine_pack<T, kSources, kDivide>(received, own, c);
  if (c.sent != nullptr) store_slot(c.sent + at, result);
  if (c.output != nullptr) store_tensor<sizeof(T), false>(c.output + at, result, elements);
}

template <class T, Sources kSources, bool kDivide, bool kWide, class Block>
RING_REDUCE_PORTABLE inline void combine_all(const Block& block, const Combination& c) {
  constexpr unsigned kPacks = !kWide ? 1 : kDivide ? kQuotientsAtOnce : kPacksAtOnce;
  const unsigned packs = c.elements / Numbers<T>::kCount, step = block.threads();
  unsigned i = block.thread();
  for (; i + (kPacks - 1) * step < packs; i += kPacks * step) {
    combine_packs<T, kSources, kDivide, kWide, kPacks>(c, i, step);
  }
  for (; i < packs; i += step) combine_packs<T, kSources, kDivide, kWide, 1>(c, i, step);
  const unsigned rest = c.elements % Numbers<T>::kCount;
  if (rest != 0 && block.thread() == 0) combine_rest<T, kSources, kDivide>(c, packs, rest);
}

template <class T, Sources kSources, class Block>
RING_REDUCE_PORTABLE inline void combine_sources(const Block& block, const Combination& c, bool wide) {
  if constexpr (kIsFloat<T>) {
    if (c.divisor != 1.0) {
      return wide ? combine_all<T, kSources, true, true>(block, c) : combine_all<T, kSources, true, false>(block, c);
    }
  }
  wide ? combine_all<T, kSources, false, true>(block, c) : combine_all<T, kSources, false, false>(block, c);
}

// `wide`: own and output begin at multiples of 16 bytes.
template <class T, class Block>
RING_REDUCE_PORTABLE inline void combine(const Block& block, const Combination& c, bool wide) {
  if (c.own == nullptr) {
    combine_sources<T, Sources::received>(block, c, wide);
  } else if (c.received == nullptr) {
    combine_sources<T, Sources::own>(block, c, wide);
  } else {
    combine_sources<T, Sources::both>(block, c, wide);
  }
}

// The bits of a slot to `output` and, where it is not null, to `sent`.
template <std::size_t kBytes, bool kWide, class Block>
RING_REDUCE_PORTABLE inline void copy_all(const Block& block, const std::byte* received, std::byte* sent,
                                          std::byte* output, unsigned elements) {
  constexpr unsigned kCount = kPackBytes / kBytes;
  const unsigned packs = elements / kCount, step = block.threads();
  const auto copy = [&]<unsigned kPacks>(unsigned first) {
    Pack held[kPacks];
    for (unsigned j = 0; j < kPacks; ++j) {
      held[j] = load_slot(received + static_cast<std::size_t>(first + j * step) * kPackBytes);
    }
    for (unsigned j = 0; j < kPacks; ++j) {
      const std::size_t at = static_cast<std::size_t>(first + j * step) * kPackBytes;
      if (sent != nullptr) store_slot(sent + at, held[j]);
      store_tensor<kBytes, kWide>(output + at, held[j]);
    }
  };
  unsigned i = block.thread();
  for (; i + (kPacksAtOnce - 1) * step < packs; i += kPacksAtOnce * step) copy.template operator()<kPacksAtOnce>(i);
  for (; i < packs; i += step) copy.template operator()<1>(i);
  if (const unsigned rest = elements % kCount; rest != 0 && block.thread() == 0) {
    const std::size_t at = static_cast<std::size_t>(packs) * kPackBytes;
    const Pack held = load_slot(received + at);
    if (sent != nullptr) store_slot(sent + at, held);
    store_tensor<kBytes, false>(output + at, held, rest);
  }
}

template <std::size_t kBytes, class Block>
RING_REDUCE_PORTABLE inline void copy(const Block& block, const std::byte* received, std::byte* sent, std::byte* output,
                                      unsigned elements, bool wide) {
  wide ? copy_all<kBytes, true>(block, received, sent, output, elements)
       : copy_all<kBytes, false>(block, received, sent, output, elements);
}

// The same number everywhere, of an element's bits: zeros where nothing was counted, NaN after a failure.
template <class Word, class Block>
RING_REDUCE_PORTABLE inline void fill(const Block& block, std::byte* to, std::size_t elements, Word bits) {
  for (std::size_t i = block.thread(); i < elements; i += block.threads()) {
#if defined(__CUDA_ARCH__)
    __stcg(reinterpret_cast<Word*>(to) + i, bits);
#else
    std::memcpy(to + i * sizeof bits, &bits, sizeof bits);
#endif
  }
}

}  // namespace ring_reduce
