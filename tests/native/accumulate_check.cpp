// That each element is visited once; then an accumulator's passes against scalar code, for the vectors that
// RING_REDUCE_ISA names: every 16-bit float, every tail length, every type; and two callers at once. Prints the name of the
// vectors, then what differs.
#include "accumulate.h"
#include "passes.h"
#include "pieces.h"
#include "scalar_floats.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

using namespace ring_reduce;

namespace {

std::atomic<int> failures = 0;

// what() is the text: writing it for each of a million elements that are right would be most of this program's time.
template <class What>
void expect(bool right, What what) {
  if (!right && ++failures < 10) std::printf("wrong: %s\n", std::string(what()).c_str());
}

// An element type: how it is stored, and what it is added up in.
struct Float64 {
  using Stored = double;
  using Sum = double;
  static constexpr ElementType type = ElementType::float64;
  static Sum widen(Stored x) { return x; }
  static Stored narrow(Sum x) { return x; }
};
struct Float32 {
  using Stored = float;
  using Sum = float;
  static constexpr ElementType type = ElementType::float32;
  static Sum widen(Stored x) { return x; }
  static Stored narrow(Sum x) { return x; }
};
struct Float16 {
  using Stored = std::uint16_t;
  using Sum = float;
  static constexpr ElementType type = ElementType::float16;
  static Sum widen(Stored x) { return widen_half(x); }
  static Stored narrow(Sum x) { return nearest(x, widen_half, 0x7c00); }
};
struct Bfloat16 {
  using Stored = std::uint16_t;
  using Sum = float;
  static constexpr ElementType type = ElementType::bfloat16;
  static Sum widen(Stored x) { return widen_bfloat(x); }
  static Stored narrow(Sum x) { return nearest(x, widen_bfloat, 0x7f80); }
};

template <class T>
bool same(T x, T y) {
  return (x != x && y != y) || std::memcmp(&x, &y, sizeof x) == 0;
}

template <class T>
std::uintptr_t address(const T* x) {
  return reinterpret_cast<std::uintptr_t>(x);
}

// Rounded after each operation: volatile keeps a compiler from fusing them.
template <class Type>
typename Type::Sum plain_sum(typename Type::Sum sum, typename Type::Stored x, double scale, bool fresh) {
  using Sum = typename Type::Sum;
  if (scale == 0) return fresh ? Sum{0} : sum;
  volatile Sum term = Type::widen(x) * static_cast<Sum>(scale);
  return fresh ? term : sum + term;
}

template <class Type>
void check_sums(const std::vector<typename Type::Stored>& x, std::size_t shift, double scale, bool fresh) {
  using Sum = typename Type::Sum;
  constexpr Sum kGuard = 77;
  std::vector<Sum> sums(x.size() + shift + 40, kGuard), before;
  for (std::size_t i = 0; i < x.size(); ++i) {
    sums[shift + i] = fresh ? static_cast<Sum>(NAN) : static_cast<Sum>(i % 97) / 7 - 5;
  }
  before = sums;
  accumulate({{address(sums.data() + shift)}, {address(x.data())}, {x.size()}, {static_cast<int>(Type::type)}}, {fresh},
             scale, 1);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const bool inside = i >= shift && i < shift + x.size();
    const Sum want = inside ? plain_sum<Type>(before[i], x[i - shift], scale, fresh) : kGuard;
    expect(same(sums[i], want), [&] {
      return std::string(element_name(Type::type)) + (fresh ? " fresh" : "") + " sum of length " +
             std::to_string(x.size()) + " times " + std::to_string(scale) + ", element " + std::to_string(i);
    });
  }
}

template <class Type>
void check_quotients(const std::vector<typename Type::Sum>& sums, std::size_t shift, double divisor) {
  using Sum = typename Type::Sum;
  using Stored = typename Type::Stored;
  constexpr Stored kGuard = 77;
  std::vector<Stored> out(sums.size() + shift + 40, kGuard);
  divide_into({{address(sums.data())}, {address(out.data() + shift)}, {sums.size()}, {static_cast<int>(Type::type)}},
              divisor, 1);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const bool inside = i >= shift && i < shift + sums.size();
    bool right = out[i] == kGuard;
    if (inside) {
      const Sum quotient = divisor == 0 ? Sum{0} : sums[i - shift] / static_cast<Sum>(divisor);
      const Sum got = Type::widen(out[i]);
      right = quotient != quotient ? got != got : same(got, Type::widen(Type::narrow(quotient)));
    }
    expect(right, [&] {
      return std::string(element_name(Type::type)) + " quotient of length " + std::to_string(sums.size()) + " by " +
             std::to_string(divisor) + ", element " + std::to_string(i);
    });
  }
}

