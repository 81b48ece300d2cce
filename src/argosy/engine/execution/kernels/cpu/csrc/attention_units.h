// Compute units of attention, by vector or matrix instructions: scores of a tile of keys, and weighted sums of values.
#pragma once

#include <algorithm>
#include <type_traits>

#include "amx.h"
#include "simd.h"

namespace argosy {

constexpr int TILE = 64;  // keys of one softmax step
constexpr int PANELS = TILE / LANES;

// Tile of keys of one sequence and KV head, as pointers to panels of W keys, so that cache blocks are not copied.
struct Tile {
    const uint32_t *keys[2 * PANELS];
    const uint32_t *values[2 * PANELS];
    int unused_keys;  // keys before those in use, rounded down to full panels; they have no weight
    int used_keys;  // keys in use, rounded up to full panels; later keys have no weight, and their values are not read
};

// Call run(block, first) for blocks of MAX_ROWS rows and for one block of the rest. `block` is the size as a constant.
template <int MAX_ROWS, class Run> inline void for_row_blocks(int64_t count, const Run &run) {
    int64_t first = 0;
    for (; first + MAX_ROWS <= count; first += MAX_ROWS) run(std::integral_constant<int, MAX_ROWS>{}, first);
    if constexpr (MAX_ROWS > 1) {
        const auto run_rest = [&](auto block, int64_t start) { run(block, first + start); };
        for_row_blocks<MAX_ROWS - 1>(count - first, run_rest);
    }
}

// Compute unit of vector multiply-adds. The order of each sum does not depend on the block sizes R, P and C.
template <class Element, int W> struct VectorUnit {
    using T = Element;
    static constexpr int PANEL = W;
    static constexpr int ROW_ALIGNMENT = 1;  // rows are padded to a multiple of this
    static constexpr int WEIGHT_WORDS = TILE / T::PER_WORD;
#ifdef __AVX512F__
    static constexpr int MAX_SUM_VECTORS = 16;  // vectors of sums that fit the register file beside their operands
#else
    static constexpr int MAX_SUM_VECTORS = 4;
#endif

    // Load a vector of words, which BYTES are expanded to.
    template <bool BYTES> static u32x16 load_words(const uint32_t *panel, int64_t word) {
        if constexpr (!BYTES) return load<u32x16>(panel + word);
        u32x16 words;
        T::expand_bytes(&words, (const uint8_t *)panel + word * T::PER_WORD);
        return words;
    }

    // Prefetch the line of the words at `word`. Several vectors of BYTES share one, which that at index 0 prefetches.
    template <bool BYTES> static void prefetch(const uint32_t *panel, int64_t word, int64_t index) {
        if constexpr (!BYTES)
            __builtin_prefetch(panel + word);
        else if (index * T::PER_WORD % 64 == 0)
            __builtin_prefetch((const uint8_t *)panel + word * T::PER_WORD);
    }

    template <bool BYTES> static u32x16 key_vector(const Tile &tile, int panel, int64_t word) {
        if constexpr (W == LANES) return load_words<BYTES>(tile.keys[panel], word * W);
        if constexpr (BYTES) {
            constexpr int HALF = W * T::PER_WORD;
            uint8_t halves[2 * HALF];
            for (int half = 0; half < 2; half++)
                std::memcpy(halves + half * HALF, (const uint8_t *)tile.keys[2 * panel + half] + word * HALF, HALF);
            u32x16 words;
            T::expand_bytes(&words, halves);
            return words;
        }
        u32x16 both;
        std::memcpy(&both, tile.keys[2 * panel] + word * W, 32);
        std::memcpy((char *)&both + 32, tile.keys[2 * panel + 1] + word * W, 32);
        return both;
    }

    // Compute the scores of a block of rows for panels panel .. panel + P - 1, and prefetch the same panels of `next`.
    template <bool BYTES, int R, int P>
    static void score_block(const uint32_t *q, int64_t words, const Tile &tile, const Tile &next, int panel,
                            float *scores) {
        f32x16 sum[R][P] = {};
        for (int64_t word = 0; word < words; word++) {
            u32x16 key[P];
            for (int p = 0; p < P; p++) key[p] = key_vector<BYTES>(tile, panel + p, word);
            for (int p = 0; p < P; p++) prefetch<BYTES>(next.keys[panel + p], word * W, word * W);
            for (int r = 0; r < R; r++)
                for (int p = 0; p < P; p++) sum[r][p] = T::madd(sum[r][p], q[r * words + word], key[p]);
        }
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++) store(scores + r * TILE + (panel + p) * LANES, sum[r][p]);
    }

