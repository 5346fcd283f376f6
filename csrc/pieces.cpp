#include "pieces.h"

#include "lane_threads.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <system_error>

namespace ring_reduce {

namespace {

// A thread is worth its hand-over (10 us where 100,000 elements take 20) from this many pieces on.
constexpr std::uint64_t kThreadPieces = 4;

// The tensors laid end to end, each from a multiple of kCutElements on. Pieces are cut from that.
class Pieces {
 public:
  explicit Pieces(const std::vector<std::uint64_t>& sizes) : sizes_(sizes) {
    begins_.reserve(sizes.size());
    for (const std::uint64_t size : sizes) {
      begins_.push_back(end_);
      end_ += (size + kCutElements - 1) / kCutElements * kCutElements;
    }
  }

  std::uint64_t count() const { return (end_ + kPieceElements - 1) / kPieceElements; }

  void visit(std::uint64_t piece, const PieceVisit& visit) const {
    const std::uint64_t begin = piece * kPieceElements;
    const std::uint64_t end = std::min(begin + kPieceElements, end_);
    // The last tensor that begins at or before the piece; behind it come those that begin inside.
    auto tensor =
        static_cast<std::size_t>(std::upper_bound(begins_.begin(), begins_.end(), begin) - begins_.begin()) - 1;
    for (; tensor < begins_.size() && begins_[tensor] < end; ++tensor) {
      const std::uint64_t first = std::max(begin, begins_[tensor]) - begins_[tensor];
      const std::uint64_t behind = std::min(end - begins_[tensor], sizes_[tensor]);
      if (first < behind) visit(tensor, first, behind - first);
    }
  }

 private:
  const std::vector<std::uint64_t>& sizes_;
  std::vector<std::uint64_t> begins_;
  std::uint64_t end_ = 0;
};

// Threads that all passes of this process share.
struct Crew {
  std::mutex in_use;
  LaneThreads threads;
};

std::atomic<Crew*> crew_of_process = nullptr;

// A fork has the memory of the crew but none of its threads, and the lock may be held for good: it gets a crew of its own.
[[maybe_unused]] const int kForkHandler = pthread_atfork(nullptr, nullptr, [] { crew_of_process = nullptr; });

// Never freed: its threads sleep in it until the process ends.
Crew& crew() {
  Crew* found = crew_of_process;
  if (found == nullptr) {
    auto made = std::make_unique<Crew>();
    if (crew_of_process.compare_exchange_strong(found, made.get())) found = made.release();
  }
  return *found;
}

// Whether the job ran, on the crew too. Not if a pass of another thread uses it, nor if no thread can be started.
bool run_on_crew(int lanes, const std::function<void(int)>& job) {
  Crew& shared = crew();
  const std::unique_lock lock(shared.in_use, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  try {
    shared.threads.start(lanes);
  } catch (const std::system_error&) {
    return false;
  }
  shared.threads.share(lanes, job);
  return true;
}

}  // namespace

void visit_pieces(const std::vector<std::uint64_t>& sizes, int threads, const PieceVisit& visit) {
  const Pieces pieces(sizes);
  const std::uint64_t count = pieces.count();
  // Taken in turn, not dealt out: a thread that wakes late, or shares its core, takes fewer.
  std::atomic<std::uint64_t> next = 0;
  // The bits don't depend on who takes a piece, so the threads round, and flush denormals, as the caller does.
  std::fenv_t environment;
  std::fegetenv(&environment);
  const std::function<void(int)> take = [&](int lane) {
    if (lane != 0) std::fesetenv(&environment);
    for (std::uint64_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      pieces.visit(piece, visit);
    }
  };
  const int lanes =
      static_cast<int>(std::min<std::uint64_t>(count / kThreadPieces, static_cast<std::uint64_t>(threads)));
  if (lanes < 2 || !run_on_crew(lanes, take)) take(0);
}

}  // namespace ring_reduce
