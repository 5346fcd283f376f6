// Element types: their numbers on the wire, their sizes, and the two 16-bit floats as bits.
#pragma once

#include "portable.h"

#include <bit>

namespace ring_reduce {

// The numbers are part of the wire format and of the Python module arrays.py.
enum class ElementType : std::uint8_t { float64, float32, float16, bfloat16, int32, int64 };
inline constexpr int kElementTypes = 6;
inline constexpr int kFloatTypes = 4;  // the first of them

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

RING_REDUCE_PORTABLE constexpr std::size_t element_bytes(ElementType type) {
  switch (type) {
    case ElementType::float64: return 8;
    case ElementType::float32: return 4;
    case ElementType::float16: return 2;
    case ElementType::bfloat16: return 2;
    case ElementType::int32: return 4;
    case ElementType::int64: return 8;
  }
  return 0;
}

RING_REDUCE_PORTABLE constexpr bool is_integer(ElementType type) {
  switch (type) {
    case ElementType::float64:
    case ElementType::float32:
    case ElementType::float16:
    case ElementType::bfloat16: return false;
    case ElementType::int32:
    case ElementType::int64: return true;
  }
  return false;
}

// What elements of a type are added up in.
constexpr ElementType sum_type(ElementType type) {
  return type == ElementType::float64 ? ElementType::float64 : ElementType::float32;
}

constexpr const char* element_name(ElementType type) {
  switch (type) {
    case ElementType::float64: return "float64";
    case ElementType::float32: return "float32";
    case ElementType::float16: return "float16";
    case ElementType::bfloat16: return "bfloat16";
    case ElementType::int32: return "int32";
    case ElementType::int64: return "int64";
  }
  return "unknown";
}

}  // namespace ring_reduce
