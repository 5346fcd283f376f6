// ring_reduce._cuda: the ring on GPUs for Python. Takes addresses and numbers; knows nothing of torch.
#include "cuda_error.h"
#include "cuda_ring.h"
#include "cuda_virtual.h"

#include <cstring>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace ring_reduce {
namespace {

const char* class_name(FailureKind kind) {
  switch (kind) {
    case FailureKind::mismatch: return "RingMismatch";
    case FailureKind::timeout: return "RingTimeout";
    case FailureKind::peer_lost: return "PeerLost";
    case FailureKind::aborted: return "RingAborted";
    case FailureKind::closed: return "RingClosed";
  }
  return "RingError";
}

void raise(const char* name, const char* text) {
  py::set_error(py::module_::import("ring_reduce.errors").attr(name), text);
}

void translate_failure(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const RingFailure& failure) {
    raise(class_name(failure.kind()), failure.what());
  } catch (const CudaError& failure) {
    raise("RingError", failure.what());
  }
}

void bind_virtual(py::module_& module) {
  module.attr("MAX_VIRTUAL_RANKS") = kMaxVirtualRanks;
  module.def("why_no_cuda", &why_no_cuda);
  module.def("resident_blocks", &resident_blocks);
  py::class_<VirtualRing>(module, "VirtualRing")
      .def(py::init([](int world, int lanes, std::size_t segment_bytes, int depth, int window, double timeout_s,
                       std::uint64_t first_segment) {
             return std::make_unique<VirtualRing>(
                 VirtualSettings{world, {lanes, depth, segment_bytes}, window, timeout_s, first_segment});
           }),
           py::kw_only(), py::arg("world"), py::arg("lanes"), py::arg("segment_bytes"), py::arg("depth"),
           py::arg("window"), py::arg("timeout_s"), py::arg("first_segment"))
      .def(
          "all_reduce",
          [](VirtualRing& self, int type, int normalization, double divisor, std::uint64_t elements,
             const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs,
             const std::vector<double>& counts, std::uintptr_t device_counts, std::uintptr_t stream,
             std::uint32_t delay_seed, int absent_rank) {
            if (type < 0 || type >= kElementTypes || normalization < 0 || normalization > 4) {
              throw py::value_error("type or normalization is out of range");
            }
            self.all_reduce({static_cast<ElementType>(type), static_cast<Normalization>(normalization), divisor,
                             elements, inputs, outputs, counts, device_counts},
                            stream, {delay_seed, absent_rank});
          },
          py::kw_only(), py::arg("type"), py::arg("normalization"), py::arg("divisor"), py::arg("elements"),
          py::arg("inputs"), py::arg("outputs"), py::arg("counts"), py::arg("device_counts"), py::arg("stream"),
          py::arg("delay_seed"), py::arg("absent_rank"))
      .def("check", &VirtualRing::check)
      .def("total_count", &VirtualRing::total_count);
}

}  // namespace
}  // namespace ring_reduce

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "The GPU core of ring_reduce: a ring of virtual ranks on one GPU.";
  py::register_local_exception_translator(&ring_reduce::translate_failure);
  ring_reduce::bind_virtual(module);
}
