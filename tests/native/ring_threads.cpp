// The CPU ring with threads for ranks, over plain memory: what ThreadSanitizer, AddressSanitizer and
// UndefinedBehaviorSanitizer can watch. Prints what is wrong; exits with 1 then.
#include "cpu_ring.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

using namespace ring_reduce;

namespace {

std::atomic<int> failures = 0;

void expect(bool right, const std::string& what) {
  if (!right && ++failures < 20) std::printf("wrong: %s\n", what.c_str());
}

struct AlignedDelete {
  void operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t{4096}); }
};

// A world of ranks in this process.
class World {
 public:
  explicit World(const RingSettings& settings) : settings_(settings) {
    const std::size_t bytes = settings.shape.bytes();
    for (int rank = 0; rank < settings.world; ++rank) {
      memory_.emplace_back(new (std::align_val_t{4096}) std::byte[bytes]);
      std::memset(memory_.back().get(), 0, bytes);
      regions_.push_back(memory_.back().get());
    }
  }

  const std::vector<std::byte*>& regions() const { return regions_; }
  std::vector<int> process_fds() const { return std::vector<int>(regions_.size(), -1); }

  // Runs function(settings) on a thread for each rank.
  void run_ranks(const std::function<void(const RingSettings&)>& function) const {
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < settings_.world; ++rank) {
      ranks.emplace_back([this, &function, rank] {
        RingSettings settings = settings_;
        settings.rank = rank;
        try {
          function(settings);
        } catch (const std::exception& error) {
          // Ends it all: the other threads may wait for this one.
          std::printf("wrong: rank %d threw: %s\n", rank, error.what());
          std::fflush(stdout);
          std::_Exit(1);
        }
      });
    }
    for (std::thread& rank : ranks) rank.join();
  }

  // Runs function(ring, rank) on a thread for each rank.
  void run(const std::function<void(CpuRing&, int)>& function) const {
    run_ranks([&](const RingSettings& settings) {
      CpuRing ring(settings, regions_, process_fds());
      function(ring, settings.rank);
    });
  }

 private:
  RingSettings settings_;
  std::vector<std::unique_ptr<std::byte[], AlignedDelete>> memory_;
  std::vector<std::byte*> regions_;
};

struct Job {
  ElementType type;
  Operation operation;
  Normalization normalization;
  std::uint64_t elements;  // of the whole tensor
  bool in_place = false;
  double divisor = 1.0;  // of divide_by
};

double run(CpuRing& ring, const Job& job, double count, const void* input, void* output) {
  return ring.run({job.operation, job.type, job.normalization, job.divisor, count, static_cast<const std::byte*>(input),
                   static_cast<std::byte*>(output), job.elements},
                  nullptr);
}

// Multiples of 12, so that all sums and quotients here are exact in every type, the scaled wire included: any divisor
// is one of 1, 2, 3, 4, 6 and 8, and eight bits of mantissa hold multiples of 4 up to 1024.
int element(int rank, std::uint64_t i, int call) { return 12 * static_cast<int>((i + 3 * rank + call) % 5); }

// The totals of 1 to 4 ranks are 1, 3, 4, 6 and, where rank 0 counts nothing, 0, 2, 3, 4.
double count_of(int rank, int call) {
  constexpr std::array<std::array<double, 4>, 2> kCounts{{{1, 2, 1, 2}, {0, 2, 1, 1}}};
  return kCounts[static_cast<std::size_t>(call % 2)][static_cast<std::size_t>(rank)];
}

double total_of(int world, int call) {
  double total = 0;
  for (int rank = 0; rank < world; ++rank) total += count_of(rank, call);
  return total;
}

// Element `at` of the whole result.
double expected(const Job& job, int world, std::uint64_t at, int call) {
  if (job.operation == Operation::all_gather) {
    return element(static_cast<int>(at / (job.elements / static_cast<std::uint64_t>(world))), at, call);
  }
  const bool counted = uses_count(job.normalization);
  double sum = 0;
  for (int rank = 0; rank < world; ++rank) {
    const double count = counted ? count_of(rank, call) : 1.0;
    if (count != 0) sum += element(rank, at, call) * (job.normalization == Normalization::weighted_mean ? count : 1.0);
  }
  const double total = total_of(world, call);
  switch (job.normalization) {
    case Normalization::sum: return sum;
    case Normalization::mean: return sum / world;
    case Normalization::divide_by: return sum / job.divisor;
    case Normalization::divide_by_count:
    case Normalization::weighted_mean: return total == 0 ? 0 : sum / total;
  }
  return sum;
}

