// One pass over many tensors, cut into pieces of equal size that several threads take in turn.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace ring_reduce {

// `elements` elements of tensor number `tensor`, from `first` on.
using PieceVisit = std::function<void(std::size_t tensor, std::uint64_t first, std::uint64_t elements)>;

// Calls visit for parts of tensors of these sizes that together are all their elements, each once, on at most `threads`
// threads. Parts of a tensor begin at multiples of kCutElements. A visit does not throw. From any thread, also at once.
void visit_pieces(const std::vector<std::uint64_t>& sizes, int threads, const PieceVisit& visit);

// Whole cache lines of every type, so that no two threads write to one.
inline constexpr std::uint64_t kCutElements = 64;

// A piece is worth the turn that takes it, and few enough elements for threads that are held up to matter little.
inline constexpr std::uint64_t kPieceElements = 32 * 1024;

}  // namespace ring_reduce
