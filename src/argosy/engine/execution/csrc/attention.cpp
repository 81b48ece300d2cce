// Paged causal attention for the CPU, behind a plain C ABI: rotates, stores new keys and values, then attends.
//
// Every row (token, head) walks key tiles at absolute positions in order, with arithmetic that no other row touches:
// its result does not depend on the batch, the chunking or the threads. Every RANGE keys the sums begin anew and are merged
// in order, whoever made them, so that the threads can share a long context. Tiling as in FlashAttention (Dao et al.
// 2022); the next tile is fetched while one is worked on, since pages lie where no hardware would look for them.

#include <algorithm>
#include <utility>
#include <vector>

#include "attention_cache.h"
#include "attention_sums.h"

namespace {

using namespace argosy;

constexpr int ROWS = 32;  // rows of a work item, unless one token has more heads
constexpr int64_t RANGE = 32 * TILE;  // keys whose sums are made together
constexpr int64_t THREAD_WORK = 1 << 17;  // elements of keys met by 16 rows in the time that it takes to wake a thread

struct Item {
    int64_t sequence, first, last;  // flat tokens first .. last - 1
};

// What one thread works in: a row is one head of one token.
struct Desk {
    uint32_t *q, *row, *weights, *panel;
    float *scores, *fade;
    Sums sums, next;

    Desk(Scratch &memory, int64_t rows, int64_t words, int64_t width) {
        memory.reset(Scratch::lines_of<uint32_t>(rows * words) + 2 * Scratch::lines_of<uint32_t>(rows * TILE) +
                     Scratch::lines_of<uint32_t>(words) + Scratch::lines_of<uint32_t>(LANES * width) +
                     Scratch::lines_of<float>(rows) + 2 * Sums::lines(rows, width));
        q = memory.take<uint32_t>(rows * words);
        row = memory.take<uint32_t>(words);
        weights = memory.take<uint32_t>(rows * TILE);
        panel = memory.take<uint32_t>(LANES * width);
        scores = memory.take<float>(rows * TILE);
        fade = memory.take<float>(rows);
        sums = Sums::in(memory, rows, width);
        next = Sums::in(memory, rows, width);
        std::fill_n(fade, rows, 1.0f);
    }
};

template <class Unit> class Kernel {
    using T = typename Unit::T;
    using Scalar = typename T::Scalar;

    const ArgosyAttention &a;
    const Cache<Unit> cache{a};
    const Softmax softmax{a.scale, a.softcap, a.window};
    const int64_t words = cache.words, width = cache.width;
    const int64_t group = a.heads / a.kv_heads;
    const int64_t tile_tokens = std::max<int64_t>(1, ROWS / group);

    int64_t rows_of(const Item &item) const { return (item.last - item.first) * group; }

    void load_queries(Desk &desk, const Item &item, int64_t head) const {
        for (int64_t row = 0; row < rows_of(item); row++)
            cache.load_row(desk.q + row * words, a.q, a.q_stride, item.first + row / group, head * group + row % group);
    }

    void store_rows(const Sums &sums, const Item &item, int64_t head) const {
        for (int64_t row = 0; row < rows_of(item); row++) {
            const int64_t t = item.first + row / group, h = head * group + row % group;
            Scalar *out = (Scalar *)a.out + (t * a.heads + h) * a.head_dim;
            const float total = reduce_sum(load<f32x16>(sums.total + row * LANES));
            for (int64_t d = 0; d < a.head_dim; d += LANES) {
                // Adding zero turns -0, which depends on how many masked keys were summed, into 0.
                const f32x16 x = load<f32x16>(sums.out + row * width + d) / total + 0.0f;
                Cache<Unit>::Row::put(out + d, x, a.head_dim - d);
            }
        }
    }

    // The ranges that an item's rows see: from .first to .second, both included.
    std::pair<int64_t, int64_t> ranges(const Item &item) const {
        return {softmax.oldest(a.positions[item.first]) / RANGE, a.positions[item.last - 1] / RANGE};
    }

    // Where the tiles of an item's range begin.
    int64_t begin(const Item &item, int64_t range) const {
        return std::max(softmax.oldest(a.positions[item.first]), range * RANGE) / TILE * TILE;
    }

    // One range of keys into `sums`. head_after: the kv head whose keys are probably wanted next.
    void attend(const Item &item, int64_t head, int64_t head_after, int64_t range, const Sums &sums,
                Desk &desk) const {
        const int64_t rows = rows_of(item), padded = (rows + Unit::ALIGN - 1) / Unit::ALIGN * Unit::ALIGN;
        const int64_t newest = std::min(a.positions[item.last - 1], (range + 1) * RANGE - 1);
        sums.clear(rows, width);
        Tile next = cache.tile(item.sequence, head, begin(item, range), newest, desk.panel);
        for (int64_t start = begin(item, range); start <= newest; start += TILE) {
            const Tile tile = next;
            const bool last = start + TILE > newest;
            next = last ? cache.tile(item.sequence, head_after, begin(item, range), newest, nullptr)
                        : cache.tile(item.sequence, head, start + TILE, newest, desk.panel);
            Unit::score(desk.q, padded, words, tile, next, desk.scores);
            for (int64_t row = 0; row < rows; row++)
                desk.fade[row] = softmax.soften<T>(desk.scores + row * TILE, a.positions[item.first + row / group],
                                                   start, desk.weights + row * Unit::WORDS, sums.peak[row],
                                                   sums.total + row * LANES);
            Unit::weigh(desk.weights, padded, tile, next, desk.fade, sums.out, width);
        }
    }

    // All of an item's ranges by one thread.
    void attend_alone(const Item &item, int64_t head, Desk &desk) const {
        const auto [first, last] = ranges(item);
        load_queries(desk, item, head);
        const int64_t head_after = std::min(head + 1, a.kv_heads - 1);
        attend(item, head, head_after, first, desk.sums, desk);
        for (int64_t range = first + 1; range <= last; range++) {
            attend(item, head, head_after, range, desk.next, desk);
            softmax.merge(desk.sums, desk.next, rows_of(item), width);
        }
        store_rows(desk.sums, item, head);
    }

    // The ranges of few items, shared by the threads, then merged.
    void attend_together(const std::vector<Item> &items, const std::vector<Sums> &parts, Desk &desk) const {
        const int64_t pairs = (int64_t)items.size() * a.kv_heads, most = (int64_t)parts.size() / pairs;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pairs * most; i++) {
            const int64_t pair = i % pairs, at = i / pairs, head = pair % a.kv_heads;
            const Item &item = items[pair / a.kv_heads];
            const auto [first, last] = ranges(item);
            if (first + at > last) continue;
            load_queries(desk, item, head);
            attend(item, head, head, first + at, parts[pair * most + at], desk);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t pair = 0; pair < pairs; pair++) {
            const Item &item = items[pair / a.kv_heads];
            const auto [first, last] = ranges(item);
            const Sums *part = parts.data() + pair * most;
            for (int64_t at = 1; at <= last - first; at++) softmax.merge(part[0], part[at], rows_of(item), width);
            store_rows(part[0], item, pair % a.kv_heads);
        }
    }

