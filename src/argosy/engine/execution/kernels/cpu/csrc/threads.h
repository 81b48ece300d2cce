// Limit of the threads of all kernels in this process. The engine lowers it while other processes use the CPUs.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace argosy {

inline std::atomic<int64_t> thread_limit{INT64_MAX};

inline int limit_threads(int64_t threads) {
    return (int)std::min(threads, thread_limit.load(std::memory_order_relaxed));
}

}  // namespace argosy