// Neither products nor quotients are exact. 16-bit inputs begin at 1, or are all that there are.
template <class Type>
void check_length(std::size_t length) {
  using Sum = typename Type::Sum;
  std::vector<typename Type::Stored> x(length);
  std::vector<Sum> sums(length);
  for (std::size_t i = 0; i < length; ++i) {
    if constexpr (sizeof(x[0]) == 2) {
      x[i] = static_cast<std::uint16_t>(length < 65536 ? i + 0x3c00 : i);
      sums[i] = Type::widen(static_cast<std::uint16_t>(i)) * 1.00390625f;
    } else {
      x[i] = static_cast<Sum>(i) / 3 - 9;
      sums[i] = static_cast<Sum>(i) / 7 - 9;
    }
    if (i % 13 == 5) sums[i] = NAN;
  }
  if (length > 3 && length < 65536) x[3] = Type::narrow(INFINITY);
  for (const double scale : {1.0, 0.0, 0.37, -3.0}) {
    for (const bool fresh : {false, true}) check_sums<Type>(x, length % 3, scale, fresh);
  }
  for (const double divisor : {1.0, 0.0, 3.0, 0.37}) check_quotients<Type>(sums, length % 5, divisor);
}

template <class Type>
void check_type() {
  for (std::size_t length = 0; length < 80; ++length) check_length<Type>(length);
  if constexpr (sizeof(typename Type::Stored) == 2) check_length<Type>(65536);
}

// Counts the visits of each element, on threads that may be two at once.
void check_visits(const std::vector<std::uint64_t>& sizes, int threads) {
  std::vector<std::unique_ptr<std::atomic<int>[]>> visits;
  for (const std::uint64_t size : sizes) visits.push_back(std::make_unique<std::atomic<int>[]>(size + 1));
  visit_pieces(sizes, threads, [&](std::size_t tensor, std::uint64_t first, std::uint64_t elements) {
    expect(first % kCutElements == 0 && elements > 0 && elements <= kPieceElements,
           [] { return "a piece begins off a cut"; });
    for (std::uint64_t i = first; i < first + elements; ++i) ++visits[tensor][i];
  });
  for (std::size_t tensor = 0; tensor < sizes.size(); ++tensor) {
    for (std::uint64_t i = 0; i <= sizes[tensor]; ++i) {
      expect(visits[tensor][i] == (i < sizes[tensor]), [&] {
        return "visits of an element of a tensor of " + std::to_string(sizes[tensor]) + " elements with " +
               std::to_string(threads) + " threads";
      });
    }
  }
}

void check_all_visits() {
  const std::vector<std::vector<std::uint64_t>> cases = {
      {},
      {0, 0},
      {1},
      {0, 1, 0, 63, 64, 65, 0},
      {kPieceElements, kPieceElements - 1, kPieceElements + 1, 0},
      {16 * kPieceElements + 7, 0, 100, 100},
      std::vector<std::uint64_t>(3000, 200),
  };
  for (const int threads : {1, 2, 3, 7}) {
    for (const auto& sizes : cases) check_visits(sizes, threads);
  }
}

// Two callers at once: one gets the crew, the other works alone.
void check_callers() {
  const auto call = [](float value) {
    std::vector<float> x(12 * kPieceElements, value), sums(x.size(), 1.0f), out(x.size());
    for (int round = 0; round < 20; ++round) {
      accumulate({{address(sums.data())}, {address(x.data())}, {x.size()}, {1}}, {round == 0}, 2.0, 3);
      divide_into({{address(sums.data())}, {address(out.data())}, {x.size()}, {1}}, 2.0, 3);
      bool right = true;
      for (const float quotient : out) right = right && quotient == value * static_cast<float>(round + 1);
      expect(right, [] { return "a call beside another"; });
    }
  };
  std::thread other([&] { call(3.0f); });
  call(5.0f);
  other.join();
}

}  // namespace

// "threads" as the argument leaves out what one thread does alone.
int main(int count, char** arguments) {
  std::printf("%s\n", passes().isa);
  check_all_visits();
  if (count < 2 || std::string(arguments[1]) != "threads") {
    check_type<Float64>();
    check_type<Float32>();
    check_type<Float16>();
    check_type<Bfloat16>();
  }
  check_callers();
  std::printf("%d failures\n", failures.load());
  return failures == 0 ? 0 : 1;
}