    // Accumulate C columns of a block of rows, and prefetch the same columns of `next`.
    template <bool BYTES, int R, int C>
    static void accumulate_block(const uint32_t *weights, const Tile &tile, const Tile &next, const float *rescale,
                                 float *out, int64_t width, int64_t column) {
        constexpr int PANEL_WORDS = W / T::PER_WORD;
        f32x16 sum[R][C];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) sum[r][c] = load<f32x16>(out + r * width + column + c * LANES) * rescale[r];
        for (int panel = 0; panel < tile.used_keys / W; panel++) {
            const uint32_t *weight = weights + panel * PANEL_WORDS;
            for (int word = 0; word < PANEL_WORDS; word++)
                for (int c = 0; c < C; c++) {
                    const int64_t at = word * width + column + c * LANES;
                    const u32x16 value = load_words<BYTES>(tile.values[panel], at);
                    prefetch<BYTES>(next.values[panel], at, c * LANES);
                    for (int r = 0; r < R; r++) sum[r][c] = T::madd(sum[r][c], weight[r * WEIGHT_WORDS + word], value);
                }
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) store(out + r * width + column + c * LANES, sum[r][c]);
    }

    // Call run with the number of rows per block. With fewer rows, registers hold more columns of each.
    template <class Run> static void dispatch_by_rows(int64_t rows, const Run &run) {
        constexpr int small = std::max(1, MAX_SUM_VECTORS / 8), medium = std::max(1, MAX_SUM_VECTORS / 4),
                      large = MAX_SUM_VECTORS / 2;
        if (rows <= small) return run(std::integral_constant<int, small>{});
        if (rows <= medium) return run(std::integral_constant<int, medium>{});
        run(std::integral_constant<int, large>{});
    }

    // Whether rows are few enough that each of the bytes is expanded once.
    static bool takes_bytes(int64_t rows) { return rows <= MAX_SUM_VECTORS / 2; }

    // scores[rows][TILE] = q[rows][words] . keys
    template <bool BYTES = false>
    static void compute_scores(const uint32_t *q, int64_t rows, int64_t words, const Tile &tile, const Tile &next,
                               float *scores) {
        dispatch_by_rows(rows, [&](auto block_rows) {
            for_row_blocks<block_rows>(rows, [&](auto block, int64_t r) {
                constexpr int P = std::min(PANELS, MAX_SUM_VECTORS / block_rows);
                for (int panel = 0; panel * LANES < tile.used_keys; panel += P)
                    score_block<BYTES, block, P>(q + r * words, words, tile, r ? tile : next, panel, scores + r * TILE);
            });
        });
    }

    // out[rows][width] = out * rescale + weights[rows][WEIGHT_WORDS] . values
    template <bool BYTES = false>
    static void accumulate_values(const uint32_t *weights, int64_t rows, const Tile &tile, const Tile &next,
                                  const float *rescale, float *out, int64_t width) {
        dispatch_by_rows(rows, [&](auto block_rows) {
            for_row_blocks<block_rows>(rows, [&](auto block, int64_t r) {
                constexpr int C = MAX_SUM_VECTORS / block_rows;
                const Tile &prefetched = r ? tile : next;
                const uint32_t *weight = weights + r * WEIGHT_WORDS;
                float *sum = out + r * width;
                int64_t column = 0;
                for (; column + C * LANES <= width; column += C * LANES)
                    accumulate_block<BYTES, block, C>(weight, tile, prefetched, rescale + r, sum, width, column);
                for (; column < width; column += LANES)
                    accumulate_block<BYTES, block, 1>(weight, tile, prefetched, rescale + r, sum, width, column);
            });
        });
    }
};

