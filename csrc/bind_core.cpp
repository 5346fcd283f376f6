// ring_reduce._core: the CPU ring for Python. Takes addresses and numbers, and torch tensors as torch_view.h sees them.
#include "accumulate.h"
#include "bind_schedule.h"
#include "cpu_ring.h"
#include "shared_memory.h"
#include "torch_view.h"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <limits>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <system_error>
#include <unistd.h>

namespace py = pybind11;

namespace ring_reduce {
namespace {

// Owns the mappings that the ring runs on.
class BoundRing {
 public:
  BoundRing(const RingSettings& settings, const std::vector<int>& memory_fds, const std::vector<int>& process_fds)
      : process_fds_(process_fds),
        mappings_(map_all(memory_fds, settings.shape.bytes())),
        ring_(settings, bases(mappings_), process_fds_.descriptors) {}

  double run(Operation operation, ElementType type, Normalization normalization, double divisor, double count,
             std::uintptr_t input, std::uintptr_t output, std::uint64_t elements, bool interruptible) {
    const CallArguments arguments{operation,
                                  type,
                                  normalization,
                                  divisor,
                                  count,
                                  reinterpret_cast<const std::byte*>(input),
                                  reinterpret_cast<std::byte*>(output),
                                  elements};
    const Interrupt interrupt = [] {
      const py::gil_scoped_acquire gil;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    };
    const CountedCall counted(running_);  // outlives `release`, whose destructor waits for Python
    const py::gil_scoped_release release;
    return ring_.run(arguments, interruptible ? &interrupt : nullptr);
  }

  // An all_reduce of torch tensors, `out` being `x` in place. -1, and nothing done, where the core can't take them as
  // they are, or the arguments don't fit together: who looks more closely then tells why.
  double reduce_tensors(const py::object& x, const py::object& out, Normalization normalization, double divisor,
                        const py::object& counted, bool interruptible) {
    const double count = plain_count(counted);
    const std::optional<PlainTensor> input = plain_tensor(x);
    if (count < 0 || !input || !can_divide(input->type, normalization, divisor)) return -1;
    const std::optional<PlainTensor> output = out.is(x) ? input : plain_tensor(out);
    if (!output || (!out.is(x) && !same_shape_and_apart(x, *input, out, *output))) return -1;
    try {
      const double total = run(Operation::all_reduce, input->type, normalization, divisor, count,
                               reinterpret_cast<std::uintptr_t>(input->data),
                               reinterpret_cast<std::uintptr_t>(output->data), input->elements, interruptible);
      mark_written(out);
      return total;
    } catch (const RingFailure& failure) {
      if (failure.kind() != FailureKind::mismatch) mark_written(out);  // it may be half written
      throw;
    } catch (const py::error_already_set&) {
      mark_written(out);
      throw;
    }
  }

  CpuRing& ring() { return ring_; }

  // Whether a call is running, or has not come back to Python: Python must not end under it.
  bool busy() const { return running_ != 0; }

 private:
  class CountedCall {
   public:
    explicit CountedCall(std::atomic<int>& running) : running_(running) { ++running_; }
    ~CountedCall() { --running_; }

   private:
    std::atomic<int>& running_;
  };

  // 1 for None; -1 for what is not a number of Python's that ring_reduce/call.py takes for a count.
  static double plain_count(const py::object& count) {
    if (count.is_none()) return 1;
    double value = -1;
    if (PyLong_CheckExact(count.ptr())) {
      int overflow = 0;
      const long long whole = PyLong_AsLongLongAndOverflow(count.ptr(), &overflow);
      if (overflow == 0 && whole <= 1LL << 53) value = static_cast<double>(whole);
    } else if (PyFloat_CheckExact(count.ptr())) {
      value = PyFloat_AS_DOUBLE(count.ptr());
    }
    return value == 0 || (value >= std::numeric_limits<float>::min() && value <= 0x1p53) ? value : -1;
  }

  // As ring_reduce/call.py checks it, with a text.
  static bool can_divide(ElementType type, Normalization normalization, double divisor) {
    if (is_integer(type)) return normalization == Normalization::sum;
    if (type == ElementType::float64 || normalization != Normalization::divide_by) return true;
    return divisor >= std::numeric_limits<float>::min() && divisor <= std::numeric_limits<float>::max();
  }

  static std::vector<SharedMapping> map_all(const std::vector<int>& fds, std::size_t bytes) {
    std::vector<SharedMapping> mappings;
    for (const int fd : fds) mappings.emplace_back(fd, bytes);
    return mappings;
  }
  static std::vector<std::byte*> bases(const std::vector<SharedMapping>& mappings) {
    std::vector<std::byte*> pointers;
    for (const SharedMapping& mapping : mappings) pointers.push_back(mapping.base());
    return pointers;
  }

