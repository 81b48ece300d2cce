// out = x . weight^T + bias with weights of 8 or 4 bits and rows of x rounded to 8 bits, behind a C ABI.
//
// Both are rounded in chunks of 256 along K. A chunk's sums are integers that float32 represents exactly, so every
// order of summation gives the same bits. Chunks are scaled and added in float32, in order, without fused
// multiply-adds.

#include "no_contraction.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "amx.h"
#include "bytes.h"
#include "rounded_rows.h"
#include "scratch.h"
#include "simd.h"
#include "weights_int.h"

namespace {

using namespace argosy;

constexpr int64_t TILE_ROWS = 16;                        // rows of an operand
[[maybe_unused]] constexpr int64_t MAX_VECTOR_ROWS = 8;  // up to this, vector instructions keep up with memory

// Scale of a chunk of a row of x, and the negated sum of its products with 128, the offset of the weights.
struct RowScale {
    float scale;
    uint32_t offset;
};

// Memory layout of one call. Operands are [tile of 16 rows][step][row][64 signed bytes].
template <class E> struct CallLayout {
    const ArgosyLinear &a;
    const int64_t steps = count_steps(a.cols), chunks = count_chunks(a.cols);
    const int64_t tile_rows = std::min(TILE_ROWS, a.rows);  // a single tile has no padding rows
    const int64_t tiles = (a.rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t tile_bytes = steps * tile_rows * STEP_ELEMENTS;
    uint8_t *const inputs = thread_buffer<0>(tiles * (tile_bytes + TILE_ROWS * chunks * sizeof(RowScale)));
    RowScale *const row_scales = (RowScale *)(inputs + tiles * tile_bytes);  // [rows of all tiles][chunks]

    // A block of the packed weight, and its expansion to 8 bits.
    template <class Weight> const uint8_t *packed(int64_t block) const {
        return (const uint8_t *)a.packed + block * block_bytes<Weight>(a.cols);
    }
    template <class Weight> const uint8_t *expanded(int64_t block) const {
        if constexpr (std::is_same_v<Weight, Int8>) return packed<Int8>(block);
        uint8_t *const to = thread_buffer<1>(block_bytes<Int8>(a.cols));
        expand_block<Weight>(packed<Weight>(block), a.cols, to);
        return to;
    }

    // Round a tile of rows to bytes, padded with zeros in both directions.
    void round_tile(int64_t tile) const {
        for (int64_t r = 0; r < tile_rows; r++) {
            const int64_t row = tile * TILE_ROWS + r;
            uint8_t *const to = inputs + tile * tile_bytes + r * STEP_ELEMENTS;
            for (int64_t chunk = 0; chunk < chunks; chunk++) {
                alignas(64) float values[CHUNK] = {};
                const int64_t first = chunk * CHUNK;
                const auto *x = (const typename E::Scalar *)a.x + row * a.x_stride + first;
                if (row < a.rows) E::read(x, std::min(CHUNK, a.cols - first), values);
                alignas(64) uint8_t bytes[CHUNK];
                const RoundedBytes rounded = round_to_bytes(values, CHUNK, bytes);
                row_scales[row * chunks + chunk] = {rounded.scale, (uint32_t)rounded.sum * -128u};
                for (int64_t w = 0; w < chunk_words(a.cols, chunk); w += STEP_ELEMENTS / 4)
                    std::memcpy(to + (first + w * 4) * tile_rows, bytes + w * 4, STEP_ELEMENTS);
            }
        }
    }

    // Add a chunk's scaled sums of one row to `total`, [32].
    template <class Sum>
    void add_scaled(const uint8_t *header, const RowScale &row_scale, Sum left, Sum right, float *total) const {
        const f32x16 l = to_float(left) * load<f32x16>(header) * row_scale.scale;
        const f32x16 r = to_float(right) * load<f32x16>(header + 64) * row_scale.scale;
        store(total, load<f32x16>(total) + l);
        store(total + 16, load<f32x16>(total + 16) + r);
    }

    void store_row(const float *sums, int64_t row, int64_t block) const {
        store_outputs<E>(sums, a.bias, a.out, a.outs, row, block);
    }
};

// Compute unit of vector instructions, for up to eight rows of a tile and one block.
struct VectorUnit {
#ifdef __AVX512F__
    static constexpr int64_t MAX_ROWS = 8;
#else
    static constexpr int64_t MAX_ROWS = 2;
#endif

    template <class Layout> explicit VectorUnit(const Layout &) {}

    template <class Weight, int R, class Layout>
    static void rows(const Layout &layout, const uint8_t *chunk, int64_t row, int64_t block) {
        const RowScale *row_scales = layout.row_scales + row * layout.chunks;
        const uint8_t *x = layout.inputs + row / TILE_ROWS * layout.tile_bytes + row % TILE_ROWS * STEP_ELEMENTS;
        alignas(64) float total[R * BLOCK_OUTPUTS] = {};
        for (int64_t c = 0; c < layout.chunks; c++) {
            const uint8_t *from = chunk + Weight::HEADER_BYTES;
            u32x16 sum[R][2];
            for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = row_scales[r * layout.chunks + c].offset - u32x16{};
            for (int64_t first = 0; first < chunk_words(layout.a.cols, c); first += GROUP_WORDS) {
                const typename Weight::Group group(chunk, first / GROUP_WORDS);
                for (int64_t w = 0; w < GROUP_WORDS; w++, from += Weight::WORD_BYTES) {
                    const OutputPair weight = group.word(from);
                    for (int64_t line = 0; R < MAX_ROWS && line < Weight::WORD_BYTES; line += 64)
                        __builtin_prefetch(from + PREFETCH_BYTES + line, 0, 2);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        const auto word = load<uint32_t>(x + r * STEP_ELEMENTS + first % 16 * 4 + w * 4);
                        sum[r][0] = dot_bytes(sum[r][0], weight.left, word);
                        sum[r][1] = dot_bytes(sum[r][1], weight.right, word);
                    }
                }
                if (first % 16) x += layout.tile_rows * STEP_ELEMENTS;
            }
            for (int r = 0; r < R; r++)
                layout.add_scaled(chunk, row_scales[r * layout.chunks + c], sum[r][0], sum[r][1],
                                  total + r * BLOCK_OUTPUTS);
            chunk = from;
        }
        for (int r = 0; r < R; r++)
            layout.store_row(total + r * BLOCK_OUTPUTS, row + r, block);
    }

    template <class Weight, class Layout>
    static void block_by_rows(const Layout &layout, const uint8_t *weight, int64_t block, const WorkItem &item) {
        for (int64_t row = item.row, end = row + item.rows; row < end;) {
            const int64_t left = std::min(end - row, TILE_ROWS - row % TILE_ROWS);
            if (MAX_ROWS == 8 && left >= 8) rows<Weight, MAX_ROWS>(layout, weight, row, block), row += MAX_ROWS;
            else if (MAX_ROWS == 8 && left >= 4)
                rows<Weight, MAX_ROWS / 2>(layout, weight, row, block), row += MAX_ROWS / 2;
            else if (left >= 2) rows<Weight, 2>(layout, weight, row, block), row += 2;
            else rows<Weight, 1>(layout, weight, row, block), row += 1;
        }
    }

    template <class Weight, class Layout> static void run(const Layout &layout, const WorkItem &item) {
        for (int64_t block = item.block; block < item.block + item.blocks; block++) {
            if (item.rows <= 2 * MAX_ROWS)
                block_by_rows<Weight>(layout, layout.template packed<Weight>(block), block, item);
            else block_by_rows<Int8>(layout, layout.template expanded<Weight>(block), block, item);
        }
    }
};

#ifdef ARGOSY_AMX
// Compute unit of the matrix unit (AMX). Tiles 0-3 hold sums, 4-5 rows of x, and 6-7 panels of the weight.
struct MatrixUnit {
    AmxTiles tiles;

