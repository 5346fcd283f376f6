// torch tensors as the core sees them, in a few C calls, where torch has DLPack's C exchange API: asking for a dozen
// properties through Python takes longer than a small all-reduce. Part of the bindings; links against no torch.
#pragma once

#include "element.h"

#include <optional>
#include <pybind11/pybind11.h>

namespace ring_reduce {

// `capsule` is torch.Tensor.__dlpack_c_exchange_api__, and increment_versions() takes a tuple of tensors.
// Throws std::invalid_argument for an API of another version.
void use_torch(const pybind11::object& capsule, const pybind11::object& increment_versions);

// Lets plain_tensor() look at tensors of exactly this type. After use_torch().
void allow_tensor_type(const pybind11::object& type);

// A dense tensor on the CPU whose elements lie one after another, in memory that its storage holds.
struct PlainTensor {
  ElementType type;
  std::byte* data;
  std::uint64_t elements;
};

// Nothing where `object` is no such tensor, or where it takes a closer look to tell.
std::optional<PlainTensor> plain_tensor(const pybind11::object& object);

// Whether two plain tensors have the same type and shape, and overlap nowhere, or everywhere.
bool same_shape_and_apart(const pybind11::object& a, const PlainTensor& plain_a, const pybind11::object& b,
                          const PlainTensor& plain_b);

// Tells autograd that the memory of `tensor` was written.
void mark_written(const pybind11::object& tensor);

}  // namespace ring_reduce