// As the type stores a value that it holds exactly; the 16-bit floats as bits.
template <class T>
T stored(ElementType type, double value) {
  if (type == ElementType::bfloat16) {
    return static_cast<T>(std::bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16);
  }
  if (type == ElementType::float16) {
    if (value == 0) return T{0};
    const int exponent = std::ilogb(value);
    return static_cast<T>(((exponent + 15) << 10) | (static_cast<int>(std::ldexp(value, 10 - exponent)) & 1023));
  }
  return static_cast<T>(value);
}

template <class T>
void check_job(CpuRing& ring, int rank, int world, const Job& job, int call) {
  const bool scatters = job.operation == Operation::reduce_scatter, gathers = job.operation == Operation::all_gather;
  const std::uint64_t part = job.elements / static_cast<std::uint64_t>(world);
  const std::uint64_t own = part * static_cast<std::uint64_t>(rank);
  std::vector<T> input(gathers ? part : job.elements), output(scatters ? part : job.elements);
  for (std::uint64_t i = 0; i < input.size(); ++i) {
    input[i] = stored<T>(job.type, element(rank, gathers ? own + i : i, call));
  }
  const std::vector<T> before = input;
  if (!output.empty()) std::memset(output.data(), 0x5a, output.size() * sizeof(T));
  std::vector<T>& result = job.in_place ? input : output;

  const double total = run(ring, job, count_of(rank, call), input.data(), result.data());

  const std::string where = std::string(element_name(job.type)) + ", operation " +
                            std::to_string(static_cast<int>(job.operation)) + ", normalization " +
                            std::to_string(static_cast<int>(job.normalization)) + ", " + std::to_string(job.elements) +
                            " elements, rank " + std::to_string(rank) + " of " + std::to_string(world);
  expect(total == (uses_count(job.normalization) ? total_of(world, call) : 0.0), "total count: " + where);
  expect(job.in_place || input == before, "the input changed: " + where);
  for (std::uint64_t i = 0; i < result.size(); ++i) {
    if (result[i] == stored<T>(job.type, expected(job, world, scatters ? own + i : i, call))) continue;
    return expect(false, "element " + std::to_string(i) + ": " + where);
  }
}

void check_any(CpuRing& ring, int rank, int world, const Job& job, int call) {
  switch (job.type) {
    case ElementType::float64: return check_job<double>(ring, rank, world, job, call);
    case ElementType::float32: return check_job<float>(ring, rank, world, job, call);
    case ElementType::float16:
    case ElementType::bfloat16: return check_job<std::uint16_t>(ring, rank, world, job, call);
    case ElementType::int32: return check_job<std::int32_t>(ring, rank, world, job, call);
    case ElementType::int64: return check_job<std::int64_t>(ring, rank, world, job, call);
  }
}

// All that a ring of `world` can be asked to do, in a row; the ranks meet nowhere else.
std::vector<Job> all_jobs(int world) {
  const auto n = static_cast<std::uint64_t>(world);
  std::vector<Job> jobs;
  for (int number = 0; number < kElementTypes; ++number) {
    const auto type = static_cast<ElementType>(number);
    for (const std::uint64_t elements : {std::uint64_t{0}, std::uint64_t{1}, n - 1, n, n + 1, 97 * n, 601 * n + 7}) {
      for (int kind = 0; kind <= (is_integer(type) ? 0 : 4); ++kind) {
        const auto normalization = static_cast<Normalization>(kind);
        const double divisor = normalization == Normalization::divide_by ? 8.0 : 1.0;
        for (const bool in_place : {false, true}) {
          jobs.push_back({type, Operation::all_reduce, normalization, elements, in_place, divisor});
        }
        const std::uint64_t equal = elements / n * n;
        jobs.push_back({type, Operation::reduce_scatter, normalization, equal, false, divisor});
      }
      jobs.push_back({type, Operation::all_gather, Normalization::sum, elements / n * n});
    }
  }
  return jobs;
}

void check_results(const RingSettings& settings) {
  const std::vector<Job> jobs = all_jobs(settings.world);
  World(settings).run([&](CpuRing& ring, int rank) {
    int call = 0;
    for (const Job& job : jobs) {
      ++call;
      check_any(ring, rank, settings.world, job, call + call / 3);  // in place or not, with either of the counts
    }
    expect(ring.stats().calls == jobs.size(), "calls counted");
  });
}

