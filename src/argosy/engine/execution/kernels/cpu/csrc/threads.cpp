// Entry point that sets the limit of threads.h. Results do not depend on the number of threads.

#include "threads.h"

extern "C" {

// Let no kernel use more than `threads` threads from its next call on.
void argosy_limit_threads(int64_t threads) { argosy::thread_limit.store(threads, std::memory_order_relaxed); }
}
