// The pass of the direct all-reduce, in the vectors of chunk.h, which comes before in the same translation unit.
// No include guard: one translation unit, one width.

namespace ring_reduce::RING_REDUCE_ISA {

// Whole vectors, or the rest of a tensor, which goes through the same instructions.
template <class T>
RING_REDUCE_INLINE typename Packed<T>::Values load_first(const T* in, std::size_t elements) {
  constexpr std::size_t kCount = Packed<T>::kCount;
  if (elements == kCount) return Packed<T>::load(in);
  T padded[kCount] = {};
  std::memcpy(padded, in, elements * sizeof(T));
  return Packed<T>::load(padded);
}

template <class T>
RING_REDUCE_INLINE void store_first(T* out, typename Packed<T>::Values v, std::size_t elements) {
  constexpr std::size_t kCount = Packed<T>::kCount;
  if (elements == kCount) return Packed<T>::store(out, v);
  T padded[kCount];
  Packed<T>::store(padded, v);
  std::memcpy(out, padded, elements * sizeof(T));
}

// Elements `at` and after, at most a vector of them.
template <class T, bool kScaled, bool kDivide>
RING_REDUCE_INLINE void add_all_vector(const AddAll& a, std::size_t at, std::size_t elements) {
  using Value = typename Packed<T>::Value;
  using Values = typename Packed<T>::Values;
  const auto value_of = [&](std::size_t input) {
    const Values v = load_first(reinterpret_cast<const T*>(a.inputs[input]) + at, elements);
    if constexpr (!kScaled) return v;
    return v * static_cast<Value>(a.scales[input]);
  };
  Values sum = value_of(0);
  for (std::size_t input = 1; input < a.count; ++input) sum = sum + value_of(input);
  // A division, as torch's div_ does: multiplying by the reciprocal rounds differently.
  if constexpr (kDivide) sum = sum / static_cast<Value>(a.divisor);
  store_first(reinterpret_cast<T*>(a.out) + at, sum, elements);
}

template <class T, bool kScaled, bool kDivide>
static void add_all_loop(const AddAll& a) {
  constexpr std::size_t kCount = Packed<T>::kCount;
  std::size_t at = 0;
  for (; at + kCount <= a.elements; at += kCount) add_all_vector<T, kScaled, kDivide>(a, at, kCount);
  if (at != a.elements) add_all_vector<T, kScaled, kDivide>(a, at, a.elements - at);
}

template <class T>
static void add_all_float(const AddAll& a) {
  bool scaled = false;
  for (std::size_t input = 0; input < a.count; ++input) scaled = scaled || a.scales[input] != 1.0;
  const bool divide = a.divisor != 1.0;
  if (scaled && divide) return add_all_loop<T, true, true>(a);
  if (scaled) return add_all_loop<T, true, false>(a);
  if (divide) return add_all_loop<T, false, true>(a);
  add_all_loop<T, false, false>(a);
}

// Unsigned, so that an overflow wraps, as torch's sum does, and is defined.
template <class T>
static void add_all_integer(const AddAll& a) {
  add_all_loop<T, false, false>(a);
}

}  // namespace ring_reduce::RING_REDUCE_ISA
