// The port of one lane of a GPU rank: what run_ring() waits for, moves and publishes. All threads of a block run it in
// step, with a part for one thread each of three warps: the receiver waits for and frees the slots from left, the sender
// those to right, so that neither's fence waits for the other's, and the planner meanwhile finds where the elements lie.
//
// A lane that fails goes on through the schedule without doing anything: that ends the block without an exception.
#pragma once

#include "cuda_block.h"
#include "cuda_flag.h"
#include "cuda_link.h"
#include "scaling.h"

namespace ring_reduce {

template <class T, class Block>
class CudaPort {
 public:
  RING_REDUCE_PORTABLE CudaPort(const Launch& launch, int index, int lane, const Block& block)
      : launch_(launch), index_(index), lane_(lane), block_(block), counters_(me().counters[lane]) {
    if (block_.thread() == receiver()) {
      BlockShared& shared = block_.shared();
      shared.failed = 0;
      shared.total_count = 0;
      if (lane_ == 0) publish(&me().progress->started, me().state->calls + 1);
      // Before the first post: a replay of a graph may come when a neighbour has left, and its memory goes.
      if (stopped()) shared.failed = 1;
      if (!is_count(count())) fail(DeviceFailureKind::bad_count, 0);
    }
    block_.barrier();
  }

  // Pairs with post() in the left neighbour.
  RING_REDUCE_PORTABLE void wait_posted() {
    if (failed_ || block_.thread() != receiver()) return;
    wait(own().posted(), counters_.received + 1, DeviceFailureKind::no_segment, counters_.received);
  }

  // Pairs with take() in the right neighbour.
  RING_REDUCE_PORTABLE void wait_taken() {
    const auto depth = static_cast<std::uint64_t>(launch_.shape.depth);
    if (failed_ || block_.thread() != sender() || counters_.sent < depth) return;
    wait(own().taken(), counters_.sent + 1 - depth, DeviceFailureKind::no_slot, counters_.sent);
  }

  RING_REDUCE_PORTABLE void move(std::uint64_t segment, int k, bool receives, bool sends) {
    if (failed_) return;
    if (block_.thread() == planner()) plan(segment, k);
    if (block_.thread() == sender()) block_.shared().pass.sent = sends ? LaneLink::payload(slot_to_right()) : nullptr;
    if (block_.thread() == receiver()) receive(segment, k, receives);

    block_.barrier();  // what the waiting threads observed, all have
    failed_ = block_.shared().failed != 0;
    if (failed_) return;
    run_pass(k);
    if (sends && block_.thread() == sender()) write_header(segment, k);
    block_.barrier();  // what all have read and written, take() and post() publish
  }

  RING_REDUCE_PORTABLE void take() {
    if (failed_) return;
    ++counters_.received;
    if (block_.thread() == receiver()) publish(left().taken(), counters_.received);
  }

  RING_REDUCE_PORTABLE void post() {
    if (failed_) return;
    ++counters_.sent;
    if (block_.thread() == sender()) publish(right().posted(), counters_.sent);
  }

  // Leaves the counters for the next call; the last lane of the rank counts this one.
  RING_REDUCE_PORTABLE void finish() {
    if (failed_) {
      poison();
      block_.barrier();
    }
    if (block_.thread() != receiver()) return;
    me().counters[lane_] = counters_;
    RankState& state = *me().state;
    CallProgress& progress = *me().progress;
    const std::uint64_t call = state.calls + 1;
    if (lane_ == 0 && uses_count(launch_.fingerprint.normalization)) {
      progress.total_count = block_.shared().total_count;
    }
    if (failed_) count_up(&state.failed_lanes);
    if (count_up(&state.finished_lanes) + 1 == static_cast<std::uint64_t>(launch_.lanes)) {
      state.finished_lanes = 0;
      state.calls = call;
      if (observed(&state.failed_lanes) == 0) publish(&progress.completed, call);
    }
  }

