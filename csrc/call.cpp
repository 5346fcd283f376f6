#include "call.h"

#include <array>
#include <cstdio>

namespace ring_reduce {

namespace {

// The bytes may come from a broken peer: a number out of range gets a name too.
template <std::size_t kCount>
std::string name_of(const std::array<const char*, kCount>& names, std::size_t number) {
  return number < kCount ? names[number] : "unknown (" + std::to_string(number) + ")";
}

std::string operation_name(Operation operation) {
  return name_of(std::array{"all_reduce", "reduce_scatter", "all_gather"}, static_cast<std::size_t>(operation));
}

std::string type_name(ElementType type) {
  const auto number = static_cast<std::size_t>(type);
  return number < kElementTypes ? element_name(type) : "unknown (" + std::to_string(number) + ")";
}

std::string normalization_name(Normalization normalization) {
  return name_of(std::array{"SUM", "MEAN", "divide_by", "DIVIDE_BY_COUNT", "WEIGHTED_MEAN"},
                 static_cast<std::size_t>(normalization));
}

std::string algorithm_name(Algorithm algorithm) {
  return name_of(std::array{"ring", "direct", "one_shot"}, static_cast<std::size_t>(algorithm));
}

std::string number_text(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.17g", value);
  return text.data();
}

}  // namespace

std::string describe(const Fingerprint& call) {
  std::string text =
      operation_name(call.operation) + " of " + std::to_string(call.elements) + " " + type_name(call.type);
  if (call.operation == Operation::all_gather) return text + " of all ranks together";
  text += ", " + normalization_name(call.normalization);
  if (call.normalization == Normalization::divide_by) text += "(" + number_text(call.divisor) + ")";
  return text;
}

std::string describe_difference(const Fingerprint& mine, int my_rank, const Fingerprint& theirs, int their_rank) {
  const auto differ = [&](const char* what, const std::string& here, const std::string& there) {
    return std::string(what) + " is " + here + " on rank " + std::to_string(my_rank) + " and " + there + " on rank " +
           std::to_string(their_rank);
  };
  if (mine.wire_version != theirs.wire_version) {
    return differ("wire version", std::to_string(mine.wire_version), std::to_string(theirs.wire_version));
  }
  if (mine.call != theirs.call) {
    return differ("number of the call", std::to_string(mine.call), std::to_string(theirs.call));
  }
  if (mine.operation != theirs.operation) {
    return differ("operation", operation_name(mine.operation), operation_name(theirs.operation));
  }
  if (mine.type != theirs.type) return differ("dtype", type_name(mine.type), type_name(theirs.type));
  if (mine.elements != theirs.elements) {
    const bool gathers = mine.operation == Operation::all_gather;
    return differ(gathers ? "element count of all ranks together" : "element count", std::to_string(mine.elements),
                  std::to_string(theirs.elements));
  }
  if (mine.normalization != theirs.normalization) {
    return differ("normalization", normalization_name(mine.normalization), normalization_name(theirs.normalization));
  }
  if (std::memcmp(&mine.divisor, &theirs.divisor, sizeof mine.divisor) != 0) {
    return differ("divisor", number_text(mine.divisor), number_text(theirs.divisor));
  }
  return differ("algorithm", algorithm_name(mine.algorithm), algorithm_name(theirs.algorithm));
}

std::string mismatch_text(const Fingerprint& mine, int my_rank, const Fingerprint& theirs, int their_rank) {
  return "ranks disagree in call " + std::to_string(mine.call) + ": " +
         describe_difference(mine, my_rank, theirs, their_rank) + " (rank " + std::to_string(my_rank) + ": " +
         describe(mine) + "; rank " + std::to_string(their_rank) + ": " + describe(theirs) +
         "); every rank has to make the same calls in the same order. No tensor was changed";
}

}  // namespace ring_reduce
