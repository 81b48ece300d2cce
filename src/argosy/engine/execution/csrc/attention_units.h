// One tile of keys, and the two units that multiply it: scores, and sums of values by weight.
#pragma once

#include <algorithm>
#include <type_traits>

#include "amx.h"
#include "simd.h"

namespace argosy {

constexpr int TILE = 64;  // keys of one softmax step
constexpr int PANELS = TILE / LANES;

// One tile of keys of one sequence and kv head, as pointers to panels of W keys: pages are never gathered.
struct Tile {
    const uint32_t *keys[2 * PANELS];
    const uint32_t *values[2 * PANELS];
    int live;  // keys that count, rounded up to whole panels; what lies beyond has no weight and is not read as values
};

// Call run(block, first) for blocks of MOST of `count` rows and one of what is left; `block` is its size as a constant.
template <int MOST, class Run> inline void in_blocks(int64_t count, const Run &run) {
    int64_t first = 0;
    for (; first + MOST <= count; first += MOST) run(std::integral_constant<int, MOST>{}, first);
    if constexpr (MOST > 1) {
        const auto rest = [&](auto block, int64_t at) { run(block, first + at); };
        in_blocks<MOST - 1>(count - first, rest);
    }
}

// Scores and weighted sums by vector multiply-adds; each sum runs in the same order whatever R and C are.
template <class Element, int W> struct VectorUnit {
    using T = Element;
    static constexpr int PANEL = W;
    static constexpr int ALIGN = 1;  // rows are padded to a multiple of it
    static constexpr int WORDS = TILE / T::PER_WORD;
#ifdef __AVX512F__
    static constexpr int SUMS = 16;  // vectors of sums that fit the register file, with their operands
#else
    static constexpr int SUMS = 4;
#endif

    static u32x16 key_vector(const Tile &tile, int panel, int64_t word) {
        if constexpr (W == LANES) return load<u32x16>(tile.keys[panel] + word * W);
        u32x16 both;
        std::memcpy(&both, tile.keys[2 * panel] + word * W, 32);
        std::memcpy((char *)&both + 32, tile.keys[2 * panel + 1] + word * W, 32);
        return both;
    }

    // Panels panel .. panel + P - 1 of a block of rows; what `next` has there is fetched meanwhile.
    template <int R, int P>
    static void score_block(const uint32_t *q, int64_t words, const Tile &tile, const Tile &next, int panel,
                            float *scores) {
        f32x16 sum[R][P] = {};
        for (int64_t word = 0; word < words; word++) {
            u32x16 key[P];
            for (int p = 0; p < P; p++) key[p] = key_vector(tile, panel + p, word);
            for (int p = 0; p < P; p++) __builtin_prefetch(next.keys[panel + p] + word * W);
            for (int r = 0; r < R; r++)
                for (int p = 0; p < P; p++) sum[r][p] = T::madd(sum[r][p], q[r * words + word], key[p]);
        }
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++) store(scores + r * TILE + (panel + p) * LANES, sum[r][p]);
    }

