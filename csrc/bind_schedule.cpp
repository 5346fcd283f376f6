// The schedule, the arithmetic and the passes of the ring for a port that is written in Python.
#include "bind_schedule.h"

#include "partition.h"
#include "passes.h"
#include "scaling.h"

#include <pybind11/stl.h>
#include <utility>

namespace py = pybind11;

namespace ring_reduce {

namespace {

// Looked up once: run_ring() calls them for every segment of every move.
class PythonPort {
 public:
  explicit PythonPort(const py::object& port)
      : wait_posted_(port.attr("wait_posted")),
        wait_taken_(port.attr("wait_taken")),
        move_(port.attr("move")),
        take_(port.attr("take")),
        post_(port.attr("post")) {}

  void wait_posted() { wait_posted_(); }
  void wait_taken() { wait_taken_(); }
  void move(std::uint64_t segment, int k, bool receives, bool sends) { move_(segment, k, receives, sends); }
  void take() { take_(); }
  void post() { post_(); }

 private:
  py::object wait_posted_, wait_taken_, move_, take_, post_;
};

void check_range(const char* what, int value, int end) {
  if (value < 0 || value >= end) {
    throw py::value_error(std::string(what) + " is " + std::to_string(value) + ", and there are 0 to " +
                          std::to_string(end - 1));
  }
}

void check_rank(int rank, int world) {
  check_range("world - 1", world - 1, 1 << 20);
  check_range("rank", rank, world);
}

Fingerprint make_fingerprint(std::uint64_t call, int operation, std::uint64_t elements, int type, int normalization,
                             double divisor) {
  check_range("operation", operation, 3);
  check_range("type", type, kElementTypes);
  check_range("normalization", normalization, 5);
  return {call,
          elements,
          divisor,
          kWireVersion,
          static_cast<Operation>(operation),
          static_cast<ElementType>(type),
          static_cast<Normalization>(normalization),
          Algorithm::ring};
}

// The bytes may come from another rank, so no number in them is used before all ranks are known to have the same.
Fingerprint fingerprint_of(const std::string& bytes) {
  Fingerprint fingerprint{};
  if (bytes.size() != sizeof fingerprint) {
    throw py::value_error("a fingerprint has " + std::to_string(sizeof fingerprint) + " bytes, not " +
                          std::to_string(bytes.size()));
  }
  std::memcpy(&fingerprint, bytes.data(), sizeof fingerprint);
  return fingerprint;
}

std::pair<int, int> moves(const Fingerprint& call, int world) {
  const MoveRange range = moves_of(call.operation, world);
  return {range.first, range.last};
}

std::pair<std::uint64_t, std::uint64_t> chunk(const Fingerprint& call, int rank, int world) {
  check_rank(rank, world);
  const Span span = partition_of(call.operation, call.elements, call.type, world).chunk(rank);
  return {span.begin, span.elements};
}

void combine(int type, std::uintptr_t out, std::uintptr_t x, std::uintptr_t y, std::size_t elements, double x_scale,
             double y_scale, double divisor) {
  check_range("type", type, kElementTypes);
  if (elements == 0) return;
  if (out == 0 || x == 0) throw py::value_error("out and x need an address");
  const py::gil_scoped_release release;
  passes().combine[static_cast<std::size_t>(type)](
      {reinterpret_cast<std::byte*>(out), reinterpret_cast<const std::byte*>(x), reinterpret_cast<const std::byte*>(y),
       elements, x_scale, y_scale, divisor});
}

void bind_fingerprint(py::module_& module) {
  py::class_<Mix>(module, "Mix")
      .def_readonly("with_received", &Mix::with_received)
      .def_readonly("with_own", &Mix::with_own)
      .def_readonly("received_scale", &Mix::received_scale)
      .def_readonly("own_scale", &Mix::own_scale)
      .def_readonly("exponent", &Mix::exponent);

  py::class_<Fingerprint>(module, "Fingerprint")
      .def(py::init(&make_fingerprint), py::kw_only(), py::arg("call"), py::arg("operation"), py::arg("elements"),
           py::arg("type"), py::arg("normalization"), py::arg("divisor"))
      .def_static("from_bytes", [](const py::bytes& bytes) { return fingerprint_of(bytes); })
      .def("to_bytes",
           [](const Fingerprint& self) { return py::bytes(reinterpret_cast<const char*>(&self), sizeof self); })
      .def("describe", [](const Fingerprint& self) { return describe(self); })
      .def("mismatch_text", &mismatch_text, py::arg("rank"), py::arg("theirs"), py::arg("their_rank"))
      .def("moves", &moves, py::arg("world"))
      .def("chunk", &chunk, py::arg("rank"), py::arg("world"))
      .def("mix", &mix_of, py::arg("k"), py::arg("receives"), py::arg("received_count"), py::arg("own_count"))
      .def(
          "divisor",
          [](const Fingerprint& self, int world, double total_count, int exponent) {
            check_range("exponent", exponent + 1023, 2047);
            return divisor_of(self, world, total_count) * power_of_two(-exponent);
          },
          py::arg("world"), py::arg("total_count"), py::arg("exponent"));
}

}  // namespace

void bind_schedule(py::module_& module) {
  bind_fingerprint(module);
  module.attr("FINGERPRINT_BYTES") = sizeof(Fingerprint);
  module.def(
      "chunk_of_move",
      [](int k, int rank, int world) {
        check_rank(rank, world);
        check_range("k", k, 2 * world - 1);
        return chunk_of_move(k, rank, world);
      },
      py::arg("k"), py::arg("rank"), py::arg("world"));
  module.def(
      "run_ring",
      [](const py::object& port, int first_move, int last_move, std::uint64_t segments, std::uint64_t window) {
        if (window < 1) throw py::value_error("a window has at least one segment");
        PythonPort bound(port);
        run_ring(bound, {first_move, last_move}, segments, window);
      },
      py::arg("port"), py::arg("first_move"), py::arg("last_move"), py::arg("segments"), py::arg("window"));
  module.def("combine", &combine, py::arg("type"), py::arg("out"), py::arg("x"), py::arg("y"), py::arg("elements"),
             py::arg("x_scale"), py::arg("y_scale"), py::arg("divisor"));
}

}  // namespace ring_reduce
