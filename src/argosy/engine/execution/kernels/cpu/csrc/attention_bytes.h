// Panels of keys and values that are rounded to bytes, with a float32 scale for each row (a token and KV head).
//
// A row is rounded by itself, so its bytes do not depend on when or beside what it is computed. Bytes are expanded to
// elements exactly, in registers or in the first-level cache. Scores and weights are multiplied by the scales. With W
// keys of a panel, N elements per word and the first `exact` elements of a key as bfloat16 multiples of the scale:
//   keys   bfloat16 [words of exact][W][N], int8 [words of the rest][W][N], float32 scales [W]
//   values int8 [W / N][width][N], float32 scales [W]
#pragma once

#include <algorithm>

#include "bytes.h"
#include "elements.h"
#include "scratch.h"

namespace argosy {

// Scratch memory for a row of up to `width` elements that is rounded.
struct RoundedRow {
    float *values;
    uint8_t *bytes;

    static size_t scratch_lines(int64_t width) {
        return Scratch::lines_for<float>(width + LANES) + Scratch::lines_for<uint8_t>(width + LANES);
    }
    static RoundedRow allocate(Scratch &memory, int64_t width) {
        return {memory.allocate<float>(width + LANES), memory.allocate<uint8_t>(width + LANES)};
    }
};

// Round values to bytes, see `round_to_bytes`, and return their scale.
float round_row(const float *values, int64_t count, uint8_t *bytes);

template <class Unit, class Row> class BytePanels {
    using Scalar = typename Row::Scalar;
    static constexpr int N = Unit::T::PER_WORD;
    static constexpr int W = Unit::PANEL;

    const int64_t width, exact;
    const int64_t exact_bytes = exact * W * 2, row_bytes = (width - exact) * W;  // of a panel

  public:
    const int64_t panel_words = (exact_bytes + row_bytes) / 4 + W;

    // `exact` is a multiple of 4, so that the bytes of a panel are a multiple of 32.
    BytePanels(int64_t width, int64_t exact) : width(width), exact(exact) {}

    // Prefetch the scales of a panel, or all of it.
    void prefetch(const uint32_t *panel, bool all) const {
        for (int64_t word = all ? 0 : panel_words - W; word < panel_words; word += LANES) __builtin_prefetch(panel + word);
    }

    // Store a row [width] as the key number `key` of a panel.
    void store_key(const uint32_t *row, int64_t key, RoundedRow &rounded, uint32_t *panel) const {
        const Scalar *elements = (const Scalar *)row;
        const float scale = round(elements + exact, width - exact, rounded, key, panel);
        uint16_t *exact_part = (uint16_t *)panel;
        for (int64_t d = 0; d < exact; d++) {
            uint16_t bits;
            Bfloat16Row::store_lanes(&bits, Row::load_lanes(elements + d, 1) / scale, 1);
            exact_part[(d / N * W + key) * N + d % N] = bits;
        }
        uint8_t *to = (uint8_t *)panel + exact_bytes + key * N;
        for (int64_t d = 0; d < width - exact; d += N, to += W * N) std::memcpy(to, rounded.bytes + d, N);
    }

    // Store `size` elements as the value of key number `key` of a panel. The padding becomes zeros.
    void store_value(const Scalar *from, int64_t size, int64_t key, RoundedRow &rounded, uint32_t *panel) const {
        round(from, size, rounded, key, panel);
        uint8_t *to = (uint8_t *)panel + key / N * width * N + key % N;
        for (int64_t d = 0; d < width; d++) to[d * N] = d < size ? rounded.bytes[d] : 0;
    }

    // Expand a panel of keys to elements in units of their scales.
    void expand_keys(const uint32_t *panel, uint32_t *to) const {
        const uint16_t *exact_part = (const uint16_t *)panel;
        if constexpr (N == 2)
            std::memcpy(to, exact_part, exact_bytes);
        else
            for (int64_t i = 0; i < exact * W; i++) to[i] = (uint32_t)exact_part[i] << 16;
        expand((const uint8_t *)panel + exact_bytes, row_bytes, to + exact * W / N);
    }

    // Expand a panel of values to elements in units of their scales.
    void expand_values(const uint32_t *panel, uint32_t *to) const { expand((const uint8_t *)panel, row_bytes, to); }

    // Copy the scales of a panel to `to`, with zeros after the first `count`.
    void read_scales(const uint32_t *panel, int64_t count, float *to) const {
        std::memcpy(to, panel + panel_words - W, W * sizeof *to);
        for (int64_t key = std::max<int64_t>(0, count); key < W; key++) to[key] = 0;
    }

  private:
    // Round elements to `rounded`, and store their scale, which is 1 for zeros beside exact elements.
    float round(const Scalar *from, int64_t size, RoundedRow &rounded, int64_t key, uint32_t *panel) const {
        for (int64_t d = 0; d < size; d += LANES)
            store(rounded.values + d, Row::load_lanes(from + d, size - d));
        const int64_t padded = (size + LANES - 1) / LANES * LANES;
        float scale = round_row(rounded.values, padded, rounded.bytes);
        if (exact && scale == 0) scale = 1;
        std::memcpy(panel + panel_words - W + key, &scale, 4);
        return scale;
    }

    static void expand(const uint8_t *from, int64_t count, uint32_t *to) {
        for (int64_t i = 0; i < count; i += LANES * N, to += LANES) Unit::T::expand_bytes(to, from + i);
    }
};

}  // namespace argosy
