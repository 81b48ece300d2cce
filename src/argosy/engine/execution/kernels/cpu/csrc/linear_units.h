// Compute units of a linear layer, by vector or matrix instructions: rows of x times blocks of 32 outputs.
#pragma once

#include "amx.h"
#include "simd.h"

namespace argosy {

constexpr int64_t BLOCK_OUTPUTS = 32;     // outputs of a block
constexpr int64_t STEP_ELEMENTS = 32;     // elements along K of a step: sixteen words, one cache line
constexpr int64_t PANEL_BYTES = 1024;     // sixteen words of sixteen outputs
constexpr int64_t STEP_BYTES = 2048;      // both panels of a step
constexpr int64_t PREFETCH_BYTES = 8192;  // prefetch distance in a weight that is used once

// One pass: some rows times one block over some steps along K. Each step prefetches cache lines for later passes.
struct LinearPass {
    const uint8_t *x;       // operands: tiles of [step][row][line]
    const uint8_t *weight;  // [step][panel][word][16 outputs]
    const uint8_t *prefetch, *x_prefetch;  // addresses of the weight and of x to prefetch
    float *sums;            // [rows][32], overwritten if `is_first`, else added to
    int64_t rows, tile_rows, tile_bytes, steps;
    int64_t lines, x_lines;  // cache lines to prefetch per step, of the weight and of x
    bool is_first;           // the first steps along K
    bool is_single_use;      // no other pass uses this weight, and `prefetch` is PREFETCH_BYTES after it
};

// Compute unit of vector multiply-adds, for as many rows at once as the registers have sums for.
//
// Constants of a unit: TILE_ROWS rows per tile, PASS_TILES tiles per pass, and at most CHUNK_ROWS rows and
// MAX_ITEM_BLOCKS blocks per work item, so that its sums stay in the second-level cache. Up to MAX_FULL_DEPTH_ROWS
// rows, a pass covers all steps of a block. With more rows, it covers at most MAX_PASS_STEPS steps, which stay in the
// first-level cache for all rows. An operand row has OPERAND_ROW_BYTES bytes, and pack() writes it.
struct VectorUnit {
    using Word = native_u32;
    using Sum = native_f32;
#if defined(__AVX512F__)
    static constexpr int64_t PANELS = 2, TILE_ROWS = 14;
#elif defined(__AVX__)
    static constexpr int64_t PANELS = 1, TILE_ROWS = 6;
#else
    static constexpr int64_t PANELS = 1, TILE_ROWS = 3;
#endif
    static constexpr int64_t PASS_TILES = 1, CHUNK_ROWS = 266, MAX_ITEM_BLOCKS = 16;
    static constexpr int64_t MAX_FULL_DEPTH_ROWS = TILE_ROWS, MAX_PASS_STEPS = 14;
    static constexpr int VECTORS_PER_ROW = PANELS * 16 / NATIVE_LANES;

    explicit VectorUnit(uint8_t) {}

#ifdef __AVX512BF16__
    static constexpr int64_t OPERAND_ROW_BYTES = 64;

    static void pack(uint8_t *line, u32x16 words) { store(line, words); }

    template <int R> static void add(Sum (&sum)[R][VECTORS_PER_ROW], const uint8_t *x, const uint8_t *weight) {
        Word word[VECTORS_PER_ROW];
        for (int v = 0; v < VECTORS_PER_ROW; v++) word[v] = load<Word>(weight + v * PANEL_BYTES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(load<int32_t>(x + r * OPERAND_ROW_BYTES));
            for (int v = 0; v < VECTORS_PER_ROW; v++)
                sum[r][v] = (Sum)_mm512_dpbf16_ps((__m512)sum[r][v], pair, (__m512bh)word[v]);
        }
    }
#else
    // The first elements of sixteen words as floats, then the second elements.
    static constexpr int64_t OPERAND_ROW_BYTES = 128;

    static void pack(uint8_t *line, u32x16 words) {
        store(line, words << 16);
        store(line + 64, words & 0xffff0000u);
    }

    template <int R> static void add(Sum (&sum)[R][VECTORS_PER_ROW], const uint8_t *x, const uint8_t *weight) {
        for (int half = 0; half < 2; half++) {
            Sum value[VECTORS_PER_ROW];
            for (int v = 0; v < VECTORS_PER_ROW; v++) {
                const int lane = v * NATIVE_LANES;
                const Word word = load<Word>(weight + lane / 16 * PANEL_BYTES + lane % 16 * 4);
                value[v] = (Sum)(half ? word & 0xffff0000u : word << 16);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const Sum scalar = load<float>(x + r * OPERAND_ROW_BYTES + half * 64) - Sum{};
                for (int v = 0; v < VECTORS_PER_ROW; v++) sum[r][v] += scalar * value[v];
            }
        }
    }
#endif

    // WORDS words in sequence, unrolled. With few rows, this keeps more memory requests in flight.
    template <int R, bool SINGLE_USE, int WORDS>
    static void add_words(Sum (&sum)[R][VECTORS_PER_ROW], const uint8_t *x, const uint8_t *weight) {
        if (SINGLE_USE)
            for (int64_t p = 0; p < PANELS; p++) __builtin_prefetch(weight + PREFETCH_BYTES + p * PANEL_BYTES);
        add<R>(sum, x, weight);
        if constexpr (WORDS > 1) add_words<R, SINGLE_USE, WORDS - 1>(sum, x + 4, weight + 64);
    }

