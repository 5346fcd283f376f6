// Every interleaving of the ranks of a model, each state once.
#pragma once

#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace ring_reduce {

enum class Outcome { right, deadlock, fault };

struct Search {
  std::size_t states;
  Outcome outcome;    // the first that is not right
  std::string fault;  // what went wrong, if it was no deadlock
};

// `Ranks` are the ranks between two actions of any of them, and copied. They provide
//   world()                     rank numbers are below it
//   can_step(rank), step(rank)  one action of a rank
//   all_finished()
//   check_end()                 what has to hold then; it can be a fault
//   fault()                     what went wrong first, or ""
//   key()                       the whole state
template <class Ranks>
Search every_interleaving(const Ranks& start) {
  std::unordered_set<std::string> seen;
  std::vector<Ranks> open{start};
  while (!open.empty()) {
    const Ranks state = std::move(open.back());
    open.pop_back();
    bool stuck = true;
    for (int rank = 0; rank < state.world(); ++rank) {
      if (!state.can_step(rank)) continue;
      stuck = false;
      Ranks next = state;
      next.step(rank);
      if (!next.fault().empty()) return {seen.size(), Outcome::fault, next.fault()};
      if (seen.insert(next.key()).second) open.push_back(std::move(next));
    }
    if (!stuck) continue;
    if (!state.all_finished()) return {seen.size(), Outcome::deadlock, ""};
    Ranks end = state;
    end.check_end();
    if (!end.fault().empty()) return {seen.size(), Outcome::fault, end.fault()};
  }
  return {seen.size(), Outcome::right, ""};
}

}  // namespace ring_reduce
