// The online softmax of rows (Milakov & Gimelshein 2018): scores to weights, and sums merged in order.
#pragma once

#include <algorithm>

#include "attention_units.h"
#include "scratch.h"

namespace argosy {

constexpr float LOG2E = 1.44269504088896341f;
constexpr float NONE = -INFINITY;

// What rows have of some keys, one after the other: weighted values, the greatest score, and the weights' sum by lanes.
struct Sums {
    float *out, *peak, *total;

    static size_t lines(int64_t rows, int64_t width) {
        return Scratch::lines_of<float>(rows * width) + Scratch::lines_of<float>(rows) +
               Scratch::lines_of<float>(rows * LANES);
    }

    static Sums in(Scratch &memory, int64_t rows, int64_t width) {
        return {memory.take<float>(rows * width), memory.take<float>(rows), memory.take<float>(rows * LANES)};
    }

    void clear(int64_t rows, int64_t width) const {
        std::fill_n(out, rows * width, 0.0f);
        std::fill_n(total, rows * LANES, 0.0f);
        std::fill_n(peak, rows, NONE);
    }
};

// The weights of a row of a tile as words, rounded to the element; returns `sum` with the rounded weights added.
template <class T> inline f32x16 store_weights(uint32_t *words, const f32x16 (&weight)[PANELS], f32x16 sum) {
    constexpr bool pairs = T::PER_WORD == 2;
    constexpr uint32_t ones = pairs ? 0x3f803f80u : 0x3f800000u;
    for (int p = 0; p < PANELS; p += T::PER_WORD, words += LANES) {
        if constexpr (pairs)
            store_bfloat16(words, weight[p], weight[p + 1]);
        else
            store(words, weight[p]);
        sum = T::madd(sum, ones, load<u32x16>(words));
    }
    return sum;
}

// Scores to weights, as the layer wants them.
class Softmax {
    const float scale, softcap;
    const int64_t window;
    const float unit;  // of a score, in log 2

    f32x16 capped(f32x16 x) const {  // tanh
        const f32x16 doubled = x * (scale / softcap * 2 * LOG2E);
        return 1.0f - 2.0f / (exp2_of(doubled > 126.0f ? broadcast(126.0f) : doubled) + 1.0f);
    }

    // The factor that takes sums from one peak to a greater one.
    float fade(float before, float now) const {
        return exp2_of(broadcast((before - (now == NONE ? 0.0f : now)) * unit))[0];
    }

  public:
    Softmax(float scale, float softcap, int64_t window)
        : scale(scale), softcap(softcap), window(window), unit((softcap == 0 ? scale : softcap) * LOG2E) {}

    // The first position that a row sees.
    int64_t oldest(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }

    // The scores of one row at `position` over the tile that begins at `start` to weights. Returns the factor for what
    // it has summed so far. A row that sees nothing of the tile stays as it is.
    template <class T>
    float soften(const float *scores, int64_t position, int64_t start, uint32_t *weights, float &peak,
                 float *total) const {
        const int64_t first = oldest(position) - start, last = position - start;
        f32x16 score[PANELS];
        for (int p = 0; p < PANELS; p++) score[p] = load<f32x16>(scores + p * LANES);
        if (softcap != 0)
            for (int p = 0; p < PANELS; p++) score[p] = capped(score[p]);
        if (first > 0 || last < TILE - 1) {
            const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            const int from = (int)std::clamp<int64_t>(first, 0, TILE), to = (int)std::clamp<int64_t>(last, -1, TILE);
            for (int p = 0; p < PANELS; p++)
                score[p] = (lane + p * LANES >= from) & (lane + p * LANES <= to) ? score[p] : broadcast(NONE);
        }
        f32x16 best = score[0];
        for (int p = 1; p < PANELS; p++) best = maximum(best, score[p]);
        const float before = peak, now = std::max(before, reduce_max(best));
        const float faded = now == before ? 1.0f : fade(before, now);
        const float base = now == NONE ? 0.0f : now * unit;
        for (int p = 0; p < PANELS; p++) score[p] = exp2_of(score[p] * unit - base);
        store(total, store_weights<T>(weights, score, load<f32x16>(total) * faded));
        peak = now;
        return faded;
    }

    // Add what the next range of keys gave. What saw nothing adds nothing, exactly.
    void merge(const Sums &sums, const Sums &next, int64_t rows, int64_t width) const {
        for (int64_t row = 0; row < rows; row++) {
            const float now = std::max(sums.peak[row], next.peak[row]);
            const float old_fade = fade(sums.peak[row], now), new_fade = fade(next.peak[row], now);
            sums.peak[row] = now;
            const auto add = [&](float *to, const float *from) {
                store(to, load<f32x16>(to) * old_fade + load<f32x16>(from) * new_fade);
            };
            add(sums.total + row * LANES, next.total + row * LANES);
            for (int64_t d = 0; d < width; d += LANES) add(sums.out + row * width + d, next.out + row * width + d);
        }
    }
};

}  // namespace argosy