  // Copies, closed with this object, which lives while a call runs: a call polls them.
  struct OwnedDescriptors {
    explicit OwnedDescriptors(const std::vector<int>& given) {
      for (const int descriptor : given) {
        descriptors.push_back(descriptor < 0 ? -1 : fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
        if (descriptor >= 0 && descriptors.back() < 0) {
          const int error = errno;
          close_all();
          throw std::system_error(error, std::generic_category(),
                                  "keeping the descriptor of a rank's process; is the limit on open files (ulimit -n) "
                                  "reached?");
        }
      }
    }
    ~OwnedDescriptors() { close_all(); }
    void close_all() {
      for (const int descriptor : descriptors) {
        if (descriptor >= 0) ::close(descriptor);
      }
    }
    OwnedDescriptors(const OwnedDescriptors&) = delete;
    OwnedDescriptors& operator=(const OwnedDescriptors&) = delete;
    std::vector<int> descriptors;
  };

  OwnedDescriptors process_fds_;         // outlive the ring
  std::vector<SharedMapping> mappings_;  // outlive the ring
  CpuRing ring_;
  std::atomic<int> running_ = 0;
};

void check_numbers(int operation, int type, int normalization) {
  if (operation < 0 || operation > 2 || type < 0 || type >= kElementTypes || normalization < 0 || normalization > 4) {
    throw py::value_error("operation, type or normalization is out of range");
  }
}

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

void translate_failure(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const RingFailure& failure) {
    const py::object type = py::module_::import("ring_reduce.errors").attr(class_name(failure.kind()));
    py::set_error(type, py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(
                            failure.what(), static_cast<py::ssize_t>(std::strlen(failure.what())), "replace")));
  } catch (const std::system_error& failure) {
    const py::object os_error = py::module_::import("builtins").attr("OSError");
    py::set_error(os_error, py::make_tuple(failure.code().value(), failure.what()));
  }
}

void bind_machine(py::module_& module) {
  module.def("create_shared_memory", &create_shared_memory, py::arg("bytes"));
  module.def("use_torch", &use_torch, py::arg("capsule"), py::arg("increment_versions"));
  module.def("allow_tensor_type", &allow_tensor_type, py::arg("type"));
  module.def("vector_isa", [] { return passes().isa; });
  module.def("vector_bits", [] { return passes().vector_bits; });
  module.attr("WIRE_VERSION") = kWireVersion;
  module.attr("PACK_BYTES") = kPackBytes;

  module.def(
      "region_bytes",
      [](int lanes, int depth, std::size_t segment_bytes, int world, std::size_t part_bytes) {
        return RegionShape{lanes, depth, segment_bytes, world, part_bytes}.bytes();
      },
      py::kw_only(), py::arg("lanes"), py::arg("depth"), py::arg("segment_bytes"), py::arg("world"),
      py::arg("part_bytes"));
  module.def(
      "partition",
      [](std::uint64_t elements, std::size_t element_bytes, int world) {
        const Partition partition{elements, kPackBytes / element_bytes, static_cast<std::uint64_t>(world), 0};
        std::vector<std::pair<std::uint64_t, std::uint64_t>> chunks;
        for (int rank = 0; rank < world; ++rank) {
          chunks.emplace_back(partition.chunk(rank).begin, partition.chunk(rank).elements);
        }
        return chunks;
      },
      py::arg("elements"), py::arg("element_bytes"), py::arg("world"));
}

void bind_accumulator(py::module_& module) {
  module.def(
      "accumulate",
      [](const std::vector<std::uintptr_t>& sums, const std::vector<std::uintptr_t>& inputs,
         const std::vector<std::uint64_t>& elements, const std::vector<int>& types, const std::vector<bool>& fresh,
         double scale, int threads) {
        const py::gil_scoped_release release;
        accumulate({sums, inputs, elements, types}, fresh, scale, threads);
      },
      py::arg("sums"), py::arg("inputs"), py::arg("elements"), py::arg("types"), py::arg("fresh"), py::arg("scale"),
      py::arg("threads"));
  module.def(
      "divide_into",
      [](const std::vector<std::uintptr_t>& outputs, const std::vector<std::uintptr_t>& sums,
         const std::vector<std::uint64_t>& elements, const std::vector<int>& types, double divisor, int threads) {
        const py::gil_scoped_release release;
        divide_into({sums, outputs, elements, types}, divisor, threads);
      },
      py::arg("outputs"), py::arg("sums"), py::arg("elements"), py::arg("types"), py::arg("divisor"),
      py::arg("threads"));
}

void bind_trace(py::module_& module) {
  py::class_<TraceEvent>(module, "TraceEvent")
      .def_property_readonly("name", [](const TraceEvent& event) { return activity_name(event.activity); })
      .def_property_readonly("category", [](const TraceEvent& event) { return activity_category(event.activity); })
      .def_readonly("call", &TraceEvent::call)
      .def_property_readonly("step", [](const TraceEvent& event) { return event.at.step; })
      .def_property_readonly("chunk", [](const TraceEvent& event) { return event.at.chunk; })
      .def_property_readonly("segment", [](const TraceEvent& event) { return event.at.segment; })
      .def_property_readonly("bytes", [](const TraceEvent& event) { return event.at.bytes; })
      .def_readonly("peer", &TraceEvent::peer)
      .def_property_readonly("number", [](const TraceEvent& event) { return static_cast<std::int64_t>(event.number); })
      .def_readonly("start_ns", &TraceEvent::start_ns)
      .def_readonly("end_ns", &TraceEvent::end_ns);
  py::class_<LaneTrace>(module, "LaneTrace")
      .def("events", &LaneTrace::events)
      .def_property_readonly("dropped", &LaneTrace::dropped);
}

void bind_ring(py::module_& module) {
  py::class_<Stats>(module, "Stats")
      .def(py::init([](std::uint64_t calls, std::uint64_t bytes_sent, std::uint64_t bytes_received,
                       std::uint64_t header_bytes_sent, double seconds_waiting) {
             return Stats{calls, bytes_sent, bytes_received, header_bytes_sent, seconds_waiting};
           }),
           py::kw_only(), py::arg("calls"), py::arg("bytes_sent"), py::arg("bytes_received"),
           py::arg("header_bytes_sent"), py::arg("seconds_waiting"))
      .def_readonly("calls", &Stats::calls)
      .def_readonly("bytes_sent", &Stats::bytes_sent)
      .def_readonly("bytes_received", &Stats::bytes_received)
      .def_readonly("header_bytes_sent", &Stats::header_bytes_sent)
      .def_readonly("seconds_waiting", &Stats::seconds_waiting);

  py::class_<BoundRing>(module, "CpuRing")
      .def(py::init([](int rank, int world, const std::vector<int>& memory_fds, const std::vector<int>& process_fds,
                       int lanes, int depth, std::size_t segment_bytes, std::size_t part_bytes, int window,
                       double timeout_s, int spins, int yields, std::size_t stream_bytes, std::size_t one_shot_bytes,
                       bool direct) {
             const RegionShape shape{lanes, depth, segment_bytes, world, part_bytes};
             const RingSettings settings{rank,  world,  shape,        window,         timeout_s,
                                         spins, yields, stream_bytes, one_shot_bytes, direct};
             return std::make_unique<BoundRing>(settings, memory_fds, process_fds);
           }),
           py::kw_only(), py::arg("rank"), py::arg("world"), py::arg("memory_fds"), py::arg("process_fds"),
           py::arg("lanes"), py::arg("depth"), py::arg("segment_bytes"), py::arg("part_bytes"), py::arg("window"),
           py::arg("timeout_s"), py::arg("spins"), py::arg("yields"), py::arg("stream_bytes"),
           py::arg("one_shot_bytes"), py::arg("direct"))
      .def(
          "run",
          [](BoundRing& self, int operation, int type, int normalization, double divisor, double count,
             std::uintptr_t input, std::uintptr_t output, std::uint64_t elements, bool interruptible) {
            check_numbers(operation, type, normalization);
            return self.run(static_cast<Operation>(operation), static_cast<ElementType>(type),
                            static_cast<Normalization>(normalization), divisor, count, input, output, elements,
                            interruptible);
          },
          py::arg("operation"), py::arg("type"), py::arg("normalization"), py::arg("divisor"), py::arg("count"),
          py::arg("input"), py::arg("output"), py::arg("elements"), py::arg("interruptible"))
      .def(
          "reduce_tensors",
          [](BoundRing& self, const py::object& x, const py::object& out, int normalization, double divisor,
             const py::object& count, bool interruptible) {
            check_numbers(0, 0, normalization);
            return self.reduce_tensors(x, out, static_cast<Normalization>(normalization), divisor, count,
                                       interruptible);
          },
          py::arg("x"), py::arg("out"), py::arg("normalization"), py::arg("divisor"), py::arg("count"),
          py::arg("interruptible"))
      .def("abort", [](BoundRing& self, const std::string& reason) { self.ring().abort(reason); })
      .def("close", [](BoundRing& self) { self.ring().close(); })
      .def("busy", [](BoundRing& self) { return self.busy(); })
      .def("check", [](BoundRing& self) { self.ring().check(); })
      .def("stats", [](BoundRing& self) { return self.ring().stats(); })
      .def(
          "start_trace", [](BoundRing& self, std::size_t limit) { return self.ring().start_trace(limit); },
          py::arg("limit"), py::call_guard<py::gil_scoped_release>())
      .def(
          "take_trace", [](BoundRing& self) { return self.ring().take_trace(); },
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace ring_reduce

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ core of ring_reduce: a rank of a ring over shared memory, and an accumulator's passes.";
  py::register_local_exception_translator(&ring_reduce::translate_failure);
  ring_reduce::bind_machine(module);
  ring_reduce::bind_accumulator(module);
  ring_reduce::bind_trace(module);
  ring_reduce::bind_ring(module);
  ring_reduce::bind_schedule(module);
}