 private:
  using Word = typename ring_reduce::Word<sizeof(T)>::Type;

  static constexpr unsigned kWarp = 32;
  static constexpr std::uint64_t kLookNs =
      20'000;  // between two looks at the word that stops all, which is in host memory

  RING_REDUCE_PORTABLE unsigned receiver() const { return 0; }
  RING_REDUCE_PORTABLE unsigned sender() const { return block_.threads() > kWarp ? kWarp : 0; }
  RING_REDUCE_PORTABLE unsigned planner() const { return block_.threads() > 2 * kWarp ? 2 * kWarp : 0; }

  RING_REDUCE_PORTABLE const RankArguments& me() const { return launch_.arguments[index_]; }
  RING_REDUCE_PORTABLE int rank() const { return launch_.first_rank + index_; }
  RING_REDUCE_PORTABLE LaneLink own() const { return {me().links.own, launch_.shape, lane_}; }
  RING_REDUCE_PORTABLE LaneLink left() const { return {me().links.left, launch_.shape, lane_}; }
  RING_REDUCE_PORTABLE LaneLink right() const { return {me().links.right, launch_.shape, lane_}; }
  RING_REDUCE_PORTABLE std::byte* slot_to_right() const { return right().slot(counters_.sent); }

  // Of this rank; 1 where the normalization does not use it.
  RING_REDUCE_PORTABLE double count() const { return me().device_count != nullptr ? *me().device_count : me().count; }

  // Whether all segments begin at packs: the tensors do, and equal chunks, if there are such, are whole packs.
  RING_REDUCE_PORTABLE bool wide() const {
    const auto input = reinterpret_cast<std::uintptr_t>(me().input);
    const auto output = reinterpret_cast<std::uintptr_t>(me().output);
    return (input | output | launch_.partition.equal * sizeof(T)) % kPackBytes == 0;
  }

  // The element of the whole tensor that the input (the output) begins with: of a part of it, this rank's.
  RING_REDUCE_PORTABLE std::uint64_t begin_of(Operation part) const {
    return launch_.fingerprint.operation == part ? static_cast<std::uint64_t>(rank()) * launch_.partition.equal : 0;
  }

  RING_REDUCE_PORTABLE static bool is_finite(double x) { return x - x == 0; }

  // What ring_reduce/call.py takes for a count on the host.
  RING_REDUCE_PORTABLE static bool is_count(double x) { return x == 0 || (x >= 0x1p-126 && x <= 0x1p53); }

  RING_REDUCE_PORTABLE bool stopped() const {
    const std::uint64_t stop = observed(me().stop);
    return stop != 0 && me().state->calls + 1 >= stop;
  }

  // One thread. Ends when the counter has reached `target`, when any rank has failed, or at the deadline.
  RING_REDUCE_PORTABLE void wait(const std::uint64_t* counter, std::uint64_t target, DeviceFailureKind missing,
                                 std::uint64_t number) {
    if (launch_.disturbance.delay_seed != 0) pause_for(random_ns(number, missing));
    if (observed(counter) >= target) return;
    const std::uint64_t begin = nanoseconds();
    std::uint64_t look = begin + kLookNs;
    while (observed(counter) < target) {
      relax();
      const std::uint64_t now = nanoseconds();
      if (now < look) continue;
      look = now + kLookNs;
      if (stopped()) {
        block_.shared().failed = 1;
        return;
      }
      if (now - begin > launch_.timeout_ns) return fail(missing, number);
    }
  }

  // One thread. The first lane to fail fills in why. The host picks one cause where several ranks fail at once.
  RING_REDUCE_PORTABLE void fail(DeviceFailureKind kind, std::uint64_t number, const Fingerprint* theirs = nullptr) {
    block_.shared().failed = 1;
    DeviceFailure& failure = *me().failure;
    if (count_up(&failure.claims) != 0) return;
    failure.kind = kind;
    failure.rank = rank();
    failure.lane = lane_;
    failure.call = me().state->calls + 1;
    failure.number = number;
    failure.count = count();
    failure.mine = fingerprint();
    if (theirs != nullptr) failure.theirs = *theirs;
    publish(&failure.raised, 1);
    publish(me().stop, 1);
  }

