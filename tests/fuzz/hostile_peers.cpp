// A rank against peers that write what they like into the memory that it shares, and when they like: for libFuzzer.
// Its calls have to end by the deadline, with a result or a RingFailure, and touch no memory but their own.
//
// Time is made up here: it passes when somebody looks at the clock, or sleeps. So a deadline takes no time.
#include "attack.h"

#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <linux/futex.h>
#include <memory>
#include <new>
#include <sanitizer/asan_interface.h>
#include <sys/syscall.h>

using namespace ring_reduce;

namespace {

constexpr std::chrono::milliseconds kLook{1}, kSleep{10};
constexpr std::chrono::milliseconds kSlack{50};  // of a wait beyond its deadline

std::chrono::steady_clock::time_point now, hang;
Attack* attack = nullptr;                                   // while the rank runs
const void *shared_begin = nullptr, *shared_end = nullptr;  // what is shared lies between

[[noreturn]] void fail(const char* what, const char* detail = "") {
  std::fprintf(stderr, "wrong: %s%s\n", what, detail);
  std::abort();
}

// The rank is at a moment when others may write. What they do has no such moments, so `attack` is null meanwhile.
void wait() {
  Attack* const playing = attack;
  if (playing == nullptr) return;
  attack = nullptr;
  ::now += kSleep;
  playing->at_wait();
  attack = playing;
}

// Calls nothing before: a load there would come back here.
__attribute__((no_sanitize("coverage"))) void load(const void* address) {
  Attack* const playing = attack;
  if (playing == nullptr || address < shared_begin || address >= shared_end) return;
  attack = nullptr;
  if (playing->shares(address)) playing->at_load();
  attack = playing;
}

}  // namespace

// Of libstdc++, which the core asks for the time.
std::chrono::steady_clock::time_point std::chrono::steady_clock::now() noexcept {
  ::now += kLook;
  if (attack != nullptr && ::now > hang) fail("a call hangs past its deadline");
  return ::now;
}

// All system calls of the core; the linker puts these in their place.
extern "C" long __real_syscall(long number, ...);
extern "C" long __wrap_syscall(long number, ...) {
  va_list arguments;
  va_start(arguments, number);
  std::array<long, 6> a{};
  for (long& argument : a) argument = va_arg(arguments, long);
  va_end(arguments);
  if (number != SYS_futex) return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  if (a[1] == FUTEX_WAIT) wait();
  return 0;
}

// Called before each load of the core.
extern "C" {
#define RING_REDUCE_LOAD(bytes, type) \
  __attribute__((no_sanitize("coverage"))) void __sanitizer_cov_load##bytes(type* at) { load(at); }
RING_REDUCE_LOAD(1, std::uint8_t)
RING_REDUCE_LOAD(2, std::uint16_t)
RING_REDUCE_LOAD(4, std::uint32_t)
RING_REDUCE_LOAD(8, std::uint64_t)
RING_REDUCE_LOAD(16, unsigned __int128)
#undef RING_REDUCE_LOAD
}

const Passes& ring_reduce::passes() { return baseline_passes(); }

namespace {

// The regions of all ranks. What nothing is kept in must not be touched.
class Memory {
 public:
  explicit Memory(const RegionShape& shape) {
    for (int rank = 0; rank < shape.world; ++rank) {
      memory_.emplace_back(new (std::align_val_t{4096}) std::byte[shape.bytes()]);
      std::byte* base = memory_.back().get();
      std::memset(base, 0, shape.bytes());
      regions.push_back(base);
      shared_begin = rank == 0 ? base : std::min<const void*>(shared_begin, base);
      shared_end = rank == 0 ? base + shape.bytes() : std::max<const void*>(shared_end, base + shape.bytes());
      ASAN_POISON_MEMORY_REGION(base + sizeof(Control), RegionShape::kControlBytes - sizeof(Control));
      for (int lane = 0; lane < shape.lanes; ++lane) forbid_rests(Region(base, shape), lane, shape.depth);
    }
  }

  std::vector<std::byte*> regions;

 private:
  struct AlignedDelete {
    void operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t{4096}); }
  };

  static void forbid_rests(const Region& region, int lane, int depth) {
    const auto forbid = [](std::byte* slot) {
      ASAN_POISON_MEMORY_REGION(slot + sizeof(SegmentHeader), kLineBytes - sizeof(SegmentHeader));
    };
    for (int i = 0; i < depth; ++i) forbid(region.slot(lane, static_cast<std::uint64_t>(i)));
    for (std::uint64_t i = 0; i < RegionShape::kOutboxes; ++i) forbid(region.input(lane, i));
  }

  std::vector<std::unique_ptr<std::byte, AlignedDelete>> memory_;
};

// What `function` throws: a RingFailure that Python has a class for, or nothing.
bool fails(const std::function<void()>& function) {
  try {
    function();
    return false;
  } catch (const RingFailure& failure) {
    const auto kind = static_cast<std::uint32_t>(failure.kind());
    if (kind < 1 || kind > 5) fail("a failure of no kind: ", failure.what());
    if (std::string(failure.what()).size() > sizeof(Control::failure_text)) fail("a failure with too long a text");
  } catch (const std::exception& error) {
    fail("an error that is no RingFailure: ", error.what());
  }
  return true;
}

class Victim {
 public:
  Victim(const Job& job, const std::vector<std::byte*>& regions)
      : job_(job), ring_(job.settings, regions, std::vector<int>(regions.size(), -1)) {
    const std::uint64_t all = job.arguments.elements * job.element(),
                        part = all / static_cast<std::uint64_t>(job.world());
    input_.resize(job.arguments.operation == Operation::all_gather ? part : all, std::byte{1});
    output_.resize(job.arguments.operation == Operation::reduce_scatter ? part : all);
    if (job.traced) ring_.start_trace(64);
  }

  // False where it fails.
  bool call(Attack& by, std::uint64_t number) {
    by.begin(plan(job_, number));
    CallArguments arguments = job_.arguments;
    arguments.input = input_.data();
    arguments.output = output_.data();
    double total = 0;
    hang = now + by.waits() * (std::chrono::milliseconds{static_cast<int>(kFuzzedTimeout_s * 1000)} + kSlack) + kSlack;
    attack = &by;
    const bool failed = fails([&] { total = ring_.run(arguments, nullptr); });
    attack = nullptr;
    if (failed && by.honest_and_prompt()) fail("a call of honest ranks failed");
    if (!failed && by.only_damaged()) fail("a damaged header was taken for a good one");
    if (!(total >= 0 && std::isfinite(total))) fail("a total count that no ranks have");
    return !failed;
  }

  void leave(Attack& by) {
    attack = &by;
    fails([&] { ring_.abort("the end"); });
    fails([&] { ring_.check(); });
    ring_.close();
    attack = nullptr;
  }

 private:
  const Job& job_;
  CpuRing ring_;
  std::vector<std::byte> input_, output_;
};

constexpr std::uint64_t kCalls = 3;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider bytes(data, size);
  const Job job = take_job(bytes);
  const Memory memory(job.settings.shape);
  Attack by(job, memory.regions, bytes);
  Victim victim(job, memory.regions);
  for (std::uint64_t number = 1; number <= kCalls; ++number) {
    if (!victim.call(by, number) || !by.end()) break;
  }
  victim.leave(by);
  return 0;
}