#ifdef ARGOSY_AMX
// Compute unit of the matrix unit (AMX), sixteen rows at a time. Rows of a tile product are independent.
struct MatrixUnit {
    using T = Bfloat16;
    static constexpr int PANEL = LANES;
    static constexpr int ROW_ALIGNMENT = 16;
    static constexpr int WEIGHT_WORDS = TILE / 2;

    // Tiles 0-3: sums. Tiles 4, 5: queries and keys, 32 dimensions. Tiles 6, 7: weights and values of 16 keys.
    AmxTiles tiles{{16, 16, 16, 16, 16, 16, 16, 8}, {64, 64, 64, 64, 64, 64, 32, 64}};

    static bool takes_bytes(int64_t) { return false; }

    template <bool BYTES = false>
    static void compute_scores(const uint32_t *q, int64_t rows, int64_t words, const Tile &tile, const Tile &next,
                               float *scores) {
        for (int p = 0; p < PANELS; p++)
            for (int64_t word = 0; word < words; word++) __builtin_prefetch(next.keys[p] + word * LANES);
        for (int64_t r = 0; r < rows; r += 16) {
            AMX_ZERO(0); AMX_ZERO(1); AMX_ZERO(2); AMX_ZERO(3);
            for (int64_t word = 0; word < words; word += 16) {
                AMX_LOAD(4, q + r * words + word, words * 4); AMX_LOAD(5, tile.keys[0] + word * LANES, 64);
                AMX_MADD(0, 4, 5);
                AMX_LOAD(5, tile.keys[1] + word * LANES, 64);
                AMX_MADD(1, 4, 5);
                AMX_LOAD(5, tile.keys[2] + word * LANES, 64);
                AMX_MADD(2, 4, 5);
                AMX_LOAD(5, tile.keys[3] + word * LANES, 64);
                AMX_MADD(3, 4, 5);
            }
            float *sum = scores + r * TILE;
            AMX_STORE(0, sum, TILE * 4); AMX_STORE(1, sum + LANES, TILE * 4);
            AMX_STORE(2, sum + 2 * LANES, TILE * 4); AMX_STORE(3, sum + 3 * LANES, TILE * 4);
        }
    }

    template <bool BYTES = false>
    static void accumulate_values(const uint32_t *weights, int64_t rows, const Tile &tile, const Tile &next,
                                  const float *rescale, float *out, int64_t width) {
        for (int p = 0; p < PANELS; p++)
            for (int64_t word = 0; word < LANES / 2 * width; word += LANES) __builtin_prefetch(next.values[p] + word);
        for (int64_t r = 0; r < rows; r++) {
            if (rescale[r] == 1.0f) continue;
            for (int64_t c = 0; c < width; c += LANES)
                store(out + r * width + c, load<f32x16>(out + r * width + c) * rescale[r]);
        }
        for (int64_t r = 0; r < rows; r += 16)
            for (int64_t c = 0; c < width; c += 2 * LANES) {  // the width is a multiple of 32
                float *sum = out + r * width + c;
                AMX_LOAD(0, sum, width * 4); AMX_LOAD(1, sum + LANES, width * 4);
                for (int p = 0; p < tile.used_keys / LANES; p++) {
                    AMX_LOAD(6, weights + r * WEIGHT_WORDS + p * LANES / 2, WEIGHT_WORDS * 4);
                    AMX_LOAD(7, tile.values[p] + c, width * 4);
                    AMX_MADD(0, 6, 7);
                    AMX_LOAD(7, tile.values[p] + c + LANES, width * 4);
                    AMX_MADD(1, 6, 7);
                }
                AMX_STORE(0, sum, width * 4); AMX_STORE(1, sum + LANES, width * 4);
            }
    }
};
#endif

}  // namespace argosy