// One shot and several direct steps by turns, with nothing between them that ranks could meet in.
void check_turns(const RingSettings& settings) {
  const auto n = static_cast<std::uint64_t>(settings.world);
  World(settings).run([&](CpuRing& ring, int rank) {
    for (int call = 1; call <= 40; ++call) {
      const std::uint64_t elements = call % 2 == 0 ? 601 * n + 7 : 97 * n;
      const Job job{ElementType::float32, Operation::all_reduce, Normalization::sum, elements, call % 3 == 0};
      check_job<float>(ring, rank, settings.world, job, call);
    }
  });
}

// Enough for `lanes` lanes (see kLaneBytes in cpu_ring.cpp), and a few elements that fill no pack.
std::uint64_t elements_for_lanes(int world, int lanes) {
  return static_cast<std::uint64_t>(world) * static_cast<std::uint64_t>(lanes) * (256 * 1024 / sizeof(float)) + 7;
}

// Threads for lanes, called on and left out in turn, while another thread asks for the statistics.
void check_lanes(const RingSettings& settings) {
  const int world = settings.world;
  const std::uint64_t elements = elements_for_lanes(world, settings.shape.lanes);
  World(settings).run([&](CpuRing& ring, int rank) {
    std::atomic<bool> ended = false;
    std::thread reader([&] {
      while (!ended) {
        expect(ring.stats().calls <= 4, "calls counted");
        std::this_thread::yield();
      }
    });
    for (int call = 1; call <= 4; ++call) {
      const Job job{ElementType::float32, Operation::all_reduce, Normalization::divide_by_count,
                    call == 3 ? 5 : elements, call % 2 == 0};
      check_job<float>(ring, rank, world, job, call);
    }
    ended = true;
    reader.join();
    const std::uint64_t sent = 4 * (3 * elements + 5) * 2, kept = sent / static_cast<std::uint64_t>(world);
    const std::uint64_t bytes = ring.stats().bytes_sent;
    expect(bytes + kept < sent + 200 && bytes + kept + 200 > sent, "bytes sent: " + std::to_string(bytes));
  });
}

// What a rank's call throws, or nothing.
std::string thrown(const std::function<void()>& call, FailureKind kind) {
  try {
    call();
  } catch (const RingFailure& failure) {
    expect(failure.kind() == kind, std::string("kind of failure: ") + failure.what());
    return failure.what();
  }
  return "nothing";
}

void expect_one_text(const std::vector<std::string>& texts, const std::string& part) {
  for (const std::string& text : texts) {
    expect(text == texts[0], "texts differ: " + text + " / " + texts[0]);
    expect(text.find(part) != std::string::npos, "text without '" + part + "': " + text);
  }
}

constexpr Job kReduce{ElementType::float32, Operation::all_reduce, Normalization::sum, 600};

// Rank 1 makes another call than the others: every rank throws one text, then and ever after, and no tensor changes.
void check_mismatch(const RingSettings& settings, const Job& job, const Job& other, const std::string& part) {
  const std::size_t bytes = 8 * (std::max(job.elements, other.elements) + 1);
  std::vector<std::string> texts(static_cast<std::size_t>(settings.world));
  World(settings).run([&](CpuRing& ring, int rank) {
    check_job<float>(ring, rank, settings.world, kReduce, 1);
    const std::vector<std::uint8_t> input(bytes, 1), untouched(bytes, 0x5a);
    std::vector<std::uint8_t> output = untouched;
    const Job& mine = rank == 1 ? other : job;
    const auto call = [&] { run(ring, mine, 1, mine.in_place ? output.data() : input.data(), output.data()); };
    std::string& text = texts[static_cast<std::size_t>(rank)];
    text = thrown(call, FailureKind::mismatch);
    expect(output == untouched, "a tensor changed in a call that failed: " + part);
    expect(thrown(call, FailureKind::mismatch) == text, "a call after a failed one");
  });
  expect_one_text(texts, part);
}

void check_mismatches(const RingSettings& settings) {
  constexpr auto kFloat = ElementType::float32;
  constexpr auto kAll = Operation::all_reduce, kGather = Operation::all_gather, kScatter = Operation::reduce_scatter;
  constexpr auto kSum = Normalization::sum, kDivide = Normalization::divide_by, kMean = Normalization::weighted_mean;
  check_mismatch(settings, kReduce, {kFloat, kAll, kSum, 601}, "element count is ");
  check_mismatch(settings, kReduce, {ElementType::int32, kAll, kSum, 600}, "dtype is ");
  check_mismatch(settings, kReduce, {kFloat, kAll, kMean, 600}, "normalization is ");
  check_mismatch(settings, {kFloat, kAll, kDivide, 600, true, 8}, {kFloat, kAll, kDivide, 600, true, 4}, "divisor is ");
  check_mismatch(settings, {kFloat, kGather, kSum, 600}, {kFloat, kScatter, kSum, 600}, "operation is ");
  check_mismatch(settings, {kFloat, kGather, kSum, 600}, {kFloat, kGather, kSum, 900},
                 "element count of all ranks together is ");
}

