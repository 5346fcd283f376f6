// All passes of one width; see chunk.h for what the including file defines.
#include "chunk.h"

#include "accumulate_chunk.h"
#include "add_all_chunk.h"

namespace ring_reduce::RING_REDUCE_ISA {

static constexpr Passes kPasses = {
    RING_REDUCE_ISA_NAME,
    static_cast<int>(kVectorBytes) * 8,
    {combine_float<double>, combine_float<float>, combine_float<Half>, combine_float<BFloat16>,
     combine_integer<std::uint32_t>, combine_integer<std::uint64_t>},
    {add_all_float<double>, add_all_float<float>, add_all_float<Half>, add_all_float<BFloat16>,
     add_all_integer<std::uint32_t>, add_all_integer<std::uint64_t>},
    {accumulate_float<double>, accumulate_float<float>, accumulate_float<Half>, accumulate_float<BFloat16>},
    {divide_float<double>, divide_float<float>, divide_float<Half>, divide_float<BFloat16>},
    stream_copy,
};

}  // namespace ring_reduce::RING_REDUCE_ISA
