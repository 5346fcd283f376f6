// The schedule of direct_schedule.h in every interleaving of 1 to 4 ranks, through rows of calls that follow each other
// as in one ring: in one shot, or with some steps. Prints what is wrong; exits with 1 then.
#include "direct_model.h"
#include "interleavings.h"
#include "region.h"

#include <cstdio>

using namespace ring_reduce;

namespace {

using Row = std::vector<DirectCall>;

std::size_t states = 0;
int failures = 0;

void expect(const DirectSetup& setup, Outcome expected) {
  const DirectProgram program = record(setup);
  const Search found = every_interleaving(DirectRanks(setup, program));
  states += found.states;
  if (found.outcome == expected) return;
  ++failures;
  const char* what = found.outcome == Outcome::deadlock ? "deadlock" : found.outcome == Outcome::right ? "right" : "";
  std::printf("wrong: %s: %s%s\n", setup.text().c_str(), what, found.fault.c_str());
}

// With one outbox an input may be overwritten while others read it: by that of the next step, which is posted a step
// ahead, or by that of the call after a single exchange. After a last step with results, all have read all inputs.
bool one_outbox_suffices(const Row& row) {
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (row[i].steps > 1 || (!row[i].gathers && i + 1 < row.size())) return false;
  }
  return true;
}

// All rows of `count` calls of at most `most_steps` steps.
std::vector<Row> rows_of(int count, std::uint64_t most_steps) {
  std::vector<Row> rows{{}};
  for (int i = 0; i < count; ++i) {
    std::vector<Row> longer;
    for (const Row& row : rows) {
      Row one_shot = row;
      one_shot.push_back({1, false});
      longer.push_back(one_shot);
      for (std::uint64_t steps = 1; steps <= most_steps; ++steps) {
        Row direct = row;
        direct.push_back({steps, true});
        longer.push_back(direct);
      }
    }
    rows = std::move(longer);
  }
  return rows;
}

void check_world(int world, int calls, std::uint64_t most_steps) {
  for (const Row& row : rows_of(calls, most_steps)) {
    if (failures > 0) return;  // one row with a fault says enough
    expect({world, row, RegionShape::kOutboxes}, Outcome::right);
    expect({world, row, 1}, world == 1 || one_outbox_suffices(row) ? Outcome::right : Outcome::fault);
  }
}

}  // namespace

int main() {
  check_world(1, 2, 2);
  check_world(2, 4, 4);
  check_world(3, 4, 3);
  check_world(4, 3, 2);
  std::printf("%zu states, %d wrong\n", states, failures);
  return failures == 0 ? 0 : 1;
}
