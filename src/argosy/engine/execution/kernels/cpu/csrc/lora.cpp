// out += B . round(A . x) for rows that have adapters (LoRA, Hu et al. 2021), behind a C ABI.
//
// Each sum is in the order of its columns or ranks, in two sums of alternating words for A and one for B, whatever
// number of rows is computed together. Rows without an adapter are neither read nor written.
//
// Packed A: [ceil(ranks / 16)][words of a row][16 ranks]. Packed B: for each run of outputs
// [ceil(outputs / 16)][words of its ranks][16 outputs]. A word holds one float32, or two neighbours in bfloat16. All
// are padded with zeros.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "scratch.h"
#include "threads.h"

extern "C" {

// Outputs `first .. first + outputs` of a layer, which the ranks `first_rank .. first_rank + ranks` change.
struct ArgosyLoraRun {
    int64_t first, outputs, first_rank, ranks;
};

// Adapter of one layer. native_kernels.py mirrors both structs field by field.
struct ArgosyLoraWeights {
    const void *a, *b;
    const float *gain, *offset;  // null, or one value for each output of the layer
    const ArgosyLoraRun *runs;
    int64_t ranks, num_runs;
};

struct ArgosyLora {
    const void *x;                            // rows of `cols` elements, `x_stride` apart
    void *out;                                // [.., outs], changed in place: (out + B h) * gain + offset
    const int64_t *rows;                      // rows of x and out, sorted by adapter
    const int64_t *starts;                    // [segments + 1] into `rows`
    const ArgosyLoraWeights *const *weights;  // of each segment, `weights_stride` apart; null if the layer is unchanged
    int64_t segments, weights_stride, cols, outs, x_stride, threads;
};
}