// Rank 0 makes no call; the others end, at once by abort() or close(), or by the time-out.
void check_absent(RingSettings settings, FailureKind kind, const std::string& part) {
  settings.timeout_s = kind == FailureKind::timeout ? 0.2 : 60;
  std::vector<std::string> texts(static_cast<std::size_t>(settings.world) - 1);
  std::atomic<int> ended = 0;
  World(settings).run([&](CpuRing& ring, int rank) {
    if (rank == 0) {
      if (kind == FailureKind::closed) ring.close();
      while (ended < settings.world - 1) std::this_thread::yield();
      return;
    }
    // From a thread of a rank that waits, most likely; where it has not come so far, the text is the same.
    std::atomic<bool> calling = false;
    std::thread aborter([&] {
      while (!calling) std::this_thread::yield();
      for (int i = 0; i < 1000; ++i) std::this_thread::yield();
      if (kind == FailureKind::aborted && rank == 1) ring.abort("by the test");
    });
    std::vector<float> x(kReduce.elements, 2.0f);
    calling = true;
    texts[static_cast<std::size_t>(rank) - 1] = thrown([&] { run(ring, kReduce, 1, x.data(), x.data()); }, kind);
    ++ended;
    aborter.join();
  });
  expect_one_text(texts, part);
}

// The futex compares the low 32 bits only, and they wrap: a sleeper and a writer, then a ring.
constexpr std::uint64_t kBeforeWrap = (std::uint64_t{1} << 32) - 3;

void check_counter_wrap() {
  SharedCounter counter{};
  const std::uint64_t end = kBeforeWrap + 6;
  counter.value.store(kBeforeWrap);
  int plain = 0;
  std::thread writer([&] {
    for (std::uint64_t value = kBeforeWrap + 1; value <= end; ++value) {
      while (counter.sleepers.load() == 0) std::this_thread::yield();  // so that each publish wakes the other thread
      plain = static_cast<int>(value - kBeforeWrap);
      publish(counter, value);
    }
  });
  while (observed(counter) < end) sleep_until(counter, end);
  expect(plain == 6, "a wait across the wrap of the low 32 bits");
  writer.join();
}

Job other_size(Job job, std::uint64_t elements) {
  job.elements = elements;
  return job;
}

// kReduce in place, on one lane. CpuRing starts its counters at 0, so what follows drives the ports themselves.
Call call_of(std::vector<float>& x, const RingSettings& settings, Algorithm algorithm) {
  auto* data = reinterpret_cast<std::byte*>(x.data());
  const bool by_segments = algorithm == Algorithm::ring;
  Call call{};
  call.fingerprint = {1,        x.size(), 1.0, kWireVersion, kReduce.operation, kReduce.type, kReduce.normalization,
                      algorithm};
  call.input = data;
  call.output = data;
  call.count = 1;
  call.partition = partition_of(kReduce.operation, x.size(), kReduce.type, settings.world);
  call.lanes = 1;
  call.segment_elements = (by_segments ? settings.shape.segment_bytes : settings.shape.part_bytes) / sizeof(float);
  call.segments = (call.partition.longest() + call.segment_elements - 1) / call.segment_elements;
  return call;
}

void check_ring_wrap(const RingSettings& given) {
  const World world(given);
  for (std::byte* base : world.regions()) {
    Region(base, given.shape).posted(0).value.store(kBeforeWrap);
    Region(base, given.shape).taken(0).value.store(kBeforeWrap);
  }
  world.run_ranks([&](const RingSettings& settings) {
    Group group(settings, world.regions(), world.process_fds());
    std::vector<float> x(kReduce.elements, static_cast<float>(1 << settings.rank));
    const Call call = call_of(x, settings, Algorithm::ring);
    LaneState state{.sent = kBeforeWrap, .received = kBeforeWrap};
    Wait wait(group, call.fingerprint, nullptr);
    LanePort port(group, call, 0, state, wait);
    run_ring(port, all_reduce_moves(settings.world), call.segments, static_cast<std::uint64_t>(settings.window));
    expect(state.sent >> 32 == 1 && state.received >> 32 == 1, "counters that wrap");
    const auto sum = static_cast<float>((1 << settings.world) - 1);
    for (const float value : x) expect(value == sum, "a ring across the wrap of the low 32 bits");
  });
}

