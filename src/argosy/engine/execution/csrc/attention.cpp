// Paged causal attention for the CPU, behind a plain C ABI: rotates, stores new keys and values, then attends.
//
// Cache layout, per layer (W = min(16, block_size) keys side by side; D padded to 16 words):
//   keys   [block][kv head][block_size / W][words of D][W]   a word holds one float or two bfloat16
//   values [block][kv head][words of block_size][D]
// so that one 16-lane multiply-add takes 16 keys (scores) or 16 dimensions (values), and both are operands of
// vdpbf16ps and of the matrix unit as they lie. Every row (token, head) walks key tiles at absolute positions
// in order, with arithmetic that no other row touches: its result does not depend on the batch, the chunking or
// the threads. Every RANGE keys the sums begin anew and are merged in order, whoever made them, so that the threads
// can share a long context. Online softmax: Milakov & Gimelshein 2018; tiling as in FlashAttention (Dao et al. 2022).

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention_units.h"
#include "elements.h"

extern "C" {

// One call, all sizes in elements; mirrored field by field by native.py.
struct ArgosyAttention {
    const void *q;             // [tokens, heads, head_dim], rows of `q_stride`
    const void *k;             // [tokens, kv_heads, head_dim], rows of `k_stride`
    const void *v;             // [tokens, kv_heads, head_dim], rows of `v_stride`
    const float *cos;          // [tokens, turning], null with `sin` when nothing is rotated; see elements.h
    const float *sin;
    void *out;                 // [tokens, heads, head_dim]
    void *keys;                // this layer's cache
    void *values;
    const int64_t *positions;  // [tokens]
    const int64_t *slots;      // [tokens]
    const int32_t *cu_q;       // [sequences + 1]
    const int32_t *seq_lens;   // [sequences]
    const int32_t *pages;      // [sequences, page_stride]
    int64_t tokens, sequences, page_stride, q_stride, k_stride, v_stride;
    int64_t heads, kv_heads, head_dim, block_size, turning, window, threads;
    float scale, softcap;      // window 0 and softcap 0: none
};
}

namespace {

using namespace argosy;

constexpr int ROWS = 32;  // rows of a work item, unless one token has more heads
constexpr int64_t RANGE = 32 * TILE;  // keys whose sums are made together
constexpr int64_t THREAD_WORK = 1 << 17;  // elements of keys met by 16 rows in the time that it takes to wake a thread
constexpr float LOG2E = 1.44269504088896341f;
constexpr float NONE = -INFINITY;

// What the rows of an item have of some ranges of keys, one after the other.
struct Sums {
    std::vector<float> out, peak, total;

    Sums(int64_t rows, int64_t width) : out(rows * width), peak(rows), total(rows * LANES) {}
};

// One thread's working memory: a row is one head of one token.
struct Scratch {
    std::vector<uint32_t> q, key, weights, part;
    std::vector<float> scores, fade;
    Sums range, whole;

