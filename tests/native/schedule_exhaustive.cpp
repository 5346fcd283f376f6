// The schedule of ring_schedule.h for every world up to 16, every window, every depth and every range of moves.
//
// run_ring() is run once with a port that only writes down what it is asked for. The ranks then go through that list
// against each other: under schedules that favour or starve one rank, under random ones, and for small worlds under
// all that there are. Prints what is wrong; exits with 1 then.
#include "interleavings.h"
#include "schedule_model.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>

using namespace ring_reduce;

namespace {

constexpr int kLargestWorld = 16;

int failures = 0;

void report(const std::string& what) {
  std::printf("wrong: %s\n", what.c_str());
  if (++failures == 20) std::exit(1);
}

using Random = std::minstd_rand;

struct Schedule {
  enum { round_robin, reverse, random, favours, starves } kind;
  int rank;  // the favoured or starved one, which goes always or only when no other can
};

// Who goes next, or -1 when nobody can.
int pick(const Schedule& schedule, const Ranks& ranks, int world, int last, Random& random) {
  if (schedule.kind == Schedule::favours && ranks.can_step(schedule.rank)) return schedule.rank;
  const int from = schedule.kind == Schedule::random ? static_cast<int>(random() % static_cast<unsigned>(world))
                                                     : (last + 1) % world;
  for (int i = 0; i < world; ++i) {
    // The starved rank's left first, then that one's left, so that the links fill up as far as they can.
    int rank = (from + i) % world;
    if (schedule.kind == Schedule::reverse) rank = (last + 2 * world - 1 - i) % world;
    if (schedule.kind == Schedule::starves) rank = (schedule.rank + 2 * world - 1 - i) % world;
    if (schedule.kind == Schedule::starves && rank == schedule.rank) continue;
    if (ranks.can_step(rank)) return rank;
  }
  return schedule.kind == Schedule::starves && ranks.can_step(schedule.rank) ? schedule.rank : -1;
}

Outcome run(const Setup& setup, const Program& program, const Schedule& schedule, Random& random, std::string& fault) {
  Ranks ranks(setup, program);
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
  std::vector<Schedule> schedules{{Schedule::round_robin, 0}, {Schedule::reverse, 0}};
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
  const Program program = record(setup);
  for (const Schedule& schedule : schedules_for(setup.world)) {
    std::string fault;
    expect(setup, expected, run(setup, program, schedule, random, fault), fault);
  }
}

std::size_t check_interleavings(const Setup& setup) {
  const Program program = record(setup);
  const Search search = every_interleaving(Ranks(setup, program));
  expect(setup, Outcome::right, search.outcome, search.fault);
  return search.states;
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
      const bool handshake_fills = operation == Operation::all_gather && world >= 3 && depth == 1;
      const bool fills =
          handshake_fills ||
          (moves.last - moves.first >= 2 ? together >= depth : moves.last > moves.first && together > depth);
      check_schedules(setup, fills ? Outcome::deadlock : Outcome::right);
    }
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
  // One world with a fault says enough; the rest would only take its time.
  for (int world = 1; world <= kLargestWorld && failures == 0; ++world) {
    for (const Operation operation : kOperations) {
      states += check_world(operation, world);
      for (std::uint64_t depth = 1; depth <= 4; ++depth) check_deadlocks(operation, world, depth);
    }
  }
  std::printf("%zu states, %d wrong\n", states, failures);
  return failures == 0 ? 0 : 1;
}
