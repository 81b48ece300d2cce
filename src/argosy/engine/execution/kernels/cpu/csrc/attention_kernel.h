// Paged causal attention on the CPU: rotates, stores new keys and values, then attends.
//
// Every row (token, head) processes key tiles at absolute positions in order, and no other row affects its arithmetic.
// Its result therefore depends neither on the batch and the chunking nor on the threads. The sums restart every
// RANGE_KEYS keys and are merged in order, so that threads can share a long context. The tiling is that of
// FlashAttention (Dao et al. 2022). During each tile the next one is prefetched, because hardware prefetchers cannot
// follow the block table.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "attention_cache.h"
#include "attention_sums.h"
#include "threads.h"

namespace {

using namespace argosy;

constexpr int MAX_ITEM_ROWS = 32;             // maximum rows of a work item, unless one token has more heads
constexpr int MAX_EXTRACTING_ROWS = 128;      // the same if values or bytes are converted once per item and tile
constexpr int64_t RANGE_KEYS = 32 * TILE;     // keys that are summed before the sums are merged
constexpr int64_t MIN_THREAD_WORK = 1 << 17;  // key elements that 16 rows process while a thread wakes up

struct WorkItem {
    int64_t sequence, first, last;  // flat tokens first .. last - 1
};

// Working memory of one thread. A row is one head of one token.
struct ThreadWorkspace {
    uint32_t *q, *row, *weights, *panel, *values, *expanded;
    float *scores, *rescale, *scales;
    RoundedRow rounded;
    SoftmaxSums sums, next;

