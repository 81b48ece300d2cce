// The two units that make the sums of a linear: rows of x by blocks of 32 outputs, over some steps along K.
#pragma once

#include "amx.h"
#include "simd.h"

namespace argosy {

constexpr int64_t SIDE = 32;           // outputs of a block
constexpr int64_t STEP = 32;           // elements along K of a step: sixteen words, a cache line
constexpr int64_t PANEL_BYTES = 1024;  // sixteen words of sixteen outputs
constexpr int64_t STEP_BYTES = 2048;   // both panels of a step
constexpr int64_t AHEAD = 8192;        // bytes of weight asked for before they are used, where they are used once

// A few rows by one block over some steps; meanwhile some cache lines a step of what comes next are asked for.
struct LinearPass {
    const uint8_t *x;       // operands: tiles of [step][row][line]
    const uint8_t *weight;  // [step][panel][word][16 outputs]
    const uint8_t *wanted, *x_wanted;
    float *sums;            // [rows][32], which are begun or added to
    int64_t rows, tile_rows, tile_bytes, steps, lines, x_lines;
    bool first, once;       // once: no other pass uses this weight, and `wanted` is AHEAD of it
};

// Sums by vector multiply-adds: as many rows at once as the register file has sums for.
//
// A unit says: rows of a tile and tiles of a pass, most rows and blocks of a work item (their sums stay in the
// second-level cache), up to how many rows a block is read once for all steps, and else how many steps of a block
// stay in the first-level cache for all rows; bytes of an operand's row, and how to pack one.
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
    static constexpr int64_t PASS_TILES = 1, CHUNK_ROWS = 266, GROUP = 16;
    static constexpr int64_t WHOLE_ROWS = TILE_ROWS, DEPTH = 14;
    static constexpr int WIDE = PANELS * 16 / NATIVE;

    explicit VectorUnit(uint8_t) {}

#ifdef __AVX512BF16__
    static constexpr int64_t LINE = 64;  // bytes of an operand's row

    static void pack(uint8_t *line, u32x16 words) { store(line, words); }

    template <int R> static void add(Sum (&sum)[R][WIDE], const uint8_t *x, const uint8_t *weight) {
        Word word[WIDE];
        for (int v = 0; v < WIDE; v++) word[v] = load<Word>(weight + v * PANEL_BYTES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(load<int32_t>(x + r * LINE));
            for (int v = 0; v < WIDE; v++)
                sum[r][v] = (Sum)_mm512_dpbf16_ps((__m512)sum[r][v], pair, (__m512bh)word[v]);
        }
    }
#else
    static constexpr int64_t LINE = 128;  // the first elements of sixteen words as floats, then the second ones

    static void pack(uint8_t *line, u32x16 words) {
        store(line, words << 16);
        store(line + 64, words & 0xffff0000u);
    }

    template <int R> static void add(Sum (&sum)[R][WIDE], const uint8_t *x, const uint8_t *weight) {
        for (int half = 0; half < 2; half++) {
            Sum value[WIDE];
            for (int v = 0; v < WIDE; v++) {
                const int at = v * NATIVE;
                const Word word = load<Word>(weight + at / 16 * PANEL_BYTES + at % 16 * 4);
                value[v] = (Sum)(half ? word & 0xffff0000u : word << 16);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const Sum scalar = load<float>(x + r * LINE + half * 64) - Sum{};
                for (int v = 0; v < WIDE; v++) sum[r][v] += scalar * value[v];
            }
        }
    }
#endif

    // Some words after each other, unrolled: few rows leave room to have more of memory underway.
    template <int R, bool ONCE, int WORDS>
    static void add_words(Sum (&sum)[R][WIDE], const uint8_t *x, const uint8_t *weight) {
        if (ONCE)
            for (int64_t p = 0; p < PANELS; p++) __builtin_prefetch(weight + AHEAD + p * PANEL_BYTES);
        add<R>(sum, x, weight);
        if constexpr (WORDS > 1) add_words<R, ONCE, WORDS - 1>(sum, x + 4, weight + 64);
    }