  RING_REDUCE_PORTABLE Fingerprint fingerprint() const {
    Fingerprint mine = launch_.fingerprint;
    mine.call = me().state->calls + 1;
    return mine;
  }

  // The planner: where this rank's part of the segment lies. Runs while the others wait.
  RING_REDUCE_PORTABLE void plan(std::uint64_t segment, int k) {
    const Span whole = launch_.partition.lane(chunk_of_move(k, rank(), launch_.world), lane_, launch_.lanes);
    const std::uint64_t at = segment * launch_.segment_elements;
    const std::uint64_t begin = at < whole.elements ? at : whole.elements;
    const std::uint64_t rest = whole.elements - begin;
    const std::uint64_t first = whole.begin + begin;
    Combination& pass = block_.shared().pass;
    pass.elements = static_cast<unsigned>(rest < launch_.segment_elements ? rest : launch_.segment_elements);
    pass.own = me().input + (first - begin_of(Operation::all_gather)) * sizeof(T);
    pass.output = nullptr;
    if (k >= launch_.world - 1) pass.output = me().output + (first - begin_of(Operation::reduce_scatter)) * sizeof(T);
  }

  // The receiver, which has waited for the segment: its header, and so what is added up and what divides it.
  RING_REDUCE_PORTABLE void receive(std::uint64_t segment, int k, bool receives) {
    BlockShared& shared = block_.shared();
    if (shared.failed != 0) return;
    std::byte* slot = receives ? own().slot(counters_.received) : nullptr;
    const double received_count = receives ? read_header(slot, segment, k) : 0;
    const double own_count = count();
    shared.partial_count = received_count + (k < launch_.world ? own_count : 0);  // a finished chunk carries the total
    if (!is_finite(shared.partial_count)) return fail(DeviceFailureKind::infinite_count, segment);
    // As the CPU ring: fractional counts round by their order, so the total is that of chunk 0.
    const int chunk = chunk_of_move(k, rank(), launch_.world);
    const bool counts = chunk == 0 || launch_.fingerprint.operation == Operation::reduce_scatter;
    if (k >= launch_.world - 1 && counts) shared.total_count = shared.partial_count;

    const bool finishes = k == launch_.world - 1;
    const Mix mix = mix_of(launch_.fingerprint, k, receives, received_count, own_count);
    Combination& pass = shared.pass;
    pass.received = receives ? LaneLink::payload(slot) : nullptr;
    pass.with_received = mix.with_received;
    pass.with_own = mix.with_own;
    pass.received_scale = mix.received_scale;
    pass.own_scale = mix.own_scale;
    pass.divisor = 1.0;
    if (finishes) {
      pass.divisor = divisor_of(launch_.fingerprint, launch_.world, shared.partial_count) * power_of_two(-mix.exponent);
    }
  }

  // The count that a segment carries, once its header is what this rank expects.
  RING_REDUCE_PORTABLE double read_header(const std::byte* slot, std::uint64_t segment, int k) {
    SegmentHeader header;
    Pack packs[sizeof header / kPackBytes];
    for (unsigned i = 0; i < sizeof header / kPackBytes; ++i) packs[i] = load_slot(slot + i * kPackBytes);
    std::memcpy(&header, packs, sizeof header);
    if (!same(header.fingerprint, fingerprint())) {
      fail(DeviceFailureKind::mismatch, segment, &header.fingerprint);
      return 0;
    }
    const bool in_step = header.segment == segment && header.move + 1 == static_cast<std::uint64_t>(k);
    if (!in_step || !(header.partial_count >= 0)) fail(DeviceFailureKind::corrupt, segment);
    return header.partial_count;
  }

