// The passes of an accumulator, in the vectors of chunk.h, which comes before in the same translation unit.
// No include guard: one translation unit, one width.

namespace ring_reduce::RING_REDUCE_ISA {

// What an element type is added up in.
template <class T>
using Sum = typename Lanes<T>::Value;

template <class T, bool kFresh, bool kScaled>
RING_REDUCE_INLINE void accumulate_vector(Sum<T>* sum, const T* x, Sum<T> scale) {
  typename Lanes<T>::Values v = Lanes<T>::load(x);
  if constexpr (kScaled) v = v * scale;
  if constexpr (!kFresh) v = Lanes<Sum<T>>::load(sum) + v;
  Lanes<Sum<T>>::store(sum, v);
}

template <class T, bool kFresh, bool kScaled>
static void accumulate_loop(const Accumulate& a) {
  constexpr std::size_t kCount = Lanes<T>::kCount;
  auto* sum = reinterpret_cast<Sum<T>*>(a.sum);
  const T* x = reinterpret_cast<const T*>(a.x);
  const auto scale = static_cast<Sum<T>>(a.scale);
  std::size_t i = 0;
  for (; i + kCount <= a.elements; i += kCount) accumulate_vector<T, kFresh, kScaled>(sum + i, x + i, scale);
  // The rest goes through the same instructions, in a vector of its own.
  if (const std::size_t rest = a.elements - i; rest != 0) {
    Sum<T> padded_sum[kCount] = {};
    T padded_x[kCount] = {};
    if (!kFresh) std::memcpy(padded_sum, sum + i, rest * sizeof(Sum<T>));
    std::memcpy(padded_x, x + i, rest * sizeof(T));
    accumulate_vector<T, kFresh, kScaled>(padded_sum, padded_x, scale);
    std::memcpy(sum + i, padded_sum, rest * sizeof(Sum<T>));
  }
}

template <class T>
static void accumulate_float(const Accumulate& a) {
  if (a.scale == 0) {
    if (a.fresh) std::memset(a.sum, 0, a.elements * sizeof(Sum<T>));
  } else if (a.scale != 1) {
    a.fresh ? accumulate_loop<T, true, true>(a) : accumulate_loop<T, false, true>(a);
  } else {
    a.fresh ? accumulate_loop<T, true, false>(a) : accumulate_loop<T, false, false>(a);
  }
}

template <class T, bool kDivide>
RING_REDUCE_INLINE void divide_vector(T* out, const Sum<T>* sum, Sum<T> divisor) {
  typename Lanes<T>::Values v = Lanes<Sum<T>>::load(sum);
  // A division, as torch's div_ does: multiplying by the reciprocal rounds differently.
  if constexpr (kDivide) v = v / divisor;
  Lanes<T>::store(out, v);
}

template <class T, bool kDivide>
static void divide_loop(const Divide& d) {
  constexpr std::size_t kCount = Lanes<T>::kCount;
  T* out = reinterpret_cast<T*>(d.out);
  const auto* sum = reinterpret_cast<const Sum<T>*>(d.sum);
  const auto divisor = static_cast<Sum<T>>(d.divisor);
  std::size_t i = 0;
  for (; i + kCount <= d.elements; i += kCount) divide_vector<T, kDivide>(out + i, sum + i, divisor);
  if (const std::size_t rest = d.elements - i; rest != 0) {
    T padded_out[kCount];
    Sum<T> padded_sum[kCount] = {};
    std::memcpy(padded_sum, sum + i, rest * sizeof(Sum<T>));
    divide_vector<T, kDivide>(padded_out, padded_sum, divisor);
    std::memcpy(out + i, padded_out, rest * sizeof(T));
  }
}

template <class T>
static void divide_float(const Divide& d) {
  if (d.divisor == 0) {
    std::memset(d.out, 0, d.elements * sizeof(T));
  } else if (d.divisor != 1) {
    divide_loop<T, true>(d);
  } else if (d.out != d.sum) {
    divide_loop<T, false>(d);
  }
}

}  // namespace ring_reduce::RING_REDUCE_ISA
