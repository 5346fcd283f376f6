// The CPU ring with threads for ranks, over plain memory: what ThreadSanitizer, AddressSanitizer and
// UndefinedBehaviorSanitizer can watch. Prints what is wrong; exits with 1 then.
#include "cpu_ring.h"

#include <cmath>
#include <cstdio>
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
  explicit World(RingSettings settings) : settings_(settings) {
    const std::size_t bytes = settings.shape.bytes();
    for (int rank = 0; rank < settings.world; ++rank) {
      memory_.emplace_back(new (std::align_val_t{4096}) std::byte[bytes]);
      std::memset(memory_.back().get(), 0, bytes);
    }
  }

  // Runs function(ring, rank) on a thread for each rank.
  void run(const std::function<void(CpuRing&, int)>& function) {
    std::vector<std::byte*> regions;
    for (const auto& memory : memory_) regions.push_back(memory.get());
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < settings_.world; ++rank) {
      ranks.emplace_back([this, &function, regions, rank] {
        RingSettings settings = settings_;
        settings.rank = rank;
        CpuRing ring(settings, regions, std::vector<int>(regions.size(), -1));
        try {
          function(ring, rank);
        } catch (const RingFailure& failure) {
          expect(false, failure.what());
        }
      });
    }
    for (std::thread& rank : ranks) rank.join();
  }

 private:
  RingSettings settings_;
  std::vector<std::unique_ptr<std::byte[], AlignedDelete>> memory_;
};

// Small integers, which every type holds exactly: an element of a rank's input.
int element(int rank, std::uint64_t i, int call) { return static_cast<int>((i + 3 * rank + call) % 5); }

// As the type stores a small integer; the 16-bit floats as bits.
template <class T>
T stored(ElementType type, int value) {
  if (type == ElementType::bfloat16) {
    return static_cast<T>(std::bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16);
  }
  if (type == ElementType::float16) {
    if (value == 0) return T{0};
    const int exponent = std::ilogb(value);
    return static_cast<T>(((exponent + 15) << 10) | ((value << (10 - exponent)) & 1023));
  }
  return static_cast<T>(value);
}

struct Job {
  ElementType type;
  Operation operation;
  Normalization normalization;
  std::uint64_t elements;  // of the whole tensor
  bool in_place;
};

