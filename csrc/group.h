// What the lanes of a rank share about the others: their regions, who is alive, and how the ring failed.
#pragma once

#include "region.h"

#include <functional>
#include <mutex>
#include <vector>

namespace ring_reduce {

struct RingSettings {
  int rank;
  int world;
  RegionShape shape;
  int window;                  // segments that go through a step together; 1 to depth - 1
  double timeout_s;            // of a wait without progress
  int spins;                   // polls before a waiting thread yields its core
  int yields;                  // times it yields before it sleeps
  std::size_t stream_bytes;    // from this size of the whole tensor on, outputs go past the caches
  std::size_t one_shot_bytes;  // up to this size of the whole tensor, an all_reduce is one exchange
  bool direct;                 // beyond it, an all_reduce is direct; else it goes round the ring
};

class Group {
 public:
  // `regions` by rank; `process_fds` pidfds by rank, -1 where there is none (own rank, or an old kernel).
  Group(const RingSettings& settings, const std::vector<std::byte*>& regions, std::vector<int> process_fds);

  const RingSettings settings;

  int left() const { return left_of(settings.rank); }
  int right() const { return right_of(settings.rank); }
  const Region& region(int rank) const { return regions_[static_cast<std::size_t>(rank)]; }
  Control& control(int rank) const { return region(rank).control(); }
  Control& own_control() const { return control(settings.rank); }

  // Tells the others which call this rank begins.
  void announce(const Fingerprint& call);

  // True once any rank has failed the ring.
  bool failed() const { return own_control().failed_by.load(std::memory_order_acquire) != 0; }

  // True once `call` can't be completed. A rank that is still in the call before a failed one completes it: who is
  // ahead has done its part, and who is not does the same.
  bool failed(std::uint64_t call) const;

  // Fails the ring on every rank, from `call` on; the first cause wins. Returns that cause.
  RingFailure fail(FailureKind kind, std::uint64_t call, const std::string& text);

  // The cause. The ring has failed.
  RingFailure failure() const;

  // Fails the ring if a peer that `call` needs has ended or has closed it.
  void check_peers(std::uint64_t call);

  // Fails the ring if a peer is in a call of the same number and of another kind. Headers tell that first, unless the
  // two calls use different algorithms, so that each rank waits where the other does not write.
  void check_announced(const Fingerprint& call);

  // For the text of a time-out, the rank that holds up a wait for left (for right): the nearest one on that side that
  // has a segment to take (a free slot to fill) and does not go on. Ranks in between wait as this one does.
  int stalled_left(int lane) const;
  int stalled_right(int lane) const;

  // "; rank 3 is not in call 8 (it has completed 7)" for each rank that is late, or ""
  std::string late_ranks(std::uint64_t call) const;

 private:
  void wake(int rank) const;
  int left_of(int rank) const { return (rank + settings.world - 1) % settings.world; }
  int right_of(int rank) const { return (rank + 1) % settings.world; }
  // Segments that wait in the slots of `rank`. Read while others write: good for a text, not for a decision.
  std::uint64_t waiting_at(int rank, int lane) const;

  std::vector<Region> regions_;
  std::vector<int> process_fds_;
  std::mutex failing_;
};

}  // namespace ring_reduce