    template <class Layout> explicit MatrixUnit(const Layout &layout) : MatrixUnit((uint8_t)layout.tile_rows) {}
    explicit MatrixUnit(uint8_t n) : tiles({n, n, n, n, n, n, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}) {}

    // Compute the sums of a chunk, [TILES * 16][32], for one or two tiles of rows.
    template <int TILES, class Layout>
    static void sums(const Layout &layout, const uint8_t *x, const uint8_t *w, int64_t words, uint32_t *out) {
        AMX_ZERO(0); AMX_ZERO(1);
        if constexpr (TILES == 2) { AMX_ZERO(2); AMX_ZERO(3); }
        for (int64_t first = 0; first < words;
             first += 16, x += layout.tile_rows * STEP_ELEMENTS, w += 16 * BLOCK_OUTPUTS * 4) {
            AMX_LOAD(4, x, STEP_ELEMENTS);
            AMX_LOAD(6, w, BLOCK_OUTPUTS * 4);
            AMX_MADD_INT8(0, 4, 6);
            AMX_LOAD(7, w + 64, BLOCK_OUTPUTS * 4);
            AMX_MADD_INT8(1, 4, 7);
            if constexpr (TILES == 2) {
                AMX_LOAD(5, x + layout.tile_bytes, STEP_ELEMENTS);
                AMX_MADD_INT8(2, 5, 6);
                AMX_MADD_INT8(3, 5, 7);
            }
        }
        AMX_STORE(0, out, BLOCK_OUTPUTS * 4); AMX_STORE(1, out + 16, BLOCK_OUTPUTS * 4);
        if constexpr (TILES == 2) {
            AMX_STORE(2, out + 16 * BLOCK_OUTPUTS, BLOCK_OUTPUTS * 4);
            AMX_STORE(3, out + 16 * BLOCK_OUTPUTS + 16, BLOCK_OUTPUTS * 4);
        }
    }