    // `values` is room for a tile of values that are extracted from keys, and `expanded` for one of expanded bytes.
    ThreadWorkspace(Scratch &memory, int64_t rows, int64_t words, int64_t width, size_t value_words,
                    size_t expanded_words, size_t scale_count) {
        memory.reset(Scratch::lines_for<uint32_t>(rows * words) + 2 * Scratch::lines_for<uint32_t>(rows * TILE) +
                     Scratch::lines_for<uint32_t>(words) + Scratch::lines_for<uint32_t>(LANES * width) +
                     Scratch::lines_for<uint32_t>(value_words) + Scratch::lines_for<uint32_t>(expanded_words) +
                     Scratch::lines_for<float>(rows) + Scratch::lines_for<float>(scale_count) + RoundedRow::scratch_lines(2 * words) +
                     2 * SoftmaxSums::scratch_lines(rows, width));
        q = memory.allocate<uint32_t>(rows * words);
        row = memory.allocate<uint32_t>(words);
        weights = memory.allocate<uint32_t>(rows * TILE);
        panel = memory.allocate<uint32_t>(LANES * width);
        values = memory.allocate<uint32_t>(value_words);
        expanded = memory.allocate<uint32_t>(expanded_words);
        rounded = RoundedRow::allocate(memory, 2 * words);
        scores = memory.allocate<float>(rows * TILE);
        rescale = memory.allocate<float>(rows);
        scales = memory.allocate<float>(scale_count);
        sums = SoftmaxSums::allocate(memory, rows, width);
        next = SoftmaxSums::allocate(memory, rows, width);
        std::fill_n(rescale, rows, 1.0f);
    }
};

template <class Unit, bool ROUNDED> class AttentionKernel {
    using T = typename Unit::T;
    using Scalar = typename T::Scalar;

    const ArgosyAttention &a;
    const KvCache<Unit, ROUNDED> cache{a};
    const Softmax softmax{a.scale, a.softcap, a.window};
    const int64_t words = cache.words, width = cache.value_width;
    const int64_t group = a.heads / a.kv_heads;
    const int64_t tile_tokens = std::max<int64_t>(1, (a.values && !ROUNDED ? MAX_ITEM_ROWS : MAX_EXTRACTING_ROWS) / group);

    int64_t rows_of(const WorkItem &item) const { return (item.last - item.first) * group; }

    void load_queries(ThreadWorkspace &workspace, const WorkItem &item, int64_t head) const {
        for (int64_t row = 0; row < rows_of(item); row++)
            cache.load_row(workspace.q + row * words, a.q, a.q_stride, item.first + row / group,
                           head * group + row % group);
    }

    void store_rows(const SoftmaxSums &sums, const WorkItem &item, int64_t head) const {
        for (int64_t row = 0; row < rows_of(item); row++) {
            const int64_t t = item.first + row / group, h = head * group + row % group;
            Scalar *out = (Scalar *)a.out + (t * a.heads + h) * a.value_dim;
            float total = reduce_sum(load<f32x16>(sums.total + row * LANES));
            if (a.sinks) total += softmax.sink_weight(a.sinks[h], sums.peak[row]);
            for (int64_t d = 0; d < a.value_dim; d += LANES) {
                // Adding zero turns -0 into 0. Which of them a sum has depends on the number of masked keys.
                const f32x16 x = load<f32x16>(sums.out + row * width + d) / total + 0.0f;
                KvCache<Unit, ROUNDED>::Row::store_lanes(out + d, x, a.value_dim - d);
            }
        }
    }

    // First and last range of keys that an item's rows see.
    std::pair<int64_t, int64_t> range_bounds(const WorkItem &item) const {
        return {softmax.first_visible(a.positions[item.first]) / RANGE_KEYS, a.positions[item.last - 1] / RANGE_KEYS};
    }

    // Position of the first tile of an item's range.
    int64_t range_start(const WorkItem &item, int64_t range) const {
        return std::max(softmax.first_visible(a.positions[item.first]), range * RANGE_KEYS) / TILE * TILE;
    }

    // Sum one range of keys into `sums`. `head_after` is the KV head whose keys are prefetched at the end.
    void attend_range(const WorkItem &item, int64_t head, int64_t head_after, int64_t range, const SoftmaxSums &sums,
                      ThreadWorkspace &workspace) const {
        const int64_t rows = rows_of(item);
        const int64_t padded = (rows + Unit::ROW_ALIGNMENT - 1) / Unit::ROW_ALIGNMENT * Unit::ROW_ALIGNMENT;
        const bool takes_bytes = ROUNDED && a.values && Unit::takes_bytes(rows);
        const int64_t oldest = softmax.first_visible(a.positions[item.first]);
        const int64_t newest = std::min(a.positions[item.last - 1], (range + 1) * RANGE_KEYS - 1);
        sums.clear(rows, width);
        Tile next = cache.load_tile(item.sequence, head, range_start(item, range), oldest, newest, workspace.panel);
        for (int64_t start = range_start(item, range); start <= newest; start += TILE) {
            const Tile stored = next;
            const bool last = start + TILE > newest;
            next = last ? cache.load_tile(item.sequence, head_after, range_start(item, range), oldest, newest, nullptr)
                        : cache.load_tile(item.sequence, head, start + TILE, oldest, newest, workspace.panel);
            const int64_t valid = a.seq_lens[item.sequence] - start;
            if constexpr (ROUNDED) cache.read_scales(stored, valid, workspace.scales, next, !takes_bytes);
            const Tile tile = ROUNDED && !takes_bytes ? cache.expand_tile(stored, workspace.expanded) : stored;
            const Tile &prefetched = ROUNDED && !takes_bytes ? tile : next;
            if (takes_bytes)
                Unit::template compute_scores<ROUNDED>(workspace.q, padded, words, tile, prefetched, workspace.scores);
            else
                Unit::compute_scores(workspace.q, padded, words, tile, prefetched, workspace.scores);
            for (int64_t row = 0; row < rows; row++)
                workspace.rescale[row] = softmax.scores_to_weights<T>(
                    workspace.scores + row * TILE, ROUNDED ? workspace.scales : nullptr,
                    a.positions[item.first + row / group], start,
                    workspace.weights + row * Unit::WEIGHT_WORDS, sums.peak[row], sums.total + row * LANES);
            const Tile summed = a.values ? tile : cache.extract_values(tile, valid, workspace.values);
            if (takes_bytes)
                Unit::template accumulate_values<ROUNDED>(workspace.weights, padded, summed, prefetched,
                                                          workspace.rescale, sums.out, width);
            else
                Unit::accumulate_values(workspace.weights, padded, summed, prefetched, workspace.rescale, sums.out,
                                        width);
        }
    }

    // Process all ranges of an item in one thread.
    void attend_all_ranges(const WorkItem &item, int64_t head, ThreadWorkspace &workspace) const {
        const auto [first, last] = range_bounds(item);
        load_queries(workspace, item, head);
        const int64_t head_after = std::min(head + 1, a.kv_heads - 1);
        attend_range(item, head, head_after, first, workspace.sums, workspace);
        for (int64_t range = first + 1; range <= last; range++) {
            attend_range(item, head, head_after, range, workspace.next, workspace);
            softmax.merge(workspace.sums, workspace.next, rows_of(item), width);
        }
        store_rows(workspace.sums, item, head);
    }

    // Distribute the ranges of a few items over the threads, then merge the sums of each item.
    void attend_shared_ranges(const std::vector<WorkItem> &items, const std::vector<SoftmaxSums> &partial_sums,
                              ThreadWorkspace &workspace) const {
        const int64_t pairs = (int64_t)items.size() * a.kv_heads, max_ranges = (int64_t)partial_sums.size() / pairs;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pairs * max_ranges; i++) {
            const int64_t pair = i % pairs, offset = i / pairs, head = pair % a.kv_heads;
            const WorkItem &item = items[pair / a.kv_heads];
            const auto [first, last] = range_bounds(item);
            if (first + offset > last) continue;
            load_queries(workspace, item, head);
            attend_range(item, head, head, first + offset, partial_sums[pair * max_ranges + offset], workspace);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t pair = 0; pair < pairs; pair++) {
            const WorkItem &item = items[pair / a.kv_heads];
            const auto [first, last] = range_bounds(item);
            const SoftmaxSums *item_sums = partial_sums.data() + pair * max_ranges;
            for (int64_t offset = 1; offset <= last - first; offset++)
                softmax.merge(item_sums[0], item_sums[offset], rows_of(item), width);
            store_rows(item_sums[0], item, pair % a.kv_heads);
        }
    }

