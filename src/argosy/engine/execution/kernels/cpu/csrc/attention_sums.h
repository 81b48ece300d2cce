// Online softmax (Milakov & Gimelshein 2018): conversion of scores to weights, and merging of sums in order.
#pragma once

#include <algorithm>

#include "attention_units.h"
#include "scratch.h"

namespace argosy {

constexpr float LOG2E = 1.44269504088896341f;
constexpr float NO_SCORE = -INFINITY;

// Softmax sums of consecutive rows over some keys: weighted values, largest score, and sum of the weights by lane.
struct SoftmaxSums {
    float *out, *peak, *total;

    static size_t scratch_lines(int64_t rows, int64_t width) {
        return Scratch::lines_for<float>(rows * width) + Scratch::lines_for<float>(rows) +
               Scratch::lines_for<float>(rows * LANES);
    }

    static SoftmaxSums allocate(Scratch &memory, int64_t rows, int64_t width) {
        return {memory.allocate<float>(rows * width), memory.allocate<float>(rows),
                memory.allocate<float>(rows * LANES)};
    }

    void clear(int64_t rows, int64_t width) const {
        std::fill_n(out, rows * width, 0.0f);
        std::fill_n(total, rows * LANES, 0.0f);
        std::fill_n(peak, rows, NO_SCORE);
    }
};

// Store a row's weights of a tile as words, rounded to the element type. Returns `sum` plus the rounded weights, or
// with the `scales` of values, which the stored weights are multiplied by, plus the weights.
template <class T>
inline f32x16 store_weights(uint32_t *words, f32x16 (&weight)[PANELS], const float *scales, f32x16 sum) {
    constexpr bool pairs = T::PER_WORD == 2;
    constexpr uint32_t ones = pairs ? 0x3f803f80u : 0x3f800000u;
    for (int p = 0; scales && p < PANELS; p++) {
        sum += weight[p];
        weight[p] *= load<f32x16>(scales + p * LANES);
    }
    for (int p = 0; p < PANELS; p += T::PER_WORD, words += LANES) {
        if constexpr (pairs)
            store_bfloat16(words, weight[p], weight[p + 1]);
        else
            store(words, weight[p]);
        if (!scales) sum = T::madd(sum, ones, load<u32x16>(words));
    }
    return sum;
}

// Softmax with a layer's scale, softcap and sliding window.
class Softmax {
    const float scale, softcap;
    const int64_t window;
    const float score_scale_log2;  // factor from scores to exponents of 2

    f32x16 apply_softcap(f32x16 x) const {  // tanh(x * scale / softcap)
        const f32x16 doubled = x * (scale / softcap * 2 * LOG2E);
        return 1.0f - 2.0f / (exp2_lanes(doubled > 126.0f ? broadcast(126.0f) : doubled) + 1.0f);
    }

    // Factor that rescales sums from one peak to a larger one.
    float rescale_factor(float old_peak, float new_peak) const {
        return exp2_lanes(broadcast((old_peak - (new_peak == NO_SCORE ? 0.0f : new_peak)) * score_scale_log2))[0];
    }

  public:
    Softmax(float scale, float softcap, int64_t window)
        : scale(scale), softcap(softcap), window(window), score_scale_log2((softcap == 0 ? scale : softcap) * LOG2E) {}

    // First position that the token at `position` attends to.
    int64_t first_visible(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }

    // Convert the scores of a row at `position` over the tile at `start` to weights. Returns the factor that rescales
    // the row's earlier sums. A row that sees no key of the tile keeps its sums. `scales` are null, or [2][TILE]: those
    // of the keys and of the values.
    template <class T>
    float scores_to_weights(const float *scores, const float *scales, int64_t position, int64_t start,
                            uint32_t *weights, float &peak, float *total) const {
        const int64_t first = first_visible(position) - start, last = position - start;
        f32x16 score[PANELS];
        for (int p = 0; p < PANELS; p++) score[p] = load<f32x16>(scores + p * LANES);
        for (int p = 0; scales && p < PANELS; p++) score[p] *= load<f32x16>(scales + p * LANES);
        if (softcap != 0)
            for (int p = 0; p < PANELS; p++) score[p] = apply_softcap(score[p]);
        if (first > 0 || last < TILE - 1) {
            const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            const int from = (int)std::clamp<int64_t>(first, 0, TILE), to = (int)std::clamp<int64_t>(last, -1, TILE);
            for (int p = 0; p < PANELS; p++)
                score[p] = (lane + p * LANES >= from) & (lane + p * LANES <= to) ? score[p] : broadcast(NO_SCORE);
        }
        f32x16 largest = score[0];
        for (int p = 1; p < PANELS; p++) largest = maximum(largest, score[p]);
        const float old_peak = peak, new_peak = std::max(old_peak, reduce_max(largest));
        const float factor = new_peak == old_peak ? 1.0f : rescale_factor(old_peak, new_peak);
        const float base = new_peak == NO_SCORE ? 0.0f : new_peak * score_scale_log2;
        for (int p = 0; p < PANELS; p++) score[p] = exp2_lanes(score[p] * score_scale_log2 - base);
        const float *value_scales = scales ? scales + TILE : nullptr;
        store(total, store_weights<T>(weights, score, value_scales, load<f32x16>(total) * factor));
        peak = new_peak;
        return factor;
    }

    // Weight of an attention sink relative to a row's largest score. It is infinite if all scores are far below it.
    float sink_weight(float sink, float peak) const {
        return exp2_lanes(broadcast(std::min(sink * LOG2E - peak * score_scale_log2, 126.0f)))[0];
    }

    // Merge the sums of the next range of keys into `sums`. A range without visible keys adds exactly zero.
    void merge(const SoftmaxSums &sums, const SoftmaxSums &next, int64_t rows, int64_t width) const {
        for (int64_t row = 0; row < rows; row++) {
            const float new_peak = std::max(sums.peak[row], next.peak[row]);
            const float old_factor = rescale_factor(sums.peak[row], new_peak);
            const float new_factor = rescale_factor(next.peak[row], new_peak);
            sums.peak[row] = new_peak;
            const auto add = [&](float *to, const float *from) {
                store(to, load<f32x16>(to) * old_factor + load<f32x16>(from) * new_factor);
            };
            add(sums.total + row * LANES, next.total + row * LANES);
            for (int64_t d = 0; d < width; d += LANES) add(sums.out + row * width + d, next.out + row * width + d);
        }
    }
};

}  // namespace argosy