    // How many threads are worth waking.
    int64_t hands(const std::vector<Item> &items) const {
        int64_t cost = 0;
        for (const Item &item : items) {
            const int64_t newest = a.positions[item.last - 1] + 1, rows = rows_of(item);
            cost += (a.window ? std::min(newest, a.window + rows) : newest) * ((rows + 15) / 16);
        }
        return std::clamp<int64_t>(cost * a.kv_heads * width / THREAD_WORK, 1, a.threads);
    }

    // Into how many ranges the items are split: 0 where whole items keep all threads busy to the end.
    int64_t split(const std::vector<Item> &items, int64_t threads) const {
        const int64_t count = (int64_t)items.size() * a.kv_heads;
        if (threads == 1 || count >= 4 * threads) return 0;
        int64_t longest = 0, all = 0;
        for (const Item &item : items) {
            const auto [first, last] = ranges(item);
            longest = std::max(longest, last - first + 1);
            all += (last - first + 1) * a.kv_heads;
        }
        return longest > 1 && (count % threads || longest * threads > all) ? longest : 0;
    }

    // Work items, costliest (longest context) first so that the threads end together.
    void plan(std::vector<Item> &items) const {
        items.clear();
        for (int64_t sequence = 0; sequence < a.sequences; sequence++)
            for (int64_t first = a.cu_q[sequence]; first < a.cu_q[sequence + 1]; first += tile_tokens)
                items.push_back({sequence, first, std::min<int64_t>(first + tile_tokens, a.cu_q[sequence + 1])});
        const auto cost = [&](const Item &i) { return (i.last - i.first + 1) * a.positions[i.last - 1]; };
        std::stable_sort(items.begin(), items.end(), [&](const Item &x, const Item &y) { return cost(x) > cost(y); });
    }

    // Sums for so many ranges of every pair of item and head.
    void lay_out(std::vector<Sums> &parts, int64_t count, int64_t rows, Scratch &memory) const {
        memory.reset(count * Sums::lines(rows, width));
        parts.clear();
        for (int64_t i = 0; i < count; i++) parts.push_back(Sums::in(memory, rows, width));
    }

  public:
    explicit Kernel(const ArgosyAttention &call) : a(call) {}

    void run() const {
        static thread_local std::vector<Item> items;
        static thread_local std::vector<Sums> parts;
        static thread_local Scratch shared;
        plan(items);
        int64_t rows = 0;
        for (const Item &item : items) rows = std::max(rows, rows_of(item));
        rows = (rows + Unit::ALIGN - 1) / Unit::ALIGN * Unit::ALIGN;
        const int64_t threads = hands(items), count = (int64_t)items.size() * a.kv_heads, most = split(items, threads);
        // Where there are many, a thread takes all heads of an item: each fetches what the next one begins with.
        const int64_t chunk = (int64_t)items.size() >= 4 * threads ? a.kv_heads : 1;
        lay_out(parts, count * most, rows, shared);
        const std::vector<Item> &work = items;  // this thread's, not each thread's own
        const std::vector<Sums> &ranges_of = parts;
#pragma omp parallel num_threads((int)threads)
        {
            static thread_local Scratch memory;
            [[maybe_unused]] const Unit unit{};
            Desk desk(memory, rows, words, width);
#pragma omp for schedule(static)
            for (int64_t t = 0; t < a.tokens; t++) cache.store_token(t, desk.row);
            if (most) {
                attend_together(work, ranges_of, desk);
            } else {
#pragma omp for schedule(dynamic, chunk)
                for (int64_t i = 0; i < count; i++) attend_alone(work[i / a.kv_heads], i % a.kv_heads, desk);
            }
        }
    }
};

}  // namespace

extern "C" {

void argosy_attention_float32(const ArgosyAttention *call) {
    if (call->block_size % LANES == 0)
        Kernel<VectorUnit<Float, LANES>>(*call).run();
    else
        Kernel<VectorUnit<Float, LANES / 2>>(*call).run();
}

void argosy_attention_bfloat16(const ArgosyAttention *call) {
    if (call->block_size % LANES) return Kernel<VectorUnit<Bfloat16, LANES / 2>>(*call).run();
#ifdef ARGOSY_AMX
    if (amx_allowed()) return Kernel<MatrixUnit>(*call).run();
#endif
    Kernel<VectorUnit<Bfloat16, LANES>>(*call).run();
}
}