    Scratch(int64_t rows, int64_t width)
        : q(rows * width), key(width), weights(rows * TILE), part(LANES * width), scores(rows * TILE), fade(rows, 1.0f),
          range(rows, width), whole(rows, width) {}
};

struct Item {
    int64_t sequence, first, last;  // flat tokens first .. last - 1
};

template <class Unit> class Kernel {
    using T = typename Unit::T;
    using Scalar = typename T::Scalar;
    using Row = std::conditional_t<std::is_same_v<T, Bfloat16>, Bfloat16Row, FloatRow>;
    static constexpr int N = T::PER_WORD;
    static constexpr int W = Unit::PANEL;
    static constexpr int WORDS = TILE / N;

    const ArgosyAttention &a;
    const int64_t words = (a.head_dim + LANES * N - 1) / (LANES * N) * LANES;
    const int64_t width = words * N;  // the padded head dimension
    const int64_t group = a.heads / a.kv_heads;
    const int64_t head_words = a.block_size * words;  // of one block, keys or values
    const int64_t tile_tokens = std::max<int64_t>(1, ROWS / group);
    const std::vector<uint32_t> zeros = std::vector<uint32_t>(LANES * width);

    // Token t's row of head_dim elements to `to`, rotated.
    void load_row(uint32_t *to, const Scalar *from, int64_t t) const {
        std::memcpy(to, from, a.head_dim * sizeof(Scalar));
        if (a.turning) rotate<Row>((Scalar *)to, from, a.cos + t * a.turning, a.sin + t * a.turning, a.turning);
    }

    // Put token t's keys and values where the layout wants them.
    void store_token(int64_t t, Scratch &s) const {
        const int64_t block = a.slots[t] / a.block_size, offset = a.slots[t] % a.block_size;
        for (int64_t head = 0; head < a.kv_heads; head++) {
            const int64_t base = (block * a.kv_heads + head) * head_words;
            load_row(s.key.data(), (const Scalar *)a.k + t * a.k_stride + head * a.head_dim, t);
            const Scalar *v = (const Scalar *)a.v + t * a.v_stride + head * a.head_dim;
            uint32_t *key = (uint32_t *)a.keys + base + offset / W * W * words + offset % W;
            Scalar *value = (Scalar *)((uint32_t *)a.values + base + offset / N * width) + offset % N;
            for (int64_t word = 0; word < words; word++) key[word * W] = s.key[word];
            for (int64_t d = 0; d < a.head_dim; d++) value[d * N] = v[d];
        }
    }

    // Where the keys and values of tile `index` lie. Values past the sequence's end are taken as zero: a cache
    // block may still hold another sequence's there, not all of them finite.
    void locate(Tile &tile, const Item &item, int64_t head, int64_t index, Scratch &s) const {
        const int32_t *pages = a.pages + item.sequence * a.page_stride;
        const int64_t length = a.seq_lens[item.sequence];
        for (int i = 0; i < TILE / W; i++) {
            const int64_t at = index * TILE + i * W, held = std::min<int64_t>(W, length - at);
            tile.keys[i] = tile.values[i] = zeros.data();
            if (held <= 0) continue;
            const int64_t base = (pages[at / a.block_size] * a.kv_heads + head) * head_words;
            const int64_t panel = base + at % a.block_size / W * W * words;
            tile.keys[i] = (const uint32_t *)a.keys + panel;
            tile.values[i] = (const uint32_t *)a.values + panel;
            if (held < W) tile.values[i] = cut(tile.values[i], held, s);
        }
    }

    // A copy of a panel of values with zeros after the first `held` keys.
    const uint32_t *cut(const uint32_t *values, int64_t held, Scratch &s) const {
        const int64_t whole = held / N * width;
        std::copy_n(values, whole, s.part.begin());
        std::fill(s.part.begin() + whole, s.part.end(), 0u);
        if (held % N)  // the last key without its partner
            for (int64_t d = 0; d < width; d++) s.part[whole + d] = values[whole + d] & 0xffffu;
        return s.part.data();
    }

    f32x16 logits(f32x16 x) const {  // in units of log 2
        if (a.softcap == 0) return x * (a.scale * LOG2E);
        const f32x16 doubled = x * (a.scale / a.softcap * 2 * LOG2E);
        const f32x16 e = exp2_of(doubled > 126.0f ? broadcast(126.0f) : doubled);
        return (1.0f - 2.0f / (e + 1.0f)) * (a.softcap * LOG2E);  // tanh
    }

    // Scores of one row to weights: the online softmax. A row that sees nothing of the tile stays as it is.
    void soften(Scratch &s, int64_t row, int64_t position, int64_t start) const {
        const int64_t oldest = a.window ? position - a.window + 1 : 0;
        const bool whole = oldest <= start && position >= start + TILE - 1;
        const int from = (int)std::clamp<int64_t>(oldest - start, -1, TILE);
        const int to = (int)std::clamp<int64_t>(position - start, -1, TILE);
        const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        f32x16 score[PANELS];
        f32x16 best = broadcast(NONE);
        for (int p = 0; p < PANELS; p++) {
            score[p] = logits(load<f32x16>(s.scores.data() + row * TILE + p * LANES));
            if (!whole) {
                const i32x16 key = lane + p * LANES;
                score[p] = (key >= from) & (key <= to) ? score[p] : broadcast(NONE);
            }
            best = maximum(best, score[p]);
        }
        const float before = s.range.peak[row], now = std::max(before, reduce_max(best));
        const float base = now == NONE ? 0.0f : now;
        s.range.peak[row] = now;
        s.fade[row] = now == before ? 1.0f : exp2_of(broadcast(before - base))[0];
        f32x16 total = load<f32x16>(s.range.total.data() + row * LANES) * s.fade[row];
        uint32_t *weights = s.weights.data() + row * WORDS;
        for (int p = 0; p < PANELS; p++) {
            const f32x16 weight = exp2_of(score[p] - base);
            if constexpr (N == 2) {
                const u32x16 rounded = to_bfloat16(weight);
                store((uint16_t *)weights + p * LANES, halves(rounded));
                total += (f32x16)(rounded << 16);
            } else {
                store(weights + p * LANES, weight);
                total += weight;
            }
        }
        store(s.range.total.data() + row * LANES, total);
    }

    void clear(Sums &sums, int64_t rows) const {
        std::fill_n(sums.out.begin(), rows * width, 0.0f);
        std::fill_n(sums.total.begin(), rows * LANES, 0.0f);
        std::fill_n(sums.peak.begin(), rows, NONE);
    }

    // Add what the next range gave. What saw nothing adds nothing, exactly.
    void merge(Sums &sums, const Sums &next, int64_t rows) const {
        for (int64_t row = 0; row < rows; row++) {
            const float now = std::max(sums.peak[row], next.peak[row]), base = now == NONE ? 0.0f : now;
            const float old_fade = exp2_of(broadcast(sums.peak[row] - base))[0];
            const float new_fade = exp2_of(broadcast(next.peak[row] - base))[0];
            sums.peak[row] = now;
            float *total = sums.total.data() + row * LANES, *out = sums.out.data() + row * width;
            store(total, load<f32x16>(total) * old_fade + load<f32x16>(next.total.data() + row * LANES) * new_fade);
            for (int64_t d = 0; d < width; d += LANES)
                store(out + d, load<f32x16>(out + d) * old_fade +
                                   load<f32x16>(next.out.data() + row * width + d) * new_fade);
        }
    }

    void load_queries(Scratch &s, const Item &item, int64_t head, int64_t rows) const {
        std::fill_n(s.q.begin(), rows * words, 0u);
        for (int64_t row = 0; row < rows; row++) {
            const int64_t t = item.first + row / group, h = head * group + row % group;
            load_row(s.q.data() + row * words, (const Scalar *)a.q + t * a.q_stride + h * a.head_dim, t);
        }
    }

    void store_rows(const Sums &sums, const Item &item, int64_t head, int64_t rows) const {
        for (int64_t row = 0; row < rows; row++) {
            const int64_t t = item.first + row / group, h = head * group + row % group;
            Scalar *out = (Scalar *)a.out + (t * a.heads + h) * a.head_dim;
            const float total = reduce_sum(load<f32x16>(sums.total.data() + row * LANES));
            for (int64_t d = 0; d < a.head_dim; d += LANES) {
                // Adding zero turns -0, which depends on how many masked keys were summed, into 0.
                const f32x16 x = load<f32x16>(sums.out.data() + row * width + d) / total + 0.0f;
                const size_t bytes = std::min<int64_t>(LANES, a.head_dim - d) * sizeof(Scalar);
                if constexpr (N == 2) {
                    const u16x16 rounded = halves(to_bfloat16(x));
                    std::memcpy(out + d, &rounded, bytes);
                } else {
                    std::memcpy(out + d, &x, bytes);
                }
            }
        }
    }

    // The ranges that an item's rows see: from .first to .second, both included.
    std::pair<int64_t, int64_t> ranges(const Item &item) const {
        const int64_t oldest = a.window ? std::max<int64_t>(0, a.positions[item.first] - a.window + 1) : 0;
        return {oldest / RANGE, a.positions[item.last - 1] / RANGE};
    }

    // One range of keys into s.range.
    void attend(const Item &item, int64_t head, int64_t range, Scratch &s) const {
        const int64_t rows = (item.last - item.first) * group;
        const int64_t padded = (rows + Unit::ALIGN - 1) / Unit::ALIGN * Unit::ALIGN;
        const int64_t oldest = a.window ? std::max<int64_t>(0, a.positions[item.first] - a.window + 1) : 0;
        const int64_t newest = std::min(a.positions[item.last - 1], (range + 1) * RANGE - 1);
        clear(s.range, rows);
        for (int64_t index = std::max(oldest, range * RANGE) / TILE; index <= newest / TILE; index++) {
            Tile tile;
            locate(tile, item, head, index, s);
            Unit::score(s.q.data(), padded, words, tile, s.scores.data());
            for (int64_t row = 0; row < rows; row++)
                soften(s, row, a.positions[item.first + row / group], index * TILE);
            Unit::weigh(s.weights.data(), padded, tile, s.fade.data(), s.range.out.data(), width);
        }
    }

    // All of an item's ranges by one thread.
    void attend_alone(const Item &item, int64_t head, Scratch &s) const {
        const int64_t rows = (item.last - item.first) * group;
        const auto [first, last] = ranges(item);
        load_queries(s, item, head, rows);
        attend(item, head, first, s);
        if (first == last) return store_rows(s.range, item, head, rows);
        std::swap(s.whole, s.range);
        for (int64_t range = first + 1; range <= last; range++) {
            attend(item, head, range, s);
            merge(s.whole, s.range, rows);
        }
        store_rows(s.whole, item, head, rows);
    }

    // The ranges of few items, shared by the threads, then merged.
    void attend_together(const std::vector<Item> &items, Scratch &s, std::vector<std::vector<Sums>> &parts) const {
        const int64_t rows_most = (int64_t)s.fade.size();
#pragma omp single
        for (const Item &item : items)
            for (int64_t head = 0; head < a.kv_heads; head++) {
                const auto [first, last] = ranges(item);
                parts.emplace_back(last - first + 1, Sums(rows_most, width));
            }
        int64_t most = 0;
        for (const std::vector<Sums> &each : parts) most = std::max<int64_t>(most, each.size());
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < most * (int64_t)parts.size(); i++) {
            const int64_t pair = i % parts.size(), at = i / parts.size();
            if (at >= (int64_t)parts[pair].size()) continue;
            const Item &item = items[pair / a.kv_heads];
            load_queries(s, item, pair % a.kv_heads, (item.last - item.first) * group);
            attend(item, pair % a.kv_heads, ranges(item).first + at, s);
            std::swap(parts[pair][at], s.range);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t pair = 0; pair < (int64_t)parts.size(); pair++) {
            const Item &item = items[pair / a.kv_heads];
            const int64_t rows = (item.last - item.first) * group;
            std::swap(s.whole, parts[pair].front());
            for (size_t at = 1; at < parts[pair].size(); at++) merge(s.whole, parts[pair][at], rows);
            store_rows(s.whole, item, pair % a.kv_heads, rows);
        }
    }

