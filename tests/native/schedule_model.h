// The ranks of a ring between two actions of any of them: what run_ring() asks of each, and a memory that notices every
// slot read too early, written too early or left unread, and every chunk that lacks a rank's part or has it twice.
#pragma once

#include "call.h"

#include <array>
#include <string>
#include <vector>

namespace ring_reduce {

enum class Kind : std::uint8_t { wait_posted, wait_taken, move, take, post };

struct Action {
  Kind kind;
  bool receives = false, sends = false, handshake = false;
  int k = 0;
  std::uint64_t segment = 0;
};

class Recorder {
 public:
  std::vector<Action> actions;
  bool handshake = false;  // no payload, so no output

  void wait_posted() { actions.push_back({Kind::wait_posted}); }
  void wait_taken() { actions.push_back({Kind::wait_taken}); }
  void move(std::uint64_t segment, int k, bool receives, bool sends) {
    actions.push_back({Kind::move, receives, sends, handshake, k, segment});
  }
  void take() { actions.push_back({Kind::take}); }
  void post() { actions.push_back({Kind::post}); }
};

struct Setup {
  Operation operation;
  int world;
  std::uint64_t segments, window, depth;

  MoveRange moves() const {
    switch (operation) {
      case Operation::all_reduce: return all_reduce_moves(world);
      case Operation::reduce_scatter: return reduce_scatter_moves(world);
      case Operation::all_gather: return all_gather_moves(world);
    }
    return {0, 0};
  }

  std::string text() const {
    const std::array<const char*, 3> names{"all_reduce", "reduce_scatter", "all_gather"};
    return std::string(names[static_cast<std::size_t>(operation)]) + ", world " + std::to_string(world) + ", " +
           std::to_string(segments) + " segments, window " + std::to_string(window) + ", depth " +
           std::to_string(depth);
  }
};

using Program = std::vector<Action>;

// What each rank does, the same for all since run_ring() does not know its rank. As CpuRing, with the counters going on
// from the handshake of an all_gather to its data.
Program record(const Setup& setup) {
  Recorder recorder;
  recorder.handshake = setup.operation == Operation::all_gather;
  if (recorder.handshake) run_ring(recorder, reduce_scatter_moves(setup.world), 1, setup.window);
  recorder.handshake = false;
  run_ring(recorder, setup.moves(), setup.segments, setup.window);
  return recorder.actions;
}

// How often each rank's part is in a chunk: 4 bits a rank, enough to see a part that entered twice.
using Parts = std::uint64_t;

Parts part_of(int rank) { return Parts{1} << (4 * rank); }

Parts all_parts(int world) {
  Parts parts = 0;
  for (int rank = 0; rank < world; ++rank) parts += part_of(rank);
  return parts;
}

struct Slot {
  bool in_use = false;  // from the write to the take
  std::uint64_t segment = 0;
  int chunk = 0;
  Parts parts = 0;
};

struct Rank {
  std::size_t next = 0;  // action
  // Each counter stands at who waits for it: posted of the link from left, taken of the link to right.
  std::uint64_t posted = 0, taken = 0;
  std::uint64_t received = 0, sent = 0;
  std::array<Slot, 4> slots{};     // from left
  std::vector<std::uint8_t> done;  // segment * world + chunk: times that the finished chunk was written
};

// The ranks between two actions. For every_interleaving().
class Ranks {
 public:
  Ranks(const Setup& setup, const Program& program)
      : setup_(&setup), program_(&program), ranks_(static_cast<std::size_t>(setup.world)) {
    for (Rank& rank : ranks_) rank.done.resize(setup.segments * static_cast<std::uint64_t>(setup.world));
  }

  int world() const { return setup_->world; }

  bool finished(int rank) const { return at(rank).next == program_->size(); }

  bool all_finished() const {
    for (int rank = 0; rank < setup_->world; ++rank) {
      if (!finished(rank)) return false;
    }
    return true;
  }

