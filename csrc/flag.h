// Publishing and observing a counter across processes: the only file that touches an atomic of a link.
//
//   publish(counter, v)   all stores before it are visible to whoever observes v        (one writer)
//   observed(counter)     one acquire load; pairs with publish()
//   sleep_until(...)      a bounded sleep that publish() ends; never misses a wake-up
//
// Templated on a platform so that Relacy checks these very lines. A platform provides
//   U64, U32              atomics with load, exchange, fetch_add, fetch_sub
//   futex_wait(U64&, v)   sleep while the low 32 bits equal v's, for a bounded time
//   futex_wake(U64&)      wake all
#pragma once

#include "portable.h"

#include <atomic>

namespace ring_reduce {

template <class Platform>
struct alignas(kLineBytes) Counter {
  typename Platform::U64 value;
  typename Platform::U32 sleepers;
};

// Pairs with observed() and sleep_until(). Sequentially consistent, not just release: the load of `sleepers` must not
// pass the store of `value`, or a sleeper that checked the old value would never be woken.
template <class Platform>
void publish(Counter<Platform>& counter, std::uint64_t value) {
  counter.value.exchange(value, std::memory_order_seq_cst);
  if (counter.sleepers.load(std::memory_order_seq_cst) != 0) Platform::futex_wake(counter.value);
}

// Pairs with publish().
template <class Platform>
std::uint64_t observed(const Counter<Platform>& counter) {
  return counter.value.load(std::memory_order_acquire);
}

// Sleeps once, unless the counter has reached `target`: a bounded time, or until publish().
template <class Platform>
void sleep_until(Counter<Platform>& counter, std::uint64_t target) {
  counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint64_t seen = counter.value.load(std::memory_order_seq_cst);
  if (seen < target) Platform::futex_wait(counter.value, seen);
  counter.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace ring_reduce