    // How many threads are worth waking.
    int64_t hands(const std::vector<Item> &items) const {
        int64_t cost = 0;
        for (const Item &item : items) {
            const int64_t newest = a.positions[item.last - 1] + 1, rows = (item.last - item.first) * group;
            cost += (a.window ? std::min(newest, a.window + rows) : newest) * ((rows + 15) / 16);
        }
        return std::clamp<int64_t>(cost * a.kv_heads * width / THREAD_WORK, 1, a.threads);
    }

    // Whether whole items would leave threads idle at the end.
    bool uneven(const std::vector<Item> &items, int64_t threads) const {
        const int64_t count = (int64_t)items.size() * a.kv_heads;
        if (threads == 1 || count >= 4 * threads) return false;
        int64_t longest = 0, all = 0;
        for (const Item &item : items) {
            const auto [first, last] = ranges(item);
            longest = std::max(longest, last - first + 1);
            all += (last - first + 1) * a.kv_heads;
        }
        return longest > 1 && (count % threads || longest * threads > all);
    }

    // Work items, costliest (longest context) first so that the threads end together.
    std::vector<Item> plan() const {
        std::vector<Item> items;
        for (int64_t sequence = 0; sequence < a.sequences; sequence++)
            for (int64_t first = a.cu_q[sequence]; first < a.cu_q[sequence + 1]; first += tile_tokens)
                items.push_back({sequence, first, std::min<int64_t>(first + tile_tokens, a.cu_q[sequence + 1])});
        const auto cost = [&](const Item &i) { return (i.last - i.first + 1) * a.positions[i.last - 1]; };
        std::stable_sort(items.begin(), items.end(), [&](const Item &x, const Item &y) { return cost(x) > cost(y); });
        return items;
    }

  public:
    explicit Kernel(const ArgosyAttention &call) : a(call) {}

    void run() const {
        const std::vector<Item> items = plan();
        const int64_t count = (int64_t)items.size() * a.kv_heads;
        const int64_t rows = (tile_tokens * group + Unit::ALIGN - 1) / Unit::ALIGN * Unit::ALIGN;
        const int64_t threads = hands(items);
        const bool together = uneven(items, threads);
        std::vector<std::vector<Sums>> parts;
#pragma omp parallel num_threads((int)threads)
        {
            [[maybe_unused]] const Unit unit{};
            Scratch scratch(rows, width);
#pragma omp for schedule(static)
            for (int64_t t = 0; t < a.tokens; t++) store_token(t, scratch);
            if (together) {
                attend_together(items, scratch, parts);
            } else {
#pragma omp for schedule(dynamic, 1)
                for (int64_t i = 0; i < count; i++) attend_alone(items[i / a.kv_heads], i % a.kv_heads, scratch);
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
