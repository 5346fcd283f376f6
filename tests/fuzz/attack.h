// What the fuzzer's bytes do to a rank through the memory that it shares, and when: at every load from that memory,
// and whenever the rank would sleep. One thread does it all, so that an input does the same each time.
#pragma once

#include "peer.h"

#include <array>
#include <deque>

namespace ring_reduce {

class Attack {
 public:
  Attack(const Job& job, const std::vector<std::byte*>& regions, FuzzedDataProvider& bytes)
      : job_(job), bytes_(bytes), prompt_(bytes.ConsumeBool()) {
    for (int rank = 0; rank < job.world(); ++rank) {
      std::byte* base = regions[static_cast<std::size_t>(rank)];
      if (rank != job.settings.rank) peers_.emplace_back(job, regions, rank);
      areas_.push_back(base);
      add_fields(Region(base, job.settings.shape));
    }
  }

  void begin(const PlannedCall& call) {
    for (Peer& peer : peers_) peer.begin(call);
    damaged_ = false;
  }

  bool shares(const void* address) const {
    const auto* at = static_cast<const std::byte*>(address);
    const std::size_t bytes = job_.settings.shape.bytes();
    return std::any_of(areas_.begin(), areas_.end(), [&](std::byte* base) { return at >= base && at < base + bytes; });
  }

  // The rank is about to load from shared memory.
  void at_load() {
    if (loads_to_come_-- == 0) act();
  }

  // The rank sleeps.
  void at_wait() {
    act();
    if (prompt_) advance_all();
  }

  // The rank has made the call. Whether the others have, too.
  bool end() {
    advance_all();
    return std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.finished(); });
  }

  // Nothing but rightly posted headers, or headers with a fault that the rank has to see.
  bool only_damaged() const { return pokes_ == 0 && damaged_; }
  bool honest_and_prompt() const { return pokes_ == 0 && !damaged_ && !miscounted_ && prompt_; }

  std::size_t waits() const { return peers_.front().waits(); }

 private:
  struct Field {
    std::byte* at;
    std::size_t bytes;
  };

  using Fields = std::vector<Field>;

  static Field field(void* at, std::size_t bytes) { return {static_cast<std::byte*>(at), bytes}; }

  static void add_words(Fields& fields, std::byte* at, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) fields.push_back(field(at + i * sizeof(std::uint64_t), 8));
  }

  static void add_slot(Fields& fields, std::byte* slot) {
    add_words(fields, slot, kHeaderWords);
    add_words(fields, Region::payload(slot), 1);
  }

  void add_fields(const Region& region) {
    Control& control = region.control();
    Fields words, counters, slots;
    for (std::atomic<std::uint32_t>* word : {&control.failed_by, &control.closed}) words.push_back(field(word, 4));
    for (std::atomic<std::uint64_t>* word : {&control.started_calls, &control.completed_calls}) {
      words.push_back(field(word, 8));
    }
    words.push_back(field(&control.failure_call, 8));
    words.push_back(field(&control.failure_kind, 4));
    words.push_back(field(&control.failure_length, 4));
    add_words(words, reinterpret_cast<std::byte*>(&control.failure_text), 1);
    for (SharedCounter* counter : {&region.posted(0), &region.taken(0), &region.inputs(0), &region.results(0)}) {
      counters.push_back(field(&counter->value, 8));
      counters.push_back(field(&counter->sleepers, 4));
    }
    for (int i = 0; i < job_.settings.shape.depth; ++i) add_slot(slots, region.slot(0, static_cast<std::uint64_t>(i)));
    for (std::uint64_t i = 0; i < RegionShape::kOutboxes; ++i) {
      add_slot(slots, region.input(0, i));
      add_words(slots, region.result(0, i), 1);
    }
    add_words(slots, reinterpret_cast<std::byte*>(&control.announced), 2 * kFingerprintWords);
    for (Fields* fields : {&words, &counters, &slots}) fields_.push_back(std::move(*fields));
  }

  // The next action that the bytes name.
  void act() {
    if (bytes_.remaining_bytes() == 0) return;
    const auto kind = bytes_.ConsumeIntegralInRange(0, 7);
    if (kind < 3) advance_all();
    if (kind == 3) pick(peers_).advance();
    if (kind == 4) damage();
    if (kind > 4) poke();
    loads_to_come_ = bytes_.ConsumeIntegralInRange(0, 15);
  }

  void advance_all() {
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      for (Peer& peer : peers_) peer.advance();
    }
  }

  template <class Items>
  typename Items::value_type& pick(Items& items) {
    return items[bytes_.ConsumeIntegralInRange<std::size_t>(0, items.size() - 1)];
  }

  void damage() {
    const Damage damage{bytes_.ConsumeIntegralInRange<std::size_t>(0, kHeaderWords - 1),
                        std::uint64_t{1} << bytes_.ConsumeIntegralInRange(0, 63)};
    if (pick(peers_).advance(damage)) (damage.word == kCountWord ? miscounted_ : damaged_) = true;
  }

  void poke() {
    ++pokes_;
    const Field& field = pick(pick(fields_));
    std::uint64_t value = 0;
    std::memcpy(&value, field.at, field.bytes);
    switch (bytes_.ConsumeIntegralInRange(0, 3)) {
      case 0: value += static_cast<std::uint64_t>(bytes_.ConsumeIntegralInRange<std::int64_t>(-3, 3)); break;
      case 1: value ^= std::uint64_t{1} << bytes_.ConsumeIntegralInRange(0, 63); break;
      case 2: value = bytes_.PickValueInArray(kValues); break;
      case 3: value = bytes_.ConsumeIntegral<std::uint64_t>(); break;
    }
    std::memcpy(field.at, &value, field.bytes);
  }

  // Also as floats: NaN, infinity, -1, the smallest and the largest number.
  static constexpr std::array<std::uint64_t, 16> kValues{0,
                                                         1,
                                                         2,
                                                         3,
                                                         4,
                                                         6,
                                                         2047,
                                                         2049,
                                                         std::uint64_t{1} << 31,
                                                         (std::uint64_t{1} << 32) - 1,
                                                         std::uint64_t{1} << 63,
                                                         ~std::uint64_t{0},
                                                         std::uint64_t{0x7ff} << 52,
                                                         std::uint64_t{0xfff} << 51,
                                                         std::uint64_t{0xbff} << 52,
                                                         (std::uint64_t{0x7ff} << 52) - 1};

  const Job& job_;
  FuzzedDataProvider& bytes_;
  const bool prompt_;       // the others go on whenever the rank sleeps
  std::deque<Peer> peers_;  // a Group can't be moved
  std::vector<std::byte*> areas_;
  std::vector<Fields> fields_;  // those of a kind together
  int loads_to_come_ = 0;
  int pokes_ = 0;
  bool damaged_ = false, miscounted_ = false;
};

}  // namespace ring_reduce
