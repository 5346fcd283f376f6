// The real lines of ring_schedule.h and flag.h under the Relacy race detector: ranks are its threads, slots are plain
// variables that it watches for races, and loads may return every value that the C++ memory model allows.
// Prints the history that fails; exits with 1 then. Usage: relacy_ring [random schedules]
// With FIRST_ALONE defined, only the first ring is compiled: enough for a fault, and a third of the compiler's time.
#include "flag.h"
#include "ring_schedule.h"

#include <cstdio>
#include <string>

// Last: it redefines new, delete and the names of memory orders.
#include <relacy/relacy.hpp>

namespace {

using namespace ring_reduce;

rl::memory_order relacy_order(std::memory_order order) {
  switch (order) {
    case std::memory_order::relaxed: return rl::mo_relaxed;
    case std::memory_order::consume: return rl::mo_consume;
    case std::memory_order::acquire: return rl::mo_acquire;
    case std::memory_order::release: return rl::mo_release;
    case std::memory_order::acq_rel: return rl::mo_acq_rel;
    case std::memory_order::seq_cst: return rl::mo_seq_cst;
  }
  return rl::mo_seq_cst;
}

template <class T>
class Atomic {
 public:
  T load(std::memory_order order) const { return value_.load(relacy_order(order), $); }
  void store(T value, std::memory_order order) { value_.store(value, relacy_order(order), $); }
  T exchange(T value, std::memory_order order) { return value_.exchange(value, relacy_order(order), $); }
  T fetch_add(T value, std::memory_order order) { return value_.fetch_add(value, relacy_order(order), $); }
  T fetch_sub(T value, std::memory_order order) { return value_.fetch_sub(value, relacy_order(order), $); }

 private:
  rl::atomic<T> value_;
};

// A word and the kernel's queue of those who sleep on it.
class FutexWord : public Atomic<std::uint64_t> {
 public:
  // Without spurious wake-ups and without the time limit of the real one: a lost wake-up is a deadlock.
  FutexWord() { woken_.init(false, $); }
  ~FutexWord() { woken_.deinit($); }

  void wait(std::uint64_t seen) {
    queue_.lock($);
    // The kernel has a full barrier here, between the caller's stores and its own look at the word.
    rl::atomic_thread_fence(rl::mo_seq_cst, $);
    if (static_cast<std::uint32_t>(load(std::memory_order::relaxed)) == static_cast<std::uint32_t>(seen)) {
      woken_.wait(queue_, false, $);
    }
    queue_.unlock($);
  }

  void wake() {
    queue_.lock($);
    woken_.notify_all($);
    queue_.unlock($);
  }

 private:
  struct Tag;
  rl::mutex queue_;
  rl::condvar<Tag> woken_;
};

struct Platform {
  using U64 = FutexWord;
  using U32 = Atomic<std::uint32_t>;
  static void futex_wait(U64& word, std::uint64_t seen) { word.wait(seen); }
  static void futex_wake(U64& word) { word.wake(); }
};

// The futex compares the low 32 bits only; here they wrap in the first call.
constexpr std::uint64_t kStart = (std::uint64_t{1} << 32) - 2;

// What a slot carries: which segment of which chunk, and a bit for each rank whose part is in it.
struct Payload {
  unsigned segment;
  unsigned chunk;
  unsigned ranks;
  unsigned encoded() const { return (segment << 16) | (chunk << 8) | ranks; }
};

template <int kDepth>
struct Region {
  Counter<Platform> posted, taken;
  rl::var<unsigned> slots[kDepth];
};

// As LanePort of csrc/ring.cpp, over the model's memory.
template <int kWorld, int kDepth>
class Port {
 public:
  Port(Region<kDepth>* regions, int rank)
      : own_(regions[rank]),
        left_(regions[(rank + kWorld - 1) % kWorld]),
        right_(regions[(rank + 1) % kWorld]),
        rank_(rank) {}

