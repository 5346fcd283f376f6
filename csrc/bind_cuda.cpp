// ring_reduce._cuda: the ring on GPUs for Python. Takes addresses and numbers; knows nothing of torch.
#include "cuda_control.h"
#include "cuda_device.h"
#include "cuda_error.h"
#include "cuda_ipc.h"
#include "cuda_ring.h"
#include "cuda_virtual.h"

#include <cstring>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <system_error>

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
  const auto length = static_cast<py::ssize_t>(std::strlen(text));  // a text that was cut off may end in half a letter
  py::set_error(py::module_::import("ring_reduce.errors").attr(name),
                py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(text, length, "replace")));
}

void translate_failure(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const RingFailure& failure) {
    raise(class_name(failure.kind()), failure.what());
  } catch (const CudaError& failure) {
    raise("RingError", failure.what());
  } catch (const std::system_error& failure) {
    raise("RingError", failure.what());
  }
}

void check_numbers(int type, int normalization) {
  if (type < 0 || type >= kElementTypes || normalization < 0 || normalization > 4) {
    throw py::value_error("type or normalization is out of range");
  }
}

void bind_virtual(py::module_& module) {
  module.attr("MAX_VIRTUAL_RANKS") = kMaxVirtualRanks;
  py::class_<VirtualRing>(module, "VirtualRing", py::module_local())
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
            check_numbers(type, normalization);
            self.all_reduce({static_cast<ElementType>(type), static_cast<Normalization>(normalization), divisor,
                             elements, inputs, outputs, counts, device_counts},
                            stream, {delay_seed, absent_rank});
          },
          py::kw_only(), py::arg("type"), py::arg("normalization"), py::arg("divisor"), py::arg("elements"),
          py::arg("inputs"), py::arg("outputs"), py::arg("counts"), py::arg("device_counts"), py::arg("stream"),
          py::arg("delay_seed"), py::arg("absent_rank"))
      .def("check", &VirtualRing::check)
      .def("total_count", &VirtualRing::total_count, py::call_guard<py::gil_scoped_release>());
}

void bind_device(py::module_& module) {
  module.def("why_no_cuda", &why_no_cuda);
  module.def("resident_blocks", &resident_blocks);
  module.def(
      "device",
      [](int number) {
        const DeviceGuard guard(number);
        return std::pair(device_uuid(number), resident_blocks());
      },
      py::arg("number"));
}

using PythonPart = std::tuple<py::bytes, std::uint64_t, std::string>;

StagingPart part_of(const PythonPart& part) { return {std::get<0>(part), std::get<1>(part), std::get<2>(part)}; }

void bind_ipc(py::module_& module) {
  module.def("control_bytes", &IpcControl::bytes, py::arg("world"));
  py::class_<IpcStats>(module, "IpcStats", py::module_local())
      .def_readonly("calls", &IpcStats::calls)
      .def_readonly("bytes_sent", &IpcStats::bytes_sent)
      .def_readonly("bytes_received", &IpcStats::bytes_received)
      .def_readonly("header_bytes_sent", &IpcStats::header_bytes_sent)
      .def_property_readonly("seconds_waiting", [](const IpcStats&) { return 0.0; });

  const py::call_guard<py::gil_scoped_release> unlocked;  // they wait for the device or for other ranks
  py::class_<IpcRing>(module, "IpcRing", py::module_local())
      .def(py::init([](int rank, int world, int device, int lanes, std::size_t segment_bytes, int depth, int window,
                       double timeout_s, std::uint64_t first_segment) {
             return std::make_unique<IpcRing>(
                 IpcSettings{rank, world, device, {lanes, depth, segment_bytes}, window, timeout_s, first_segment});
           }),
           py::kw_only(), py::arg("rank"), py::arg("world"), py::arg("device"), py::arg("lanes"),
           py::arg("segment_bytes"), py::arg("depth"), py::arg("window"), py::arg("timeout_s"),
           py::arg("first_segment"))
      .def("part",
           [](const IpcRing& self) {
             const StagingPart part = self.part();
             return PythonPart(py::bytes(part.handle), part.offset, part.uuid);
           })
      .def(
          "open",
          [](IpcRing& self, int control_fd, const std::vector<int>& processes, const PythonPart& left,
             const PythonPart& right, std::uint64_t token) {
            IpcPeers peers{control_fd, processes, part_of(left), part_of(right), token};
            const py::gil_scoped_release release;
            self.open(std::move(peers));
          },
          py::kw_only(), py::arg("control_fd"), py::arg("processes"), py::arg("left"), py::arg("right"),
          py::arg("token"))
      .def("prove", &IpcRing::prove, unlocked)
      .def(
          "run",
          [](IpcRing& self, int operation, int type, int normalization, double divisor, std::uint64_t elements,
             std::uintptr_t input, std::uintptr_t output, double count, std::uintptr_t device_count,
             std::uintptr_t stream) {
            check_numbers(type, normalization);
            if (operation < 0 || operation > 2) throw py::value_error("operation is out of range");
            const py::gil_scoped_release release;
            self.run({static_cast<Operation>(operation), static_cast<ElementType>(type),
                      static_cast<Normalization>(normalization), divisor, elements, input, output, count, device_count},
                     stream);
          },
          py::kw_only(), py::arg("operation"), py::arg("type"), py::arg("normalization"), py::arg("divisor"),
          py::arg("elements"), py::arg("input"), py::arg("output"), py::arg("count"), py::arg("device_count"),
          py::arg("stream"))
      .def("abort", &IpcRing::abort, py::arg("reason"))
      .def("check", &IpcRing::check)
      .def("total_count", &IpcRing::total_count)
      .def("stats", &IpcRing::stats)
      .def("close", &IpcRing::close, unlocked);
}

}  // namespace
}  // namespace ring_reduce

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "The GPU core of ring_reduce: a rank of a ring over CUDA IPC, and virtual ranks on one GPU.";
  py::register_local_exception_translator(&ring_reduce::translate_failure);
  ring_reduce::bind_device(module);
  ring_reduce::bind_virtual(module);
  ring_reduce::bind_ipc(module);
}