    // Sums of R rows. If the registers hold the sums of one panel only, the panels are processed in turn.
    template <int R, bool SINGLE_USE> static void sums(const LinearPass &pass) {
        constexpr int64_t WORDS = R <= 2 ? 16 : 2;
        for (int64_t panel = 0; panel < 2; panel += PANELS) {
            const uint8_t *x = pass.x, *weight = pass.weight + panel * PANEL_BYTES, *prefetch = pass.prefetch;
            const uint8_t *x_prefetch = pass.x_prefetch;
            float *const to = pass.sums + panel * 16;
            Sum sum[R][VECTORS_PER_ROW];
            for (int r = 0; r < R; r++)
                for (int v = 0; v < VECTORS_PER_ROW; v++)
                    sum[r][v] = pass.is_first ? Sum{} : load<Sum>(to + r * BLOCK_OUTPUTS + v * NATIVE_LANES);
            for (int64_t step = 0; step < pass.steps; step++) {
                if (!SINGLE_USE) {
                    for (int64_t line = 0; line < pass.lines; line++, prefetch += 64) __builtin_prefetch(prefetch);
                    for (int64_t line = 0; line < pass.x_lines; line++, x_prefetch += 64)
                        __builtin_prefetch(x_prefetch, 0, 2);
                }
                for (int64_t word = 0; word < 16; word += WORDS)
                    add_words<R, SINGLE_USE, WORDS>(sum, x + word * 4, weight + word * 64);
                x += pass.tile_rows * OPERAND_ROW_BYTES;
                weight += STEP_BYTES;
            }
            for (int r = 0; r < R; r++)
                for (int v = 0; v < VECTORS_PER_ROW; v++) store(to + r * BLOCK_OUTPUTS + v * NATIVE_LANES, sum[r][v]);
        }
    }

    template <int R = 1> static void run(const LinearPass &pass) {
        if constexpr (R < TILE_ROWS)
            if (pass.rows > R) return run<R + 1>(pass);
        pass.is_single_use ? sums<R, true>(pass) : sums<R, false>(pass);
    }
};

#ifdef ARGOSY_AMX
// Compute unit of the matrix unit (AMX). Tiles 0-3 hold sums, 4-5 rows of x, and 6-7 panels of the weight.
struct MatrixUnit {
    static constexpr int64_t TILE_ROWS = 16, PASS_TILES = 2, CHUNK_ROWS = 256, MAX_ITEM_BLOCKS = 8;
    static constexpr int64_t MAX_FULL_DEPTH_ROWS = 64, MAX_PASS_STEPS = 10;
    static constexpr int64_t OPERAND_ROW_BYTES = 64;

    AmxTiles tiles;

    explicit MatrixUnit(uint8_t n) : tiles({n, n, n, n, n, n, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}) {}

    static void pack(uint8_t *line, u32x16 words) { store(line, words); }

    template <int TILES> static void sums(const LinearPass &pass) {
        const int64_t operand = pass.tile_rows * OPERAND_ROW_BYTES;
        const uint8_t *x = pass.x, *w = pass.weight, *prefetch = pass.prefetch;
        float *const out = pass.sums;
        if (pass.is_first) {
            AMX_ZERO(0); AMX_ZERO(1);
            if constexpr (TILES == 2) { AMX_ZERO(2); AMX_ZERO(3); }
        } else {
            AMX_LOAD(0, out, BLOCK_OUTPUTS * 4); AMX_LOAD(1, out + 16, BLOCK_OUTPUTS * 4);
            if constexpr (TILES == 2) {
                AMX_LOAD(2, out + 16 * BLOCK_OUTPUTS, BLOCK_OUTPUTS * 4);
                AMX_LOAD(3, out + 16 * BLOCK_OUTPUTS + 16, BLOCK_OUTPUTS * 4);
            }
        }
        for (int64_t step = 0; step < pass.steps; step++, x += operand, w += STEP_BYTES) {
            for (int64_t line = 0; line < pass.lines; line++, prefetch += 64) __builtin_prefetch(prefetch, 0, 2);
            AMX_LOAD(4, x, 64);
            AMX_LOAD(6, w, 64);
            AMX_MADD(0, 4, 6);
            AMX_LOAD(7, w + PANEL_BYTES, 64);
            AMX_MADD(1, 4, 7);
            if constexpr (TILES == 2) {
                AMX_LOAD(5, x + pass.tile_bytes, 64);
                AMX_MADD(2, 5, 6);
                AMX_MADD(3, 5, 7);
            }
        }
        AMX_STORE(0, out, BLOCK_OUTPUTS * 4); AMX_STORE(1, out + 16, BLOCK_OUTPUTS * 4);
        if constexpr (TILES == 2) {
            AMX_STORE(2, out + 16 * BLOCK_OUTPUTS, BLOCK_OUTPUTS * 4);
            AMX_STORE(3, out + 16 * BLOCK_OUTPUTS + 16, BLOCK_OUTPUTS * 4);
        }
    }

    static void run(const LinearPass &pass) { pass.rows <= TILE_ROWS ? sums<1>(pass) : sums<2>(pass); }
};
#endif

}  // namespace argosy