    // R rows; where the registers hold the sums of one panel only, one panel after the other.
    template <int R, bool ONCE> static void sums(const LinearPass &pass) {
        constexpr int64_t WORDS = R <= 2 ? 16 : 2;
        for (int64_t panel = 0; panel < 2; panel += PANELS) {
            const uint8_t *x = pass.x, *weight = pass.weight + panel * PANEL_BYTES, *wanted = pass.wanted;
            const uint8_t *x_wanted = pass.x_wanted;
            float *const to = pass.sums + panel * 16;
            Sum sum[R][WIDE];
            for (int r = 0; r < R; r++)
                for (int v = 0; v < WIDE; v++)
                    sum[r][v] = pass.first ? Sum{} : load<Sum>(to + r * SIDE + v * NATIVE);
            for (int64_t step = 0; step < pass.steps; step++) {
                if (!ONCE) {
                    for (int64_t line = 0; line < pass.lines; line++, wanted += 64) __builtin_prefetch(wanted);
                    for (int64_t line = 0; line < pass.x_lines; line++, x_wanted += 64)
                        __builtin_prefetch(x_wanted, 0, 2);
                }
                for (int64_t word = 0; word < 16; word += WORDS)
                    add_words<R, ONCE, WORDS>(sum, x + word * 4, weight + word * 64);
                x += pass.tile_rows * LINE;
                weight += STEP_BYTES;
            }
            for (int r = 0; r < R; r++)
                for (int v = 0; v < WIDE; v++) store(to + r * SIDE + v * NATIVE, sum[r][v]);
        }
    }

    template <int R = 1> static void run(const LinearPass &pass) {
        if constexpr (R < TILE_ROWS)
            if (pass.rows > R) return run<R + 1>(pass);
        pass.once ? sums<R, true>(pass) : sums<R, false>(pass);
    }
};

#ifdef ARGOSY_AMX
// Sums by the matrix unit: tiles 0-3 collect, 4-5 hold rows of x, 6-7 panels of the weight.
struct MatrixUnit {
    static constexpr int64_t TILE_ROWS = 16, PASS_TILES = 2, CHUNK_ROWS = 256, GROUP = 8;
    static constexpr int64_t WHOLE_ROWS = 64, DEPTH = 10;
    static constexpr int64_t LINE = 64;

    AmxTiles tiles;

    explicit MatrixUnit(uint8_t n) : tiles({n, n, n, n, n, n, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}) {}

    static void pack(uint8_t *line, u32x16 words) { store(line, words); }

    template <int TILES> static void sums(const LinearPass &pass) {
        const int64_t operand = pass.tile_rows * LINE;
        const uint8_t *x = pass.x, *w = pass.weight, *wanted = pass.wanted;
        float *const out = pass.sums;
        if (pass.first) {
            AMX_ZERO(0); AMX_ZERO(1);
            if constexpr (TILES == 2) { AMX_ZERO(2); AMX_ZERO(3); }
        } else {
            AMX_LOAD(0, out, SIDE * 4); AMX_LOAD(1, out + 16, SIDE * 4);
            if constexpr (TILES == 2) {
                AMX_LOAD(2, out + 16 * SIDE, SIDE * 4); AMX_LOAD(3, out + 16 * SIDE + 16, SIDE * 4);
            }
        }
        for (int64_t step = 0; step < pass.steps; step++, x += operand, w += STEP_BYTES) {
            for (int64_t line = 0; line < pass.lines; line++, wanted += 64) __builtin_prefetch(wanted, 0, 2);
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
        AMX_STORE(0, out, SIDE * 4); AMX_STORE(1, out + 16, SIDE * 4);
        if constexpr (TILES == 2) {
            AMX_STORE(2, out + 16 * SIDE, SIDE * 4); AMX_STORE(3, out + 16 * SIDE + 16, SIDE * 4);
        }
    }

    static void run(const LinearPass &pass) { pass.rows <= TILE_ROWS ? sums<1>(pass) : sums<2>(pass); }
};
#endif

}  // namespace argosy
