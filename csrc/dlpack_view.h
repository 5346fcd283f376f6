// A torch tensor's memory by one C call, where its torch has DLPack's C exchange API: asking for each property through
// Python takes longer than a small all-reduce. Part of the bindings; links against no torch.
#pragma once

#include "element.h"

#include <pybind11/pybind11.h>

namespace ring_reduce {

// The functions of a library that speaks the API; `capsule` is its type's __dlpack_c_exchange_api__.
// Throws std::invalid_argument for a capsule of another kind.
void use_exchange_api(const pybind11::object& capsule);

// A tensor on the CPU whose elements lie one after another.
struct PlainTensor {
  std::byte* data;
  std::uint64_t elements;
};

// False, and nothing else, where `tensor` is no such thing: on another device, strided, of another type, freed, or of
// another shape than `like` (unless null). use_exchange_api() was called.
bool view_plain(const pybind11::object& tensor, ElementType type, const pybind11::object* like, PlainTensor& view);

}  // namespace ring_reduce
