#include "accumulate.h"

#include "passes.h"
#include "pieces.h"

#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>

namespace ring_reduce {

namespace {

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

void check_length(const char* what, std::size_t length, std::size_t sums) {
  if (length != sums) {
    refuse(sums, " sums but ", length, " ", what, ": every list has one entry for each tensor");
  }
}

void check_tensor(const TensorList& tensors, std::size_t tensor, const char* other) {
  const int type = tensors.types[tensor];
  if (type < 0 || type >= kFloatTypes) {
    refuse("type ", type, " of ", other, " ", tensor, " is not one of 0 to ", kFloatTypes - 1,
           " (float64, float32, float16, bfloat16)");
  }
  const std::uintptr_t sum = tensors.sums[tensor], address = tensors.others[tensor];
  if (tensors.elements[tensor] != 0 && (sum == 0 || address == 0)) {
    refuse(sum == 0 ? "sum" : other, " ", tensor, " has ", tensors.elements[tensor], " elements at address 0");
  }
  const auto element_type = static_cast<ElementType>(type);
  if (sum == address && sum_type(element_type) != element_type && sum != 0) {
    refuse("sum ", tensor, " and ", other, " ", tensor, " share their memory, but one is ",
           element_name(sum_type(element_type)), " and the other ", element_name(element_type));
  }
}

// A factor or divisor that float32 holds as a normal number; 0 and, where the caller let it through, infinity.
void check_float32(const TensorList& tensors, const char* what, double value) {
  using Limits = std::numeric_limits<float>;
  const double magnitude = std::fabs(value);
  if (magnitude == 0 || std::isinf(value) || (magnitude >= Limits::min() && magnitude <= Limits::max())) return;
  for (std::size_t tensor = 0; tensor < tensors.types.size(); ++tensor) {
    if (tensors.types[tensor] != static_cast<int>(ElementType::float64)) {
      refuse(what, " is ", value, ", and sum ", tensor, " is float32, which holds ", Limits::min(), " to ",
             Limits::max(), "; use float64, or scale the tensor");
    }
  }
}

void check(const TensorList& tensors, const char* other, int threads) {
  const std::size_t sums = tensors.sums.size();
  check_length((std::string(other) + "s").c_str(), tensors.others.size(), sums);
  check_length("elements", tensors.elements.size(), sums);
  check_length("types", tensors.types.size(), sums);
  for (std::size_t tensor = 0; tensor < sums; ++tensor) check_tensor(tensors, tensor, other);
  if (threads < 1) refuse("threads is ", threads, "; it has to be 1 or more");
}

std::byte* at(std::uintptr_t address, std::uint64_t element, ElementType type) {
  return reinterpret_cast<std::byte*>(address) + element * element_bytes(type);
}

}  // namespace

void accumulate(const TensorList& tensors, const std::vector<bool>& fresh, double scale, int threads) {
  check(tensors, "input", threads);
  check_length("fresh", fresh.size(), tensors.sums.size());
  if (!std::isfinite(scale)) refuse("scale is ", scale, "; it has to be a finite number");
  check_float32(tensors, "scale", scale);
  visit_pieces(tensors.elements, threads, [&](std::size_t tensor, std::uint64_t first, std::uint64_t elements) {
    const auto type = static_cast<ElementType>(tensors.types[tensor]);
    passes().accumulate[tensors.types[tensor]]({.sum = at(tensors.sums[tensor], first, sum_type(type)),
                                                .x = at(tensors.others[tensor], first, type),
                                                .elements = elements,
                                                .scale = scale,
                                                .fresh = fresh[tensor]});
  });
}

void divide_into(const TensorList& tensors, double divisor, int threads) {
  check(tensors, "output", threads);
  if (!(divisor >= 0)) refuse("divisor is ", divisor, "; it has to be a number, 0 or more");
  check_float32(tensors, "divisor", divisor);
  visit_pieces(tensors.elements, threads, [&](std::size_t tensor, std::uint64_t first, std::uint64_t elements) {
    const auto type = static_cast<ElementType>(tensors.types[tensor]);
    passes().divide[tensors.types[tensor]]({.out = at(tensors.others[tensor], first, type),
                                            .sum = at(tensors.sums[tensor], first, sum_type(type)),
                                            .elements = elements,
                                            .divisor = divisor});
  });
}

}  // namespace ring_reduce