namespace {

using namespace argosy;

constexpr int TILE_ROWS = 4;                        // rows that share a load of the weights
constexpr int64_t ITEM_PANELS = 16;                 // panels of outputs in a work item
constexpr int64_t CHUNKS_PER_THREAD = 8;
constexpr int64_t MIN_THREAD_WEIGHTS = 1 << 16;     // weights that a thread multiplies while another one wakes up

int64_t ceil_div(int64_t total, int64_t divisor) { return (total + divisor - 1) / divisor; }

template <class Element, class Row> struct LoraKernel {
    using Scalar = typename Row::Scalar;
    static constexpr int64_t PER_WORD = Element::PER_WORD;

    const ArgosyLora &a;
    Scalar *hidden = nullptr;  // [rows][hidden_stride]
    int64_t hidden_stride = 0;

    const ArgosyLoraWeights *weights_of(int64_t segment) const { return a.weights[segment * a.weights_stride]; }

    // Ranks PANELS * 16 of R rows from `row` on, a position in `rows`.
    template <int R, int PANELS> void project(const ArgosyLoraWeights &w, int64_t row, int64_t panel) const {
        const int64_t full = a.cols / PER_WORD, words = ceil_div(a.cols, PER_WORD);
        const uint8_t *weight[PANELS];
        for (int p = 0; p < PANELS; p++) weight[p] = (const uint8_t *)w.a + (panel + p) * words * 64;
        const uint8_t *x[R];
        for (int r = 0; r < R; r++) x[r] = (const uint8_t *)((const Scalar *)a.x + a.rows[row + r] * a.x_stride);
        f32x16 sum[2][R][PANELS]{};
        const auto add = [&](f32x16(&to)[R][PANELS], int64_t word, auto load_word) {
            for (int p = 0; p < PANELS; p++) {
                const u32x16 values = load<u32x16>(weight[p] + word * 64);
                for (int r = 0; r < R; r++) to[r][p] = Element::madd(to[r][p], load_word(x[r] + word * 4), values);
            }
        };
        const auto load_half = [](const uint8_t *from) { return (uint32_t)load<uint16_t>(from); };
        int64_t word = 0;
        for (; word + 2 <= full; word += 2) {
            add(sum[0], word, load<uint32_t>);
            add(sum[1], word + 1, load<uint32_t>);
        }
        for (; word < full; word++) add(sum[0], word, load<uint32_t>);
        if (full < words) add(sum[full % 2], full, load_half);
        for (int r = 0; r < R; r++)
            for (int p = 0; p < PANELS; p++)
                Row::store_lanes(hidden + (row + r) * hidden_stride + (panel + p) * LANES, sum[0][r][p] + sum[1][r][p],
                                 LANES);
    }

    // A panel of outputs of R rows from `row` on.
    template <int R>
    void expand(const ArgosyLoraWeights &w, const ArgosyLoraRun &run, const uint8_t *b, int64_t row,
                int64_t output) const {
        f32x16 sum[R]{};
        for (int64_t word = 0; word < run.ranks / PER_WORD; word++) {
            const u32x16 values = load<u32x16>(b + word * 64);
            for (int r = 0; r < R; r++) {
                const Scalar *h = hidden + (row + r) * hidden_stride + run.first_rank;
                sum[r] = Element::madd(sum[r], load<uint32_t>((const uint8_t *)h + word * 4), values);
            }
        }
        const int64_t count = std::min<int64_t>(LANES, run.outputs - output), first = run.first + output;
        for (int r = 0; r < R; r++) {
            Scalar *out = (Scalar *)a.out + a.rows[row + r] * a.outs + first;
            f32x16 value = Row::load_lanes(out, count) + sum[r];
            if (w.gain) value = value * FloatRow::load_lanes(w.gain + first, count);
            if (w.offset) value = value + FloatRow::load_lanes(w.offset + first, count);
            Row::store_lanes(out, value, count);
        }
    }

    template <int R = 1>
    void project_rows(int64_t count, const ArgosyLoraWeights &w, int64_t row, int64_t panel) const {
        if constexpr (R < TILE_ROWS)
            if (count > R) return project_rows<R + 1>(count, w, row, panel);
        panel + 1 < ceil_div(w.ranks, LANES) ? project<R, 2>(w, row, panel) : project<R, 1>(w, row, panel);
    }

    template <int R = 1>
    void expand_rows(int64_t count, const ArgosyLoraWeights &w, const ArgosyLoraRun &run, const uint8_t *b, int64_t row,
                     int64_t output) const {
        if constexpr (R < TILE_ROWS)
            if (count > R) return expand_rows<R + 1>(count, w, run, b, row, output);
        expand<R>(w, run, b, row, output);
    }

    // Panels `first .. end` of the outputs of all runs.
    void expand_panels(const ArgosyLoraWeights &w, int64_t row, int64_t count, int64_t first, int64_t end) const {
        const uint8_t *b = (const uint8_t *)w.b;
        int64_t panel = 0;
        for (int64_t i = 0; i < w.num_runs && panel < end; i++) {
            const ArgosyLoraRun &run = w.runs[i];
            const int64_t panels = ceil_div(run.outputs, LANES), bytes = run.ranks / PER_WORD * 64;
            for (int64_t p = std::max<int64_t>(0, first - panel); p < std::min(panels, end - panel); p++)
                expand_rows(count, w, run, b + p * bytes, row, p * LANES);
            panel += panels;
            b += panels * bytes;
        }
    }
};

// Call `work(weights, first row, rows, item)` for each tile of rows and each item of its segment, on this team's threads.
template <class Kernel, class Count, class Work> void share(const Kernel &kernel, Count count_items, Work work) {
    const ArgosyLora &a = kernel.a;
    int64_t total = 0;
    const auto tiles_of = [&](int64_t segment) { return ceil_div(a.starts[segment + 1] - a.starts[segment], TILE_ROWS); };
    for (int64_t segment = 0; segment < a.segments; segment++)
        if (const auto *w = kernel.weights_of(segment)) total += tiles_of(segment) * count_items(*w);
    // Small chunks, so that no thread waits for one whose core does other work too.
    const int64_t chunk = std::max<int64_t>(1, total / (CHUNKS_PER_THREAD * omp_get_num_threads()));
#pragma omp for schedule(dynamic, chunk)
    for (int64_t index = 0; index < total; index++) {
        int64_t segment = 0, rest = index;
        for (;; segment++) {
            const auto *w = kernel.weights_of(segment);
            const int64_t items = w ? tiles_of(segment) * count_items(*w) : 0;
            if (rest < items) break;
            rest -= items;
        }
        const ArgosyLoraWeights &w = *kernel.weights_of(segment);
        const int64_t tiles = tiles_of(segment), row = a.starts[segment] + rest % tiles * TILE_ROWS;
        work(w, row, std::min<int64_t>(TILE_ROWS, a.starts[segment + 1] - row), rest / tiles);
    }
}

int64_t count_output_panels(const ArgosyLoraWeights &w) {
    int64_t panels = 0;
    for (int64_t i = 0; i < w.num_runs; i++) panels += ceil_div(w.runs[i].outputs, LANES);
    return panels;
}

template <class Element, class Row> void run_lora(const ArgosyLora &a) {
    LoraKernel<Element, Row> kernel{a};
    int64_t work = 0;
    for (int64_t segment = 0; segment < a.segments; segment++)
        if (const auto *w = kernel.weights_of(segment)) {
            kernel.hidden_stride = std::max(kernel.hidden_stride, ceil_div(w->ranks, LANES) * LANES);
            work += (a.starts[segment + 1] - a.starts[segment]) * w->ranks * (a.cols + a.outs / w->num_runs);
        }
    if (work == 0) return;
    kernel.hidden = (typename Row::Scalar *)thread_buffer<3>(a.starts[a.segments] * kernel.hidden_stride *
                                                             sizeof(typename Row::Scalar));
    const int threads = (int)std::clamp<int64_t>(work / MIN_THREAD_WEIGHTS, 1, limit_threads(a.threads));
#pragma omp parallel num_threads(threads)
    {
        share(
            kernel, [](const ArgosyLoraWeights &w) { return ceil_div(w.ranks, 2 * LANES); },
            [&](const ArgosyLoraWeights &w, int64_t row, int64_t count, int64_t item) {
                kernel.project_rows(count, w, row, item * 2);
            });
        share(
            kernel, [](const ArgosyLoraWeights &w) { return ceil_div(count_output_panels(w), ITEM_PANELS); },
            [&](const ArgosyLoraWeights &w, int64_t row, int64_t count, int64_t item) {
                kernel.expand_panels(w, row, count, item * ITEM_PANELS, (item + 1) * ITEM_PANELS);
            });
    }
}

}  // namespace

extern "C" {

void argosy_lora_float32(const ArgosyLora *call) { run_lora<Float, FloatRow>(*call); }
void argosy_lora_bfloat16(const ArgosyLora *call) { run_lora<Bfloat16, Bfloat16Row>(*call); }
}