    template <class Weight, class Layout> static void run(const Layout &layout, const WorkItem &item) {
        float *const totals = (float *)thread_buffer<2>(MAX_ITEM_ROWS * BLOCK_OUTPUTS * sizeof(float));
        alignas(64) uint32_t sum[2 * TILE_ROWS * BLOCK_OUTPUTS];
        for (int64_t block = item.block; block < item.block + item.blocks; block++) {
            const uint8_t *chunk = layout.template expanded<Weight>(block);
            std::memset(totals, 0, item.rows * BLOCK_OUTPUTS * sizeof(float));
            for (int64_t c = 0; c < layout.chunks; c++) {
                const int64_t words = chunk_words(layout.a.cols, c);
                const uint8_t *const w = chunk + Int8::HEADER_BYTES;
                for (int64_t first = 0; first < item.rows; first += 2 * TILE_ROWS) {
                    const int64_t row = item.row + first, count = std::min(2 * TILE_ROWS, item.rows - first);
                    const uint8_t *x =
                        layout.inputs + row / TILE_ROWS * layout.tile_bytes + c * CHUNK * layout.tile_rows;
                    count <= TILE_ROWS ? sums<1>(layout, x, w, words, sum) : sums<2>(layout, x, w, words, sum);
                    for (int64_t r = 0; r < count; r++) {
                        const RowScale &row_scale = layout.row_scales[(row + r) * layout.chunks + c];
                        const u32x16 left = load<u32x16>(sum + r * BLOCK_OUTPUTS) + row_scale.offset;
                        const u32x16 right = load<u32x16>(sum + r * BLOCK_OUTPUTS + 16) + row_scale.offset;
                        layout.add_scaled(chunk, row_scale, left, right, totals + (first + r) * BLOCK_OUTPUTS);
                    }
                }
                chunk = w + words * Int8::WORD_BYTES;
            }
            for (int64_t r = 0; r < item.rows; r++)
                layout.store_row(totals + r * BLOCK_OUTPUTS, item.row + r, block);
        }
    }
};
#endif

template <class Unit, class Weight, class E> void run(const ArgosyLinear &a) {
    if (a.rows == 0) return;
    const CallLayout<E> layout{a};
    run_rounded(
        a, layout.tiles, [&] { return Unit(layout); }, [&](int64_t tile) { layout.round_tile(tile); },
        [&](const WorkItem &item) { Unit::template run<Weight>(layout, item); });
}

template <class Weight, class E> void dispatch(const ArgosyLinear &a) {
#ifdef ARGOSY_AMX
    if (a.rows > MAX_VECTOR_ROWS && amx_allowed()) return run<MatrixUnit, Weight, E>(a);
#endif
    run<VectorUnit, Weight, E>(a);
}

}  // namespace

// Functions of each format: the bytes of a packed weight [outs, cols], and for each dtype the packing of a weight and
// the linear layer. The packing returns whether all weights are finite.
#define ARGOSY_LINEAR_DTYPE(name, Weight, dtype, E)                                                                   \
    int64_t argosy_linear_##name##_pack_##dtype(const void *weight, int64_t outs, int64_t cols, uint8_t *packed,      \
                                                int64_t threads) {                                                    \
        return pack<Weight, E>({weight, outs, cols}, packed, threads);                                                \
    }                                                                                                                 \
    void argosy_linear_##name##_##dtype(const ArgosyLinear *call) { dispatch<Weight, E>(*call); }

#define ARGOSY_LINEAR(name, Weight)                                                                                   \
    int64_t argosy_linear_##name##_packed_bytes(int64_t outs, int64_t cols) {                                         \
        return count_blocks(outs) * block_bytes<Weight>(cols);                                                        \
    }                                                                                                                 \
    ARGOSY_LINEAR_DTYPE(name, Weight, bfloat16, Bfloat16Io)                                                           \
    ARGOSY_LINEAR_DTYPE(name, Weight, float32, Float32Io)

extern "C" {
ARGOSY_LINEAR(int8, Int8)
ARGOSY_LINEAR(int4, Int4)
}