  bool can_step(int rank) const {
    if (finished(rank)) return false;
    const Rank& me = at(rank);
    switch ((*program_)[me.next].kind) {
      case Kind::wait_posted: return me.posted > me.received;
      case Kind::wait_taken: return me.sent < me.taken + setup_->depth;
      case Kind::move:
      case Kind::take:
      case Kind::post: return true;
    }
    return false;
  }

  void step(int rank) {
    Rank& me = at(rank);
    const Action& action = (*program_)[me.next++];
    switch (action.kind) {
      case Kind::wait_posted:
      case Kind::wait_taken: break;
      case Kind::move: move(rank, action); break;
      case Kind::take:
        me.slots[me.received % setup_->depth].in_use = false;
        at(left(rank)).taken = ++me.received;
        break;
      case Kind::post: at(right(rank)).posted = ++me.sent; break;
    }
  }

  // What went wrong first, or "".
  const std::string& fault() const { return fault_; }

  // At the end: every rank has exactly what the operation promises, and no slot holds anything.
  void check_end() {
    for (int rank = 0; rank < setup_->world; ++rank) {
      for (std::uint64_t i = 0; i < at(rank).done.size(); ++i) {
        const int chunk = static_cast<int>(i % static_cast<std::uint64_t>(setup_->world));
        const bool wanted = setup_->operation != Operation::reduce_scatter || chunk == rank;
        if (at(rank).done[i] != (wanted ? 1 : 0)) fail(rank, "has a finished chunk too many or too few");
      }
      for (const Slot& slot : at(rank).slots) {
        if (slot.in_use) fail(rank, "left a slot unread");
      }
    }
  }

  // Programs have no choices, so where the ranks are in them is the whole state.
  std::string key() const {
    std::string key;
    for (const Rank& rank : ranks_) {
      key += static_cast<char>(rank.next % 256);
      key += static_cast<char>(rank.next / 256);
    }
    return key;
  }

 private:
  Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  const Rank& at(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  int left(int rank) const { return (rank + setup_->world - 1) % setup_->world; }
  int right(int rank) const { return (rank + 1) % setup_->world; }

  void fail(int rank, const std::string& what) {
    if (fault_.empty()) fault_ = "rank " + std::to_string(rank) + " " + what;
  }

  void move(int rank, const Action& action) {
    const int chunk = chunk_of_move(action.k, rank, setup_->world);
    Parts parts = 0;
    if (action.receives) parts = receive(rank, chunk, action.segment);
    if (action.k <= setup_->world - 1) parts += part_of(rank);
    // An all_gather starts with chunks that are finished.
    if (setup_->operation == Operation::all_gather && !action.receives && !action.handshake)
      parts = all_parts(setup_->world);
    if (action.k >= setup_->world - 1) finish(rank, chunk, action, parts);
    if (action.sends) send(rank, {true, action.segment, chunk, parts});
  }

  Parts receive(int rank, int chunk, std::uint64_t segment) {
    const Rank& me = at(rank);
    const Slot& slot = me.slots[me.received % setup_->depth];
    if (me.received >= me.posted) fail(rank, "read a slot that was not posted");
    if (!slot.in_use) fail(rank, "read a slot that it had given back");
    if (slot.segment != segment || slot.chunk != chunk) fail(rank, "received another chunk than it works on");
    return slot.parts;
  }

  void finish(int rank, int chunk, const Action& action, Parts parts) {
    if (parts != all_parts(setup_->world)) fail(rank, "finished a chunk without exactly one part of each rank");
    if (action.handshake) return;
    ++at(rank).done[action.segment * static_cast<std::uint64_t>(setup_->world) + static_cast<std::uint64_t>(chunk)];
  }

  void send(int rank, const Slot& content) {
    Slot& slot = at(right(rank)).slots[at(rank).sent % setup_->depth];
    if (at(rank).sent < at(right(rank)).posted) fail(rank, "posted a slot before it filled it");
    if (slot.in_use) fail(rank, "overwrote a slot that was not read");
    slot = content;
  }

  const Setup* setup_;
  const Program* program_;
  std::vector<Rank> ranks_;
  std::string fault_;
};

}  // namespace ring_reduce
