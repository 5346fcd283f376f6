// The ranks of direct all-reduces between two actions of any of them: what run_direct() asks of each in a row of calls,
// and outboxes that notice what is read before it is published, and what is overwritten before all others have read it.
#pragma once

#include "direct_schedule.h"

#include <array>
#include <string>
#include <vector>

namespace ring_reduce {

struct DirectCall {
  std::uint64_t steps;
  bool gathers;  // else in one shot, of one step
};

struct DirectSetup {
  int world;
  std::vector<DirectCall> calls;
  std::size_t outboxes;  // of inputs, and of results; at most 2

  std::string text() const {
    std::string text = "direct, world " + std::to_string(world) + ", " + std::to_string(outboxes) + " outboxes";
    for (const DirectCall& call : calls) {
      text += call.gathers ? ", " + std::to_string(call.steps) + " steps" : ", one shot";
    }
    return text;
  }
};

enum class DirectKind : std::uint8_t {
  write_input,
  publish_input,
  wait_inputs,
  read_inputs,
  write_result,
  publish_result,
  wait_results,
  read_results,
};

struct DirectAction {
  DirectKind kind;
  std::uint64_t number;  // of the input or result: counters go on from call to call
};

using DirectProgram = std::vector<DirectAction>;

// Writes down what run_direct() asks of a port. That a rank waits for the others in turn, and reads them in turn, is
// one action here: counters only grow, and what it reads it reads at the latest when it goes on.
class DirectRecorder {
 public:
  DirectProgram actions;

  void run(const DirectCall& call) {
    gathers_ = call.gathers;
    run_direct(*this, call.steps, call.gathers);
    first_input_ += call.steps;
    if (call.gathers) first_result_ += call.steps;
  }

  void post_inputs(std::uint64_t step) {
    add(DirectKind::write_input, first_input_ + step);
    add(DirectKind::publish_input, first_input_ + step);
  }
  void wait_inputs(std::uint64_t step) { add(DirectKind::wait_inputs, first_input_ + step); }
  void reduce(std::uint64_t step) {
    add(DirectKind::read_inputs, first_input_ + step);
    if (!gathers_) return;
    add(DirectKind::write_result, first_result_ + step);
    add(DirectKind::publish_result, first_result_ + step);
  }
  void wait_results(std::uint64_t step) { add(DirectKind::wait_results, first_result_ + step); }
  void gather(std::uint64_t step) { add(DirectKind::read_results, first_result_ + step); }

 private:
  void add(DirectKind kind, std::uint64_t number) { actions.push_back({kind, number}); }

  bool gathers_ = false;
  std::uint64_t first_input_ = 0, first_result_ = 0;
};

// The same for all ranks, since run_direct() does not know its rank.
inline DirectProgram record(const DirectSetup& setup) {
  DirectRecorder recorder;
  for (const DirectCall& call : setup.calls) recorder.run(call);
  return recorder.actions;
}

// Of the inputs of a rank, or of its results.
struct Outboxes {
  struct Box {
    std::uint64_t number = 0;  // of what lies in it
    unsigned unread = 0;       // a bit for each rank that has yet to read it
  };
  std::array<Box, 2> boxes{};
  std::uint64_t published = 0;
  std::uint64_t read = 0;  // of each other rank, by this one
};

// For every_interleaving().
class DirectRanks {
 public:
  DirectRanks(const DirectSetup& setup, const DirectProgram& program)
      : setup_(&setup), program_(&program), ranks_(static_cast<std::size_t>(setup.world)) {}

  int world() const { return setup_->world; }

  bool all_finished() const {
    for (const Rank& rank : ranks_) {
      if (rank.next != program_->size()) return false;
    }
    return true;
  }

  bool can_step(int rank) const {
    const Rank& me = ranks_[static_cast<std::size_t>(rank)];
    if (me.next == program_->size()) return false;
    const DirectAction& action = (*program_)[me.next];
    switch (action.kind) {
      case DirectKind::wait_inputs: return others_published(rank, &Rank::inputs, action.number);
      case DirectKind::wait_results: return others_published(rank, &Rank::results, action.number);
      case DirectKind::write_input:
      case DirectKind::publish_input:
      case DirectKind::read_inputs:
      case DirectKind::write_result:
      case DirectKind::publish_result:
      case DirectKind::read_results: return true;
    }
    return false;
  }

  void step(int rank) {
    Rank& me = ranks_[static_cast<std::size_t>(rank)];
    const DirectAction& action = (*program_)[me.next++];
    switch (action.kind) {
      case DirectKind::wait_inputs:
      case DirectKind::wait_results: break;
      case DirectKind::write_input: write(rank, me.inputs, action.number, "an input"); break;
      case DirectKind::write_result: write(rank, me.results, action.number, "a result"); break;
      case DirectKind::publish_input: ++me.inputs.published; break;
      case DirectKind::publish_result: ++me.results.published; break;
      case DirectKind::read_inputs: read(rank, &Rank::inputs, action.number, "an input"); break;
      case DirectKind::read_results: read(rank, &Rank::results, action.number, "a result"); break;
    }
  }

  // What went wrong first, or "".
  const std::string& fault() const { return fault_; }

  // At the end: every rank has read all that there was, each once and in order.
  void check_end() {
    std::uint64_t inputs = 0, results = 0;
    for (const DirectCall& call : setup_->calls) {
      inputs += call.steps;
      if (call.gathers) results += call.steps;
    }
    for (int rank = 0; rank < world(); ++rank) {
      const Rank& me = ranks_[static_cast<std::size_t>(rank)];
      if (me.inputs.read != inputs) fail(rank, "reduced too much or too little");
      if (me.results.read != results) fail(rank, "gathered too much or too little");
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
  struct Rank {
    std::size_t next = 0;  // action
    Outboxes inputs, results;
  };

  void fail(int rank, const std::string& what) {
    if (fault_.empty()) fault_ = "rank " + std::to_string(rank) + " " + what;
  }

  bool others_published(int rank, Outboxes Rank::* kind, std::uint64_t number) const {
    for (int other = 0; other < world(); ++other) {
      if (other != rank && (ranks_[static_cast<std::size_t>(other)].*kind).published <= number) return false;
    }
    return true;
  }

  void write(int rank, Outboxes& mine, std::uint64_t number, const std::string& what) {
    Outboxes::Box& box = mine.boxes[number % setup_->outboxes];
    if (box.unread != 0) fail(rank, "overwrote " + what + " that was not read");
    box = {number, ((1u << world()) - 1) & ~(1u << rank)};
  }

  void read(int rank, Outboxes Rank::* kind, std::uint64_t number, const std::string& what) {
    for (int other = 0; other < world(); ++other) {
      if (other == rank) continue;
      Outboxes& theirs = ranks_[static_cast<std::size_t>(other)].*kind;
      Outboxes::Box& box = theirs.boxes[number % setup_->outboxes];
      if (theirs.published <= number) fail(rank, "read " + what + " that was not published");
      if (box.number != number) fail(rank, "read " + what + " that it did not wait for");
      box.unread &= ~(1u << rank);
    }
    if ((ranks_[static_cast<std::size_t>(rank)].*kind).read++ != number) fail(rank, "left out " + what);
  }

  const DirectSetup* setup_;
  const DirectProgram* program_;
  std::vector<Rank> ranks_;
  std::string fault_;
};

}  // namespace ring_reduce