  void wait_posted() { wait(own_.posted, received_ + 1); }
  void wait_taken() { wait(own_.taken, sent_ + 1 - kDepth); }
  void take() { publish(left_.taken, ++received_); }
  void post() { publish(right_.posted, ++sent_); }

  void move(std::uint64_t segment, int k, bool receives, bool sends) {
    constexpr unsigned kAll = (1u << kWorld) - 1;
    Payload payload{static_cast<unsigned>(segment), static_cast<unsigned>(chunk_of_move(k, rank_, kWorld)), 0};
    if (receives) {
      const unsigned got = own_.slots[received_ % kDepth]($).load();
      payload.ranks = got & kAll;
      RL_ASSERT(got == payload.encoded());
    }
    const unsigned mine = 1u << rank_;
    RL_ASSERT((payload.ranks & mine) == (k < kWorld ? 0 : mine));
    payload.ranks |= mine;
    if (k >= kWorld - 1) RL_ASSERT(payload.ranks == kAll);
    if (sends) right_.slots[sent_ % kDepth]($) = payload.encoded();
  }

 private:
  static void wait(Counter<Platform>& counter, std::uint64_t target) {
    while (observed(counter) < target) sleep_until(counter, target);
  }

  Region<kDepth>& own_;
  Region<kDepth>& left_;
  Region<kDepth>& right_;
  int rank_;
  std::uint64_t sent_ = kStart, received_ = kStart;
};

template <int kWorld, int kDepth, int kWindow, int kSegments, bool kGathers>
struct Ring : rl::test_suite<Ring<kWorld, kDepth, kWindow, kSegments, kGathers>, kWorld> {
  Region<kDepth> regions[kWorld];

  void before() {
    for (Region<kDepth>& region : regions) {
      for (Counter<Platform>* counter : {&region.posted, &region.taken}) {
        counter->value.store(kStart, std::memory_order::relaxed);
        counter->sleepers.store(0, std::memory_order::relaxed);
      }
    }
  }

  void thread(unsigned rank) {
    Port<kWorld, kDepth> port(regions, static_cast<int>(rank));
    run_ring(port, kGathers ? all_reduce_moves(kWorld) : reduce_scatter_moves(kWorld), kSegments, kWindow);
  }
};

rl::test_params quiet(rl::scheduler_type_e search) {
  static std::ostream nowhere(nullptr);
  rl::test_params params;
  params.search_type = search;
  params.progress_stream = &nowhere;
  return params;
}

template <class Test>
bool random_schedules(unsigned count) {
  rl::test_params params = quiet(rl::random_scheduler_type);
  params.iteration_count = count;
  return rl::simulate<Test>(params);
}

template <class Test>
bool every_schedule() {
  rl::test_params params = quiet(rl::fair_full_search_scheduler_type);
  return rl::simulate<Test>(params);
}

// Every schedule with at most `switches` changes of thread where the running one could have gone on.
template <class Test>
bool every_schedule(unsigned switches) {
  rl::test_params params = quiet(rl::fair_context_bound_scheduler_type);
  params.context_bound = switches;
  return rl::simulate<Test>(params);
}

}  // namespace

int main(int count, char** arguments) {
  const unsigned schedules = count > 1 ? static_cast<unsigned>(std::stoul(arguments[1])) : 200'000;
  bool right = random_schedules<Ring<3, 2, 1, 2, true>>(schedules);
#ifndef FIRST_ALONE
  right = right && random_schedules<Ring<3, 3, 2, 3, true>>(schedules / 4);
  right = right && random_schedules<Ring<3, 2, 1, 4, false>>(schedules / 4);
  right = right && every_schedule<Ring<2, 2, 1, 1, false>>();
  right = right && every_schedule<Ring<2, 2, 1, 1, true>>(4);
  right = right && every_schedule<Ring<2, 2, 1, 2, true>>(3);
#endif
  std::printf("%s\n", right ? "right" : "wrong");
  return right ? 0 : 1;
}