    // Number of threads that the work is worth.
    int64_t thread_count(const std::vector<WorkItem> &items) const {
        int64_t cost = 0;
        for (const WorkItem &item : items) {
            const int64_t newest = a.positions[item.last - 1] + 1, rows = rows_of(item);
            cost += (a.window ? std::min(newest, a.window + rows) : newest) * ((rows + 15) / 16);
        }
        return std::clamp<int64_t>(cost * a.kv_heads * width / MIN_THREAD_WORK, 1, limit_threads(a.threads));
    }

    // Number of ranges of the longest item if the threads share items, or 0 if whole items keep all threads busy.
    int64_t max_shared_ranges(const std::vector<WorkItem> &items, int64_t threads) const {
        const int64_t count = (int64_t)items.size() * a.kv_heads;
        if (threads == 1 || count >= 4 * threads) return 0;
        int64_t longest = 0, all = 0;
        for (const WorkItem &item : items) {
            const auto [first, last] = range_bounds(item);
            longest = std::max(longest, last - first + 1);
            all += (last - first + 1) * a.kv_heads;
        }
        return longest > 1 && (count % threads || longest * threads > all) ? longest : 0;
    }

    // Build the work items, costliest (longest context) first, so that the threads end at about the same time.
    void build_work_items(std::vector<WorkItem> &items) const {
        items.clear();
        for (int64_t sequence = 0; sequence < a.sequences; sequence++)
            for (int64_t first = a.query_start_loc[sequence]; first < a.query_start_loc[sequence + 1];
                 first += tile_tokens)
                items.push_back(
                    {sequence, first, std::min<int64_t>(first + tile_tokens, a.query_start_loc[sequence + 1])});
        const auto cost = [&](const WorkItem &i) { return (i.last - i.first + 1) * a.positions[i.last - 1]; };
        std::stable_sort(items.begin(), items.end(),
                         [&](const WorkItem &x, const WorkItem &y) { return cost(x) > cost(y); });
    }

