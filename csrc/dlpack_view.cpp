#include "dlpack_view.h"

#include <algorithm>
#include <stdexcept>

namespace ring_reduce {

namespace {

// The layout of DLPack 1.x, https://github.com/dmlc/dlpack/blob/main/include/dlpack/dlpack.h.
constexpr std::uint32_t kMajorVersion = 1;
constexpr std::int32_t kCpu = 1;
enum TypeCode : std::uint8_t { kInteger = 0, kFloating = 2, kBfloat = 4 };

struct Type {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  bool operator==(const Type&) const = default;
};

struct Tensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t ndim;
  Type type;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; may be null where there is no gap
  std::uint64_t byte_offset;
};

struct ExchangeApi {
  std::uint32_t major;
  std::uint32_t minor;
  ExchangeApi* previous;
  void* make_tensor;
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  int (*tensor_from_object)(void* object, Tensor* tensor);  // does not own; 0, or a Python error is set
  void* current_work_stream;
};

const ExchangeApi* api = nullptr;

Type type_of(ElementType type) {
  switch (type) {
    case ElementType::float64: return {kFloating, 64, 1};
    case ElementType::float32: return {kFloating, 32, 1};
    case ElementType::float16: return {kFloating, 16, 1};
    case ElementType::bfloat16: return {kBfloat, 16, 1};
    case ElementType::int32: return {kInteger, 32, 1};
    case ElementType::int64: return {kInteger, 64, 1};
  }
  return {};
}

bool read(const pybind11::object& object, Tensor& tensor) {
  if (api->tensor_from_object(object.ptr(), &tensor) == 0) return true;
  PyErr_Clear();  // who looks more closely tells what is wrong
  return false;
}

bool is_contiguous(const Tensor& tensor) {
  if (tensor.strides == nullptr) return true;
  std::int64_t step = 1;
  for (std::int32_t i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != step) return false;
    step *= tensor.shape[i];
  }
  return true;
}

}  // namespace

void use_exchange_api(const pybind11::object& capsule) {
  const auto* found = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (found == nullptr) throw pybind11::error_already_set();
  if (found->major != kMajorVersion || found->tensor_from_object == nullptr) {
    throw std::invalid_argument("this DLPack exchange API is of version " + std::to_string(found->major) + "." +
                                std::to_string(found->minor) + ", and 1.x is needed");
  }
  api = found;
}

bool view_plain(const pybind11::object& object, ElementType type, const pybind11::object* like, PlainTensor& view) {
  Tensor tensor{};
  if (!read(object, tensor)) return false;
  if (tensor.device_type != kCpu || !(tensor.type == type_of(type)) || !is_contiguous(tensor)) return false;
  std::uint64_t elements = 1;
  for (std::int32_t i = 0; i < tensor.ndim; ++i) elements *= static_cast<std::uint64_t>(tensor.shape[i]);
  if (tensor.data == nullptr && elements != 0) return false;
  if (like != nullptr) {
    Tensor other{};
    if (!read(*like, other) || other.ndim != tensor.ndim) return false;
    if (!std::equal(tensor.shape, tensor.shape + tensor.ndim, other.shape)) return false;
  }
  view = {static_cast<std::byte*>(tensor.data) + tensor.byte_offset, elements};
  return true;
}

}  // namespace ring_reduce
