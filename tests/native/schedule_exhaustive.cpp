// The schedule of ring_schedule.h for every world up to 16, every window, every depth and every range of moves.
//
// run_ring() is run once for each rank with a port that only writes down what it is asked for. The ranks' lists are then
// run against each other: under schedules that favour or starve one rank, under random ones, and for small worlds under
// all that there are. Prints what is wrong; exits with 1 then.
#include "partition.h"
#include "ring_schedule.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <random>
#include <string>
#include <unordered_set>
#include <vector>

using namespace ring_reduce;

namespace {

constexpr int kLargestWorld = 16;

int failures = 0;

void report(const std::string& what) {
  if (++failures <= 20) std::printf("wrong: %s\n", what.c_str());
}

enum class Kind : std::uint8_t { wait_posted, wait_taken, move, take, post };

struct Action {
  Kind kind;
  bool receives, sends;
  int k;
  std::uint64_t segment;
};

class Recorder {
 public:
  std::vector<Action> actions;

  void wait_posted() { actions.push_back({Kind::wait_posted, false, false, 0, 0}); }
  void wait_taken() { actions.push_back({Kind::wait_taken, false, false, 0, 0}); }
  void move(std::uint64_t segment, int k, bool receives, bool sends) {
    actions.push_back({Kind::move, receives, sends, k, segment});
  }
  void take() { actions.push_back({Kind::take, false, false, 0, 0}); }
  void post() { actions.push_back({Kind::post, false, false, 0, 0}); }
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

// What each rank does.
std::vector<Program> record(const Setup& setup) {
  Recorder recorder;
  run_ring(recorder, setup.moves(), setup.segments, setup.window);
  return std::vector<Program>(static_cast<std::size_t>(setup.world), recorder.actions);
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

// The ranks between two actions. Copied by the exhaustive search.
class Ranks {
 public:
  Ranks(const Setup& setup, const std::vector<Program>& programs)
      : setup_(&setup), programs_(&programs), ranks_(static_cast<std::size_t>(setup.world)) {
    for (Rank& rank : ranks_) rank.done.resize(setup.segments * static_cast<std::uint64_t>(setup.world));
  }

  bool finished(int rank) const { return at(rank).next == program(rank).size(); }

  bool all_finished() const {
    for (int rank = 0; rank < setup_->world; ++rank) {
      if (!finished(rank)) return false;
    }
    return true;
  }

  bool can_step(int rank) const {
    if (finished(rank)) return false;
    const Rank& me = at(rank);
    switch (program(rank)[me.next].kind) {
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
    const Action& action = program(rank)[me.next++];
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
  const Program& program(int rank) const { return (*programs_)[static_cast<std::size_t>(rank)]; }
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
    if (setup_->operation == Operation::all_gather && !action.receives) parts = all_parts(setup_->world);
    if (action.k >= setup_->world - 1) finish(rank, chunk, action.segment, parts);
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

  void finish(int rank, int chunk, std::uint64_t segment, Parts parts) {
    if (parts != all_parts(setup_->world)) fail(rank, "finished a chunk without exactly one part of each rank");
    ++at(rank).done[segment * static_cast<std::uint64_t>(setup_->world) + static_cast<std::uint64_t>(chunk)];
  }

  void send(int rank, const Slot& content) {
    Slot& slot = at(right(rank)).slots[at(rank).sent % setup_->depth];
    if (at(rank).sent < at(right(rank)).posted) fail(rank, "posted a slot before it filled it");
    if (slot.in_use) fail(rank, "overwrote a slot that was not read");
    slot = content;
  }

  const Setup* setup_;
  const std::vector<Program>* programs_;
  std::vector<Rank> ranks_;
  std::string fault_;
};

using Random = std::minstd_rand;

struct Schedule {
  enum { round_robin, random, favours, starves } kind;
  int rank;  // the favoured or starved one, which goes always or only when no other can
};

// Who goes next, or -1 when nobody can.
int pick(const Schedule& schedule, const Ranks& ranks, int world, int last, Random& random) {
  if (schedule.kind == Schedule::favours && ranks.can_step(schedule.rank)) return schedule.rank;
  const int from = schedule.kind == Schedule::random ? static_cast<int>(random() % static_cast<unsigned>(world))
                                                     : (last + 1) % world;
  for (int i = 0; i < world; ++i) {
    // The starved rank's left first, then that one's left, so that the links fill up as far as they can.
    const int rank =
        schedule.kind == Schedule::starves ? (schedule.rank + 2 * world - 1 - i) % world : (from + i) % world;
    if (schedule.kind == Schedule::starves && rank == schedule.rank) continue;
    if (ranks.can_step(rank)) return rank;
  }
  return schedule.kind == Schedule::starves && ranks.can_step(schedule.rank) ? schedule.rank : -1;
}

enum class Outcome { right, deadlock, fault };

Outcome run(const Setup& setup, const std::vector<Program>& programs, const Schedule& schedule, Random& random,
            std::string& fault) {
  Ranks ranks(setup, programs);
  int last = -1;
  while (!ranks.all_finished()) {
    last = pick(schedule, ranks, setup.world, last, random);
    if (last < 0) return Outcome::deadlock;
    ranks.step(last);
    if (!ranks.fault().empty()) break;
  }
  if (ranks.fault().empty()) ranks.check_end();
  fault = ranks.fault();
  return fault.empty() ? Outcome::right : Outcome::fault;
}

std::vector<Schedule> schedules_for(int world) {
  std::vector<Schedule> schedules{{Schedule::round_robin, 0}};
  for (int i = 0; i < 4; ++i) schedules.push_back({Schedule::random, 0});
  for (int rank = 0; rank < world; ++rank) {
    schedules.push_back({Schedule::favours, rank});
    schedules.push_back({Schedule::starves, rank});
  }
  return schedules;
}

void expect(const Setup& setup, Outcome expected, Outcome outcome, const std::string& fault) {
  if (outcome == expected) return;
  const char* what = outcome == Outcome::deadlock ? "deadlock" : outcome == Outcome::right ? "no deadlock" : "";
  report(setup.text() + ": " + what + fault);
}

void check_schedules(const Setup& setup, Outcome expected = Outcome::right) {
  static Random random(1);
  const std::vector<Program> programs = record(setup);
  for (const Schedule& schedule : schedules_for(setup.world)) {
    std::string fault;
    expect(setup, expected, run(setup, programs, schedule, random, fault), fault);
  }
}

// Every interleaving of the ranks, each state once.
std::size_t check_interleavings(const Setup& setup) {
  const std::vector<Program> programs = record(setup);
  std::unordered_set<std::string> seen;
  std::vector<Ranks> open{Ranks(setup, programs)};
  while (!open.empty()) {
    const Ranks state = open.back();
    open.pop_back();
    bool stuck = true;
    for (int rank = 0; rank < setup.world; ++rank) {
      if (!state.can_step(rank)) continue;
      stuck = false;
      Ranks next = state;
      next.step(rank);
      if (!next.fault().empty()) {
        expect(setup, Outcome::right, Outcome::fault, next.fault());
        return seen.size();
      }
      if (seen.insert(next.key()).second) open.push_back(std::move(next));
    }
    if (!stuck) continue;
    Ranks end = state;
    end.check_end();
    const Outcome outcome = !state.all_finished() ? Outcome::deadlock
                            : end.fault().empty() ? Outcome::right
                                                  : Outcome::fault;
    expect(setup, Outcome::right, outcome, end.fault());
  }
  return seen.size();
}

// A middle move holds a slot of left's while it waits for one of right's. With as many segments a step as slots a link,
// every rank can come to it with all links full.
void check_deadlocks(Operation operation, int world, std::uint64_t depth) {
  for (std::uint64_t segments = 0; segments <= 7; ++segments) {
    // The window as deep as the link, then the whole tensor step by step.
    for (const std::uint64_t window : {depth, std::max(segments, depth)}) {
      const Setup setup{operation, world, segments, window, depth};
      const MoveRange moves = setup.moves();
      const std::uint64_t together = std::min(segments, window);
      const bool fills = moves.last - moves.first >= 2 ? together >= depth : moves.last > 0 && together > depth;
      check_schedules(setup, fills ? Outcome::deadlock : Outcome::right);
    }
  }
}

// The bytes that a rank pushes, summed over lanes and segments as csrc/ring.cpp cuts them, against the formula:
// 2s less the two chunks that it does not send once more.
void check_payload(int world, std::uint64_t elements, int lanes) {
  constexpr std::uint64_t kSegmentElements = 8;
  const Partition partition = partition_of(Operation::all_reduce, elements, ElementType::float32, world);
  for (int rank = 0; rank < world; ++rank) {
    std::uint64_t pushed = 0, covered = 0;
    for (int lane = 0; lane < lanes; ++lane) {
      const std::uint64_t longest = partition.lane(0, lane, lanes).elements;
      Recorder recorder;
      run_ring(recorder, all_reduce_moves(world), longest / kSegmentElements + 1, 1);
      for (const Action& action : recorder.actions) {
        if (action.kind != Kind::move) continue;
        const Span whole = partition.lane(chunk_of_move(action.k, rank, world), lane, lanes);
        const std::uint64_t begin = std::min(action.segment * kSegmentElements, whole.elements);
        const std::uint64_t length = std::min(kSegmentElements, whole.elements - begin);
        if (action.sends) pushed += length;
        if (action.k >= world - 1) covered += length;
      }
    }
    const std::uint64_t own = partition.chunk(rank).elements, next = partition.chunk((rank + 1) % world).elements;
    const std::string where = " of " + std::to_string(elements) + " elements, rank " + std::to_string(rank) + " of " +
                              std::to_string(world) + ", " + std::to_string(lanes) + " lanes";
    if (pushed != 2 * elements - own - next) report("payload" + where);
    if (covered != elements) report("elements written" + where);
  }
}

constexpr std::array kOperations{Operation::all_reduce, Operation::reduce_scatter, Operation::all_gather};

std::size_t check_world(Operation operation, int world) {
  std::size_t states = 0;
  for (std::uint64_t window = 1; window <= 3; ++window) {
    for (std::uint64_t depth = window + 1; depth <= 4; ++depth) {
      for (std::uint64_t segments = 0; segments <= 7; ++segments) {
        const Setup setup{operation, world, segments, window, depth};
        check_schedules(setup);
        const bool small = world <= 3 || (world == 4 && segments <= 2);
        if (small) states += check_interleavings(setup);
      }
    }
  }
  return states;
}

}  // namespace

int main() {
  std::size_t states = 0;
  for (const Operation operation : kOperations) {
    for (int world = 1; world <= kLargestWorld; ++world) {
      states += check_world(operation, world);
      for (std::uint64_t depth = 1; depth <= 4; ++depth) check_deadlocks(operation, world, depth);
    }
  }
  for (int world = 1; world <= kLargestWorld; ++world) {
    for (const std::uint64_t elements : {0, 1, 3, 4, 5, 63, 64, 65, 257, 1021}) {
      for (int lanes = 1; lanes <= 3; ++lanes) check_payload(world, elements, lanes);
    }
  }
  std::printf("%zu states, %d wrong\n", states, failures);
  return failures == 0 ? 0 : 1;
}