    // C columns of a block of rows; what `next` has there is fetched meanwhile.
    template <int R, int C>
    static void weigh_block(const uint32_t *weights, const Tile &tile, const Tile &next, const float *fade, float *out,
                            int64_t width, int64_t column) {
        constexpr int EACH = W / T::PER_WORD;
        f32x16 sum[R][C];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) sum[r][c] = load<f32x16>(out + r * width + column + c * LANES) * fade[r];
        for (int panel = 0; panel < tile.live / W; panel++) {
            const uint32_t *row = tile.values[panel] + column, *weight = weights + panel * EACH;
            const uint32_t *ahead = next.values[panel] + column;
            for (int word = 0; word < EACH; word++, row += width, ahead += width)
                for (int c = 0; c < C; c++) {
                    const u32x16 value = load<u32x16>(row + c * LANES);
                    __builtin_prefetch(ahead + c * LANES);
                    for (int r = 0; r < R; r++) sum[r][c] = T::madd(sum[r][c], weight[r * WORDS + word], value);
                }
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) store(out + r * width + column + c * LANES, sum[r][c]);
    }

    // Call run with the number of rows to take together: the fewer there are, the more columns each of them takes.
    template <class Run> static void by_rows(int64_t rows, const Run &run) {
        constexpr int least = std::max(1, SUMS / 8), few = std::max(1, SUMS / 4), many = SUMS / 2;
        if (rows <= least) return run(std::integral_constant<int, least>{});
        if (rows <= few) return run(std::integral_constant<int, few>{});
        run(std::integral_constant<int, many>{});
    }

    // scores[rows][TILE] = q[rows][words] . keys
    static void score(const uint32_t *q, int64_t rows, int64_t words, const Tile &tile, const Tile &next,
                      float *scores) {
        by_rows(rows, [&](auto most) {
            in_blocks<most>(rows, [&](auto block, int64_t r) {
                constexpr int P = std::min(PANELS, SUMS / most);
                for (int panel = 0; panel * LANES < tile.live; panel += P)
                    score_block<block, P>(q + r * words, words, tile, r ? tile : next, panel, scores + r * TILE);
            });
        });
    }

    // out[rows][width] = out * fade + weights[rows][WORDS] . values
    static void weigh(const uint32_t *weights, int64_t rows, const Tile &tile, const Tile &next, const float *fade,
                      float *out, int64_t width) {
        by_rows(rows, [&](auto most) {
            in_blocks<most>(rows, [&](auto block, int64_t r) {
                constexpr int C = SUMS / most;
                const Tile &ahead = r ? tile : next;
                const uint32_t *weight = weights + r * WORDS;
                float *sum = out + r * width;
                int64_t column = 0;
                for (; column + C * LANES <= width; column += C * LANES)
                    weigh_block<block, C>(weight, tile, ahead, fade + r, sum, width, column);
                for (; column < width; column += LANES)
                    weigh_block<block, 1>(weight, tile, ahead, fade + r, sum, width, column);
            });
        });
    }
};

#ifdef ARGOSY_AMX
// The same by the matrix unit, sixteen rows at a time; a row of a tile product does not depend on the others.
struct MatrixUnit {
    using T = Bfloat16;
    static constexpr int PANEL = LANES;
    static constexpr int ALIGN = 16;
    static constexpr int WORDS = TILE / 2;

    // 0-3 sums; 4, 5: queries and keys, 32 dimensions; 6, 7: weights and values of 16 keys.
    AmxTiles tiles{{16, 16, 16, 16, 16, 16, 16, 8}, {64, 64, 64, 64, 64, 64, 32, 64}};

    static void score(const uint32_t *q, int64_t rows, int64_t words, const Tile &tile, const Tile &next,
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

    static void weigh(const uint32_t *weights, int64_t rows, const Tile &tile, const Tile &next, const float *fade,
                      float *out, int64_t width) {
        for (int p = 0; p < PANELS; p++)
            for (int64_t word = 0; word < LANES / 2 * width; word += LANES) __builtin_prefetch(next.values[p] + word);
        for (int64_t r = 0; r < rows; r++) {
            if (fade[r] == 1.0f) continue;
            for (int64_t c = 0; c < width; c += LANES)
                store(out + r * width + c, load<f32x16>(out + r * width + c) * fade[r]);
        }
        for (int64_t r = 0; r < rows; r += 16)
            for (int64_t c = 0; c < width; c += 2 * LANES) {  // the width is a multiple of 32
                float *sum = out + r * width + c;
                AMX_LOAD(0, sum, width * 4); AMX_LOAD(1, sum + LANES, width * 4);
                for (int p = 0; p < tile.live / LANES; p++) {
                    AMX_LOAD(6, weights + r * WORDS + p * LANES / 2, WORDS * 4);
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
