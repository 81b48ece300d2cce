// Linear layers that round the rows of x to 8 bits first: distribution of their work over threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear_call.h"
#include "threads.h"
#include "weights_int.h"

namespace argosy {

constexpr int64_t MAX_ITEM_ROWS = 256;                // maximum rows of a work item
constexpr int64_t MAX_ITEM_BLOCKS = 8;                // maximum blocks of a work item
constexpr int64_t MAX_SMALL_BATCH_ROWS = 64;          // up to this, work items are small
constexpr int64_t MAX_SINGLE_THREAD_ROUND_ROWS = 32;  // up to this, the caller rounds x: a barrier costs more
constexpr int64_t MIN_THREAD_WEIGHTS = 1 << 18;       // weights that up to 100 rows process while a thread wakes up
constexpr int64_t PREFETCH_BYTES = 4096;              // prefetch distance in the weight

// Work item: some rows times some blocks.
struct WorkItem {
    int64_t row, rows, block, blocks;
};

// Round `inputs` parts of x, and then compute all rows and blocks. Each thread holds what `create_unit` returns.
template <class CreateUnit, class Round, class Compute>
inline void run_rounded(const ArgosyLinear &a, int64_t inputs, CreateUnit create_unit, Round round, Compute compute) {
    const int64_t blocks = count_blocks(a.outs), parts = (a.rows + MAX_ITEM_ROWS - 1) / MAX_ITEM_ROWS;
    const int64_t threads =
        std::clamp<int64_t>(a.outs * a.cols / MIN_THREAD_WEIGHTS * (100 + a.rows) / 100, 1, limit_threads(a.threads));
    const int64_t shares = threads * (a.rows <= MAX_SMALL_BATCH_ROWS ? 8 : 2);
    const int64_t item_blocks = std::clamp<int64_t>(blocks * parts / shares, 1, MAX_ITEM_BLOCKS);
    const int64_t items = (blocks + item_blocks - 1) / item_blocks;
    const bool rounds_alone = a.rows <= MAX_SINGLE_THREAD_ROUND_ROWS;
    for (int64_t i = 0; rounds_alone && i < inputs; i++) round(i);
#pragma omp parallel num_threads((int)threads)
    {
        [[maybe_unused]] const auto unit = create_unit();
        if (!rounds_alone) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < inputs; i++) round(i);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < parts * items; i++) {
            const int64_t row = i % parts * MAX_ITEM_ROWS, block = i / parts * item_blocks;
            compute(WorkItem{row, std::min(MAX_ITEM_ROWS, a.rows - row), block, std::min(item_blocks, blocks - block)});
        }
    }
}

}  // namespace argosy