template <class T>
void check_job(CpuRing& ring, int rank, int world, const Job& job, int call) {
  const bool scatters = job.operation == Operation::reduce_scatter, gathers = job.operation == Operation::all_gather;
  const std::uint64_t part = job.elements / static_cast<std::uint64_t>(world),
                      own = part * static_cast<std::uint64_t>(rank);
  std::vector<T> input(gathers ? part : job.elements), output(scatters ? part : job.elements, T(0x5a));
  for (std::uint64_t i = 0; i < input.size(); ++i) {
    input[i] = stored<T>(job.type, element(rank, gathers ? own + i : i, call));
  }
  T* out = output.data();
  if (job.in_place && job.operation == Operation::all_reduce) out = input.data();
  const bool weighted = job.normalization == Normalization::weighted_mean;
  const double total =
      ring.run({job.operation, job.type, job.normalization, 1.0, weighted ? 2.0 : 1.0,
                reinterpret_cast<const std::byte*>(input.data()), reinterpret_cast<std::byte*>(out), job.elements},
               nullptr);
  expect(total == (weighted ? 2.0 * world : 0.0), "total count");
  for (std::uint64_t i = 0; i < output.size(); ++i) {
    const std::uint64_t at = scatters ? own + i : i;
    int sum = 0;
    for (int from = 0; from < world; ++from) sum += element(from, at, call);
    if (gathers) sum = element(static_cast<int>(at / part), at, call);
    // A weighted mean with equal counts is exact here where the world is a power of two and divides the sum.
    if (weighted) sum = sum % world == 0 ? sum / world : -1;
    if (sum < 0 || out[i] == stored<T>(job.type, sum)) continue;
    expect(false, std::string(element_name(job.type)) + " element " + std::to_string(i) + " of " +
                      std::to_string(job.elements) + " on rank " + std::to_string(rank));
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

void check_results(const RingSettings& settings) {
  const int world = settings.world;
  World(settings).run([world](CpuRing& ring, int rank) {
    int call = 0;
    for (int type = 0; type < kElementTypes; ++type) {
      const auto element_type = static_cast<ElementType>(type);
      for (const std::uint64_t elements : {0, 1, world - 1, world, world + 1, 97, 1024 * world + 7}) {
        for (const bool in_place : {false, true}) {
          check_any(ring, rank, world, {element_type, Operation::all_reduce, Normalization::sum, elements, in_place},
                    ++call);
        }
        if (!is_integer(element_type)) {
          check_any(ring, rank, world,
                    {element_type, Operation::all_reduce, Normalization::weighted_mean, elements, true}, ++call);
        }
        const std::uint64_t equal = elements * static_cast<std::uint64_t>(world);
        check_any(ring, rank, world, {element_type, Operation::reduce_scatter, Normalization::sum, equal, false},
                  ++call);
        check_any(ring, rank, world, {element_type, Operation::all_gather, Normalization::sum, equal, false}, ++call);
      }
    }
  });
}

// Enough for two lanes (see kLaneBytes in cpu_ring.cpp), and a few elements that fill no pack.
std::uint64_t elements_for_lanes(int world) { return static_cast<std::uint64_t>(world) * (512 * 1024 / 4) + 7; }

// Threads for lanes, called on and left out in turn, while another thread asks for the statistics.
void check_lanes(const RingSettings& settings) {
  const int world = settings.world;
  const std::uint64_t elements = elements_for_lanes(world);
  World(settings).run([&](CpuRing& ring, int rank) {
    std::atomic<bool> ended = false;
    std::thread reader([&] {
      while (!ended) {
        expect(ring.stats().calls <= 4, "calls counted");
        std::this_thread::yield();
      }
    });
    for (int call = 1; call <= 4; ++call) {
      const Job job{ElementType::float32, Operation::all_reduce, Normalization::sum, call == 3 ? 5 : elements,
                    call % 2 == 0};
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

void reduce(CpuRing& ring, std::vector<float>& x) {
  auto* data = reinterpret_cast<std::byte*>(x.data());
  ring.run({Operation::all_reduce, ElementType::float32, Normalization::sum, 1.0, 1.0, data, data, x.size()}, nullptr);
}

void expect_one_text(const std::vector<std::string>& texts, const std::string& part) {
  for (const std::string& text : texts) {
    expect(text == texts[0], "texts differ: " + text + " / " + texts[0]);
    expect(text.find(part) != std::string::npos, "text without '" + part + "': " + text);
  }
}

// Every rank throws one text, and no tensor changes.
void check_mismatch(RingSettings settings, std::uint64_t elements) {
  std::vector<std::string> texts(static_cast<std::size_t>(settings.world));
  World(settings).run([&](CpuRing& ring, int rank) {
    std::vector<float> x(elements, 2.0f), longer(elements + (rank == 1 ? 1 : 0), 3.0f);
    reduce(ring, x);
    texts[static_cast<std::size_t>(rank)] = thrown([&] { reduce(ring, longer); }, FailureKind::mismatch);
    for (const float value : longer) expect(value == 3.0f, "a tensor changed in a call that failed");
    expect(x.back() == 2.0f * static_cast<float>(settings.world), "the call before a failed one");
  });
  expect_one_text(texts, std::to_string(elements + 1));
}

// Rank 0 makes no call; the others end, at once by abort() or close(), or by the time-out.
void check_absent(RingSettings settings, FailureKind kind, const std::string& part) {
  settings.timeout_s = kind == FailureKind::timeout ? 0.3 : 60;
  std::vector<std::string> texts(static_cast<std::size_t>(settings.world) - 1);
  std::atomic<int> ended = 0;
  World(settings).run([&](CpuRing& ring, int rank) {
    if (rank == 0) {
      if (kind == FailureKind::aborted) std::thread([&] { ring.abort("by the test"); }).join();
      if (kind == FailureKind::closed) ring.close();
      while (ended < settings.world - 1) std::this_thread::yield();
      return;
    }
    std::vector<float> x(500, 2.0f);
    texts[static_cast<std::size_t>(rank) - 1] = thrown([&] { reduce(ring, x); }, kind);
    ++ended;
  });
  expect_one_text(texts, part);
}

// The futex compares the low 32 bits only, and they wrap.
void check_wrap() {
  SharedCounter counter{};
  const std::uint64_t start = (std::uint64_t{1} << 32) - 3, end = start + 6;
  counter.value.store(start);
  int plain = 0;
  std::thread writer([&] {
    for (std::uint64_t value = start + 1; value <= end; ++value) {
      std::this_thread::yield();
      plain = static_cast<int>(value - start);
      publish(counter, value);
      while (counter.sleepers.load() != 0) std::this_thread::yield();
    }
  });
  while (observed(counter) < end) sleep_until(counter, end);
  expect(plain == 6, "a wait across the wrap of the low 32 bits");
  writer.join();
}

RingSettings settings_of(int world, int lanes, int depth, int window, std::size_t segment_bytes, int spins,
                         int yields) {
  return {0, world, {lanes, depth, segment_bytes}, window, 60.0, spins, yields, /*stream_bytes=*/4096};
}

}  // namespace

int main() {
  check_wrap();
  check_results(settings_of(1, 1, 2, 1, 128, 0, 0));
  check_results(settings_of(2, 1, 2, 1, 128, 0, 0));  // sleeps at once
  check_results(settings_of(3, 1, 4, 3, 256, 50, 20));
  check_results(settings_of(4, 2, 3, 2, 512, 0, 3));
  const RingSettings three = settings_of(3, 1, 4, 2, 256, 10, 20);
  check_lanes(settings_of(3, 2, 4, 2, 65536, 0, 3));
  check_mismatch(three, 500);
  check_mismatch(settings_of(3, 2, 4, 2, 65536, 10, 20), elements_for_lanes(3));
  check_absent(three, FailureKind::aborted, "by the test");
  check_absent(three, FailureKind::closed, "rank 0 closed the ring");
  check_absent(three, FailureKind::timeout, "rank 0 has not made call 1");
  std::printf("%d wrong\n", failures.load());
  return failures == 0 ? 0 : 1;
}
