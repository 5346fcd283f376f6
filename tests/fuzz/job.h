// What the ranks of a fuzzed ring do: its sizes and one call after another, as the first of the fuzzer's bytes say.
#pragma once

#include "cpu_ring.h"

#include <algorithm>
#include <fuzzer/FuzzedDataProvider.h>

namespace ring_reduce {

struct Job {
  RingSettings settings;  // of the victim
  CallArguments arguments;
  bool traced;

  int world() const { return settings.world; }
  std::uint64_t element() const { return element_bytes(arguments.type); }
};

// A call as CpuRing plans it, on one lane.
struct PlannedCall {
  Fingerprint fingerprint;
  Partition partition;
  std::uint64_t segment_elements;
  std::uint64_t segments;

  std::uint64_t bytes_of(int chunk, std::uint64_t segment) const {
    const std::uint64_t all = partition.lane(chunk, 0, 1).elements, begin = segment * segment_elements;
    return begin >= all ? 0 : std::min(segment_elements, all - begin) * element_bytes(fingerprint.type);
  }
};

constexpr double kFuzzedTimeout_s = 0.1;

inline Job take_job(FuzzedDataProvider& bytes) {
  Job job{};
  RingSettings& s = job.settings;
  s.world = bytes.ConsumeIntegralInRange(2, 3);
  s.rank = bytes.ConsumeIntegralInRange(0, s.world - 1);
  s.shape = {bytes.ConsumeIntegralInRange(1, 2), bytes.ConsumeIntegralInRange(2, 4),
             kLineBytes * bytes.ConsumeIntegralInRange<std::size_t>(1, 2), s.world, kLineBytes};
  s.window = bytes.ConsumeIntegralInRange(1, s.shape.depth - 1);
  s.timeout_s = kFuzzedTimeout_s;
  s.stream_bytes = bytes.ConsumeBool() ? 0 : 4096;
  s.one_shot_bytes = bytes.ConsumeBool() ? 256 : 0;
  s.direct = bytes.ConsumeBool();
  CallArguments& call = job.arguments;
  call.type = static_cast<ElementType>(bytes.ConsumeIntegralInRange(0, kElementTypes - 1));
  call.operation = static_cast<Operation>(bytes.ConsumeIntegralInRange(0, 2));
  call.normalization = static_cast<Normalization>(is_integer(call.type) ? 0 : bytes.ConsumeIntegralInRange(0, 4));
  call.divisor = 1;
  call.count = 1;
  call.elements = bytes.ConsumeIntegralInRange<std::uint64_t>(0, 300);
  if (call.operation != Operation::all_reduce) call.elements -= call.elements % static_cast<std::uint64_t>(s.world);
  job.traced = bytes.ConsumeBool();
  return job;
}

inline Algorithm algorithm_of(const Job& job) {
  if (job.arguments.operation != Operation::all_reduce) return Algorithm::ring;
  const std::uint64_t bytes = job.arguments.elements * job.element(), limit = job.settings.one_shot_bytes;
  if (limit != 0 && bytes <= std::min(limit, job.settings.shape.input_bytes())) return Algorithm::one_shot;
  return job.settings.direct ? Algorithm::direct : Algorithm::ring;
}

inline PlannedCall plan(const Job& job, std::uint64_t number) {
  const CallArguments& a = job.arguments;
  PlannedCall call{};
  call.fingerprint = {number,      a.elements, a.divisor,       kWireVersion,
                      a.operation, a.type,     a.normalization, algorithm_of(job)};
  call.partition = partition_of(a.operation, a.elements, a.type, job.world());
  const bool by_segments = call.fingerprint.algorithm == Algorithm::ring;
  call.segment_elements =
      (by_segments ? job.settings.shape.segment_bytes : job.settings.shape.part_bytes) / job.element();
  const std::uint64_t all = call.partition.lane(0, 0, 1).elements;
  call.segments = std::max<std::uint64_t>(1, (all + call.segment_elements - 1) / call.segment_elements);
  return call;
}

}  // namespace ring_reduce
