// The part of ring_reduce._core that a transport in Python is made of (ring_reduce/process_group.py).
#pragma once

#include <pybind11/pybind11.h>

namespace ring_reduce {

void bind_schedule(pybind11::module_& module);

}  // namespace ring_reduce