  RING_REDUCE_PORTABLE static bool same(const Fingerprint& a, const Fingerprint& b) {
    std::uint64_t x[4], y[4];
    static_assert(sizeof x == sizeof a);
    std::memcpy(x, &a, sizeof a);
    std::memcpy(y, &b, sizeof b);
    return ((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3])) == 0;
  }

  // The sender.
  RING_REDUCE_PORTABLE void write_header(std::uint64_t segment, int k) const {
    const BlockShared& shared = block_.shared();
    const SegmentHeader header{fingerprint(), shared.partial_count, segment, shared.pass.elements * sizeof(T),
                               static_cast<std::uint64_t>(k)};
    Pack packs[sizeof header / kPackBytes];
    std::memcpy(packs, &header, sizeof header);
    std::byte* slot = slot_to_right();
    for (unsigned i = 0; i < sizeof header / kPackBytes; ++i) store_slot(slot + i * kPackBytes, packs[i]);
  }

  // Up to the finish: own part, added to what came from left. The finish divides, and writes the output too. After it
  // chunks travel as bits.
  RING_REDUCE_PORTABLE void run_pass(int k) {
    Combination pass = block_.shared().pass;
    if (k >= launch_.world) {
      return copy<sizeof(T)>(block_, pass.received, pass.sent, pass.output, pass.elements, wide());
    }
    if (!pass.with_received) pass.received = nullptr;
    if (!pass.with_own) pass.own = nullptr;
    if (pass.received != nullptr || pass.own != nullptr) return combine<T>(block_, pass, wide());
    if (pass.sent != nullptr) fill(block_, pass.sent, pass.elements, Word{0});  // nothing was counted
    if (pass.output != nullptr) fill(block_, pass.output, pass.elements, Word{0});
  }

  // The error comes late, so what this lane would have written must not look like a result. Integers have no NaN.
  RING_REDUCE_PORTABLE void poison() {
    if constexpr (kIsFloat<T>) {
      const bool scatters = launch_.fingerprint.operation == Operation::reduce_scatter;
      for (int chunk = 0; chunk < launch_.world; ++chunk) {
        if (scatters && chunk != rank()) continue;
        const Span span = launch_.partition.lane(chunk, lane_, launch_.lanes);
        const std::uint64_t begin = span.begin - begin_of(Operation::reduce_scatter);
        fill(block_, me().output + begin * sizeof(T), span.elements, static_cast<Word>(~Word{0}));
      }
    }
  }

  RING_REDUCE_PORTABLE unsigned random_ns(std::uint64_t number, DeviceFailureKind what) const {
    std::uint64_t x = launch_.disturbance.delay_seed + number * 1000003 + static_cast<std::uint64_t>(rank()) * 8191 +
                      static_cast<std::uint64_t>(lane_) * 131 + static_cast<std::uint64_t>(what);
    x = (x ^ x >> 31) * 0x7fb5d329728ea185;
    x = (x ^ x >> 27) * 0x81dadef4bc2dd44d;
    return static_cast<unsigned>((x ^ x >> 33) % 2000);
  }

  const Launch& launch_;
  const int index_;
  const int lane_;
  const Block& block_;
  LaneCounters counters_;
  bool failed_ = false;
};

// What each block of a launch does: block -> (rank, lane), neighbouring blocks different ranks.
template <class T, class Block>
RING_REDUCE_PORTABLE void run_lane(const Launch& launch, unsigned block_index, const Block& block) {
  const int index = static_cast<int>(block_index) % launch.ranks, lane = static_cast<int>(block_index) / launch.ranks;
  if (launch.first_rank + index == launch.disturbance.absent_rank) return;
  CudaPort<T, Block> port(launch, index, lane, block);
  run_ring(port, moves_of(launch.fingerprint.operation, launch.world), launch.segments, launch.window);
  port.finish();
}

}  // namespace ring_reduce
