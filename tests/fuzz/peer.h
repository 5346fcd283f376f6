// A rank that the fuzzer plays: it waits, posts and takes as the schedule says, but its headers may be damaged.
#pragma once

#include "direct_model.h"
#include "job.h"
#include "schedule_model.h"

#include <cstring>

namespace ring_reduce {

constexpr std::size_t kHeaderWords = sizeof(SegmentHeader) / sizeof(std::uint64_t);
constexpr std::size_t kCountWord = offsetof(SegmentHeader, partial_count) / sizeof(std::uint64_t);

// A word of a header, and the bits of it that flip.
struct Damage {
  std::size_t word = 0;
  std::uint64_t bits = 0;
};

class Peer {
 public:
  Peer(const Job& job, const std::vector<std::byte*>& regions, int rank)
      : job_(job), group_(of_rank(job.settings, rank), regions, std::vector<int>(regions.size(), -1)) {}

  void begin(const PlannedCall& call) {
    call_ = call;
    next_ = 0;
    ring_.clear();
    direct_.actions.clear();
    if (call.fingerprint.algorithm == Algorithm::ring) {
      ring_ = record({call.fingerprint.operation, job_.world(), call.segments,
                      static_cast<std::uint64_t>(job_.settings.window), 0});
    } else {
      direct_.run({call.segments, call.fingerprint.algorithm == Algorithm::direct});
    }
    group_.announce(call.fingerprint);
  }

  // Waits of the call: what a rank may have to wait for, one after another.
  std::size_t waits() const { return ring_.size() + direct_.actions.size() * static_cast<std::size_t>(job_.world()); }

  // Up to the next header that the victim reads, which gets the damage; false if that has not come to be.
  bool advance(const Damage& damage) {
    while (const Step step = this->step(damage)) {
      if (step == damaged) return true;
    }
    return false;
  }

  // As a rank, as far as the others let it.
  void advance() {
    while (step({}) != waits_now) {
    }
  }

  bool finished() const { return next_ == ring_.size() + direct_.actions.size(); }

 private:
  enum Step : std::uint8_t { waits_now, went_on, damaged };

  static RingSettings of_rank(RingSettings settings, int rank) {
    settings.rank = rank;
    return settings;
  }

  int rank() const { return group_.settings.rank; }
  const Region& region(int rank) const { return group_.region(rank); }

  Step step(const Damage& damage) {
    if (finished()) return waits_now;
    const Step result = ring_.empty() ? step(direct_.actions[next_], damage) : step(ring_[next_], damage);
    if (result != waits_now) ++next_;
    if (finished()) group_.own_control().completed_calls.store(call_.fingerprint.call);
    return result;
  }

  Step step(const Action& action, const Damage& damage) {
    const auto depth = static_cast<std::uint64_t>(job_.settings.shape.depth);
    switch (action.kind) {
      case Kind::wait_posted: return observed(region(rank()).posted(0)) > received_ ? went_on : waits_now;
      case Kind::wait_taken: return sent_ < observed(region(rank()).taken(0)) + depth ? went_on : waits_now;
      case Kind::move:
        if (!action.sends) return went_on;
        return write_header(region(group_.right()).slot(0, sent_), action.segment, action.k,
                            action.handshake ? 0 : bytes_sent(action), damage, group_.right() == job_.settings.rank);
      case Kind::take: publish(region(group_.left()).taken(0), ++received_); return went_on;
      case Kind::post: publish(region(group_.right()).posted(0), ++sent_); return went_on;
    }
    return waits_now;
  }

  Step step(const DirectAction& action, const Damage& damage) {
    const auto all_have = [&](bool inputs) {
      for (int other = 0; other < job_.world(); ++other) {
        const SharedCounter& counter = inputs ? region(other).inputs(0) : region(other).results(0);
        if (observed(counter) <= action.number) return waits_now;
      }
      return went_on;
    };
    switch (action.kind) {
      case DirectKind::write_input:
        return write_header(region(rank()).input(0, action.number), input_step(action.number), 0, input_bytes(action),
                            damage, true);
      case DirectKind::publish_input: publish(region(rank()).inputs(0), action.number + 1); return went_on;
      case DirectKind::wait_inputs: return all_have(true);
      case DirectKind::publish_result: publish(region(rank()).results(0), action.number + 1); return went_on;
      case DirectKind::wait_results: return all_have(false);
      case DirectKind::write_result:
      case DirectKind::read_inputs:
      case DirectKind::read_results: return went_on;
    }
    return waits_now;
  }

  std::uint64_t bytes_sent(const Action& action) const {
    return call_.bytes_of(chunk_of_move(action.k, rank(), job_.world()), action.segment);
  }

  // All calls of a job have as many steps.
  std::uint64_t input_step(std::uint64_t number) const { return number % call_.segments; }

  std::uint64_t input_bytes(const DirectAction& action) const {
    std::uint64_t bytes = 0;
    for (int chunk = 0; chunk < job_.world(); ++chunk) {
      const bool kept = call_.fingerprint.algorithm == Algorithm::direct && chunk == rank();
      if (!kept) bytes += call_.bytes_of(chunk, input_step(action.number));
    }
    return bytes;
  }

  Step write_header(std::byte* slot, std::uint64_t segment, int k, std::uint64_t bytes, const Damage& damage,
                    bool for_victim) {
    const int counted = std::min(k + 1, job_.world());
    const SegmentHeader header{call_.fingerprint, static_cast<double>(counted), segment, bytes,
                               static_cast<std::uint64_t>(k)};
    auto words = std::bit_cast<std::array<std::uint64_t, kHeaderWords>>(header);
    if (for_victim) words[damage.word] ^= damage.bits;
    std::memcpy(slot, words.data(), sizeof words);
    return for_victim && damage.bits != 0 ? damaged : went_on;
  }

  const Job& job_;
  Group group_;
  PlannedCall call_{};
  std::size_t next_ = 0;  // action
  Program ring_;
  DirectRecorder direct_;
  std::uint64_t sent_ = 0, received_ = 0;
};

}  // namespace ring_reduce