// Lanes, depth and bytes a segment, then the window.
RingSettings settings_of(int world, int lanes, int depth, std::size_t segment_bytes, int window, int spins,
                         int yields) {
  const RegionShape shape{lanes, depth, segment_bytes, world, kLineBytes};
  return {0, world, shape, window, 60.0, spins, yields, /*stream_bytes=*/4096, /*one_shot_bytes=*/0, /*direct=*/false};
}

// The same with direct all-reduces, up to a size of one shot.
RingSettings direct_settings_of(int world, int lanes, std::size_t part_bytes, std::size_t one_shot_bytes, int spins,
                                int yields) {
  RingSettings settings = settings_of(world, lanes, 2, kLineBytes, 1, spins, yields);
  settings.shape.part_bytes = part_bytes;
  settings.one_shot_bytes = one_shot_bytes;
  settings.direct = true;
  return settings;
}

void check_ring() {
  check_ring_wrap(settings_of(3, 1, 2, 128, 1, 0, 0));
  check_ring_wrap(settings_of(2, 1, 5, 256, 3, 50, 3));
  check_results(settings_of(1, 1, 2, 128, 1, 0, 0));
  check_results(settings_of(2, 1, 2, 128, 1, 0, 0));
  check_results(settings_of(3, 3, 4, 256, 3, 50, 20));
  check_results(settings_of(4, 2, 3, 512, 2, 0, 3));
  check_lanes(settings_of(3, 2, 4, 65536, 2, 0, 3));
  check_lanes(settings_of(2, 3, 2, 32768, 1, 50, 0));
}

void check_direct() {
  check_results(direct_settings_of(2, 1, 128, 0, 0, 0));
  check_results(direct_settings_of(3, 3, 256, 0, 50, 20));
  check_results(direct_settings_of(4, 2, 512, 1600, 0, 3));  // one shot and direct in turn
  check_turns(direct_settings_of(3, 1, 512, 1300, 0, 3));
  check_lanes(direct_settings_of(3, 2, 65536, 0, 0, 3));
}

// The futex compares the low 32 bits of the counters, and the outboxes alternate across the wrap.
void check_direct_wrap(const RingSettings& given) {
  const World world(given);
  for (std::byte* base : world.regions()) {
    Region(base, given.shape).inputs(0).value.store(kBeforeWrap);
    Region(base, given.shape).results(0).value.store(kBeforeWrap);
  }
  world.run_ranks([&](const RingSettings& settings) {
    Group group(settings, world.regions(), world.process_fds());
    std::vector<float> x(kReduce.elements, static_cast<float>(1 << settings.rank));
    Call call = call_of(x, settings, Algorithm::direct);
    LaneState state{.inputs = kBeforeWrap, .results = kBeforeWrap};
    Wait wait(group, call.fingerprint, nullptr);
    DirectPort port(group, call, 0, state, wait);
    run_direct(port, call.segments, /*gathers=*/true);
    expect(state.inputs >> 32 == 1 && state.results >> 32 == 1, "outboxes that wrap");
    const auto sum = static_cast<float>((1 << settings.world) - 1);
    for (const float value : x) expect(value == sum, "a direct all-reduce across the wrap of the low 32 bits");
  });
}

}  // namespace

int main() {
  // With no spins and no yields a wait sleeps at once.
  check_counter_wrap();
  check_ring();
  check_direct();
  check_direct_wrap(direct_settings_of(3, 1, 128, 0, 0, 0));
  const RingSettings three = settings_of(3, 1, 4, 256, 2, 10, 20), direct = direct_settings_of(3, 1, 1024, 0, 10, 20);
  check_mismatches(three);
  check_mismatches(direct);
  // The larger tensor is not reduced in one shot, so that the ranks wait for what the others never write.
  check_mismatch(direct_settings_of(3, 1, 1024, 2400, 10, 20), kReduce, other_size(kReduce, 601), "element count is ");
  Job large = kReduce;
  large.elements = elements_for_lanes(3, 2);
  const Job longer = other_size(large, large.elements + 1);
  check_mismatch(settings_of(3, 2, 4, 65536, 2, 0, 0), large, longer, std::to_string(longer.elements));
  for (const RingSettings& settings : {three, direct}) {
    check_absent(settings, FailureKind::aborted, "by the test");
    check_absent(settings, FailureKind::closed, "rank 0 closed the ring");
    check_absent(settings, FailureKind::timeout, "rank 0 has not made call 1");
  }
  std::printf("%d wrong\n", failures.load());
  return failures == 0 ? 0 : 1;
}
