#include "torch_view.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>

namespace py = pybind11;

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

// Of this process, and for its whole life.
const ExchangeApi* api = nullptr;
PyObject* increment_versions = nullptr;
std::set<PyObject*> types;

std::optional<ElementType> element_type(const Type& type) {
  if (type == Type{kFloating, 64, 1}) return ElementType::float64;
  if (type == Type{kFloating, 32, 1}) return ElementType::float32;
  if (type == Type{kFloating, 16, 1}) return ElementType::float16;
  if (type == Type{kBfloat, 16, 1}) return ElementType::bfloat16;
  if (type == Type{kInteger, 32, 1}) return ElementType::int32;
  if (type == Type{kInteger, 64, 1}) return ElementType::int64;
  return std::nullopt;
}

bool read(const py::object& object, Tensor& tensor) {
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

py::object call(const py::object& object, PyObject* name) {
  PyObject* result = PyObject_CallMethodNoArgs(object.ptr(), name);
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

std::uint64_t number(const py::object& object) {
  const std::uint64_t value = PyLong_AsUnsignedLongLong(object.ptr());
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

// What DLPack does not tell: whether the memory holds the other sign, and how far the storage goes.
bool is_as_it_seems(const py::object& tensor, const PlainTensor& plain) {
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  static PyObject* const untyped_storage = PyUnicode_InternFromString("untyped_storage");
  static PyObject* const nbytes = PyUnicode_InternFromString("nbytes");
  static PyObject* const storage_offset = PyUnicode_InternFromString("storage_offset");
  if (call(tensor, is_neg).ptr() == Py_True) return false;
  const std::uint64_t held = number(call(call(tensor, untyped_storage), nbytes));
  const std::uint64_t begin = number(call(tensor, storage_offset));
  const std::uint64_t size = element_bytes(plain.type);
  // A storage without memory (of a tensor that stands for zeros) may claim to hold something.
  const bool has_memory = reinterpret_cast<std::uintptr_t>(plain.data) != begin * size;
  return plain.elements == 0 || (has_memory && (begin + plain.elements) * size <= held);
}

}  // namespace

void use_torch(const py::object& capsule, const py::object& increment) {
  const auto* found = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (found == nullptr) throw py::error_already_set();
  if (found->major != kMajorVersion || found->tensor_from_object == nullptr) {
    throw std::invalid_argument("this DLPack exchange API is of version " + std::to_string(found->major) + "." +
                                std::to_string(found->minor) + ", and 1.x is needed");
  }
  api = found;
  increment_versions = increment.inc_ref().ptr();
}

void allow_tensor_type(const py::object& type) { types.insert(type.inc_ref().ptr()); }

std::optional<PlainTensor> plain_tensor(const py::object& object) {
  if (types.count(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()))) == 0) return std::nullopt;
  Tensor tensor{};
  if (!read(object, tensor) || tensor.device_type != kCpu || !is_contiguous(tensor)) return std::nullopt;
  const std::optional<ElementType> type = element_type(tensor.type);
  if (!type) return std::nullopt;
  std::uint64_t elements = 1;
  for (std::int32_t i = 0; i < tensor.ndim; ++i) elements *= static_cast<std::uint64_t>(tensor.shape[i]);
  const PlainTensor plain{*type, static_cast<std::byte*>(tensor.data) + tensor.byte_offset, elements};
  if (!is_as_it_seems(object, plain)) return std::nullopt;
  return plain;
}

bool same_shape_and_apart(const py::object& a, const PlainTensor& plain_a, const py::object& b,
                          const PlainTensor& plain_b) {
  Tensor left{}, right{};
  if (plain_a.type != plain_b.type || !read(a, left) || !read(b, right) || left.ndim != right.ndim) return false;
  if (!std::equal(left.shape, left.shape + left.ndim, right.shape)) return false;
  const std::size_t bytes = plain_a.elements * element_bytes(plain_a.type);
  return plain_a.data == plain_b.data || plain_a.data >= plain_b.data + bytes || plain_b.data >= plain_a.data + bytes;
}

void mark_written(const py::object& tensor) {
  const py::tuple tensors = py::make_tuple(tensor);
  const auto done = py::reinterpret_steal<py::object>(PyObject_CallOneArg(increment_versions, tensors.ptr()));
  if (!done) throw py::error_already_set();
}

}  // namespace ring_reduce