    // Allocate the sums of `count` ranges.
    void allocate_sums(std::vector<SoftmaxSums> &partial_sums, int64_t count, int64_t rows, Scratch &memory) const {
        memory.reset(count * SoftmaxSums::scratch_lines(rows, width));
        partial_sums.clear();
        for (int64_t i = 0; i < count; i++) partial_sums.push_back(SoftmaxSums::allocate(memory, rows, width));
    }

  public:
    explicit AttentionKernel(const ArgosyAttention &call) : a(call) {}

    void run() const {
        static thread_local std::vector<WorkItem> items;
        static thread_local std::vector<SoftmaxSums> partial_sums;
        static thread_local Scratch shared;
        build_work_items(items);
        int64_t rows = 0;
        for (const WorkItem &item : items) rows = std::max(rows, rows_of(item));
        rows = (rows + Unit::ROW_ALIGNMENT - 1) / Unit::ROW_ALIGNMENT * Unit::ROW_ALIGNMENT;
        const int64_t threads = thread_count(items), count = (int64_t)items.size() * a.kv_heads;
        const int64_t max_ranges = max_shared_ranges(items, threads);
        // With many items, a thread takes all heads of an item, because each prefetches the first keys of the next.
        const int64_t chunk = (int64_t)items.size() >= 4 * threads ? a.kv_heads : 1;
        allocate_sums(partial_sums, count * max_ranges, rows, shared);
        const std::vector<WorkItem> &shared_items = items;  // the calling thread's, because `items` is thread-local
        const std::vector<SoftmaxSums> &shared_sums = partial_sums;
#pragma omp parallel num_threads((int)threads)
        {
            static thread_local Scratch memory;
            [[maybe_unused]] const Unit unit{};
            const size_t value_words = a.values ? 0 : TILE / T::PER_WORD * width;
            ThreadWorkspace workspace(memory, rows, words, width, value_words, cache.expanded_words(),
                                      cache.scale_count());
#pragma omp for schedule(static)
            for (int64_t t = 0; t < a.tokens; t++) cache.store_token(t, workspace.row, workspace.rounded);
            if (max_ranges) {
                attend_shared_ranges(shared_items, shared_sums, workspace);
            } else {
#pragma omp for schedule(dynamic, chunk)
                for (int64_t i = 0; i < count; i++)
                    attend_all_ranges(shared_items[i / a.kv_heads], i % a.kv_heads, workspace);
            }
        }
    }
};

template <bool ROUNDED> void attend_float32(const ArgosyAttention &call) {
    if (call.block_size % LANES == 0)
        AttentionKernel<VectorUnit<Float, LANES>, ROUNDED>(call).run();
    else
        AttentionKernel<VectorUnit<Float, LANES / 2>, ROUNDED>(call).run();
}

template <bool ROUNDED> void attend_bfloat16(const ArgosyAttention &call) {
    if (call.block_size % LANES) return AttentionKernel<VectorUnit<Bfloat16, LANES / 2>, ROUNDED>(call).run();
#ifdef ARGOSY_AMX
    if (amx_allowed()) return AttentionKernel<MatrixUnit, ROUNDED>(call).run();
#endif
    AttentionKernel<VectorUnit<Bfloat16, LANES>, ROUNDED>(call).run();
}

}  // namespace
