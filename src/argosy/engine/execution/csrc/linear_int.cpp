// out = x . weight^T + bias with weights of 8 or 4 bits and rows of x rounded to 8, behind a plain C ABI.
//
// Both are rounded by chunks of 256 along K. A chunk's products are integers that float32 holds exactly, so that every
// way to sum them gives the same bits; chunks are scaled and added in float32, in order, without fused multiply-adds.

#ifdef __clang__  // torch rounds a product before it is added; so must we
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "amx.h"
#include "bytes.h"
#include "scratch.h"
#include "simd.h"
#include "weights_int.h"

extern "C" {

// One call, sizes in elements; the fields of ArgosyLinear, mirrored by native.py.
struct ArgosyLinearInt {
    const void *x;       // [rows, cols], rows of `x_stride`
    const void *packed;  // the weight as argosy_linear_intN_pack laid it out
    const float *bias;   // [outs, padded to a multiple of 32], or null
    void *out;           // [rows, outs] in the dtype of x, contiguous
    int64_t rows, cols, outs, x_stride, threads;
};
}

namespace {

using namespace argosy;

constexpr int64_t TILE_ROWS = 16;    // rows of an operand
constexpr int64_t CHUNK_ROWS = 256;  // most rows of a work item
constexpr int64_t ITEM_BLOCKS = 8;   // most blocks of a work item
constexpr int64_t FEW_ROWS = 64;     // up to which items are small
constexpr int64_t ALONE_ROWS = 32;   // up to which the caller rounds x: a meeting of the threads costs more
constexpr int64_t THREAD_WEIGHTS = 1 << 18;  // met by up to a hundred rows in the time that it takes to wake a thread
[[maybe_unused]] constexpr int64_t VECTOR_ROWS = 8;   // up to which vectors keep up with memory
constexpr int64_t AHEAD = 4096;      // bytes of weight asked for before they are used

// What a chunk of a row of x is multiplied by, and the sum that its products with 128 would add, negated.
struct Factor {
    float scale;
    uint32_t offset;
};

// A work item: some rows by some blocks.
struct Item {
    int64_t row, rows, block, blocks;
};

// Where things lie in one call. Operands: [tile of 16 rows][step][row][64 signed bytes].
template <class E> struct Layout {
    const ArgosyLinearInt &a;
    const int64_t steps = steps_of(a.cols), chunks = chunks_of(a.cols);
    const int64_t tile_rows = std::min(TILE_ROWS, a.rows);  // a single tile is as high as there are rows
    const int64_t tiles = (a.rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t tile_bytes = steps * tile_rows * STEP;
    uint8_t *const inputs = scratch<0>(tiles * (tile_bytes + TILE_ROWS * chunks * sizeof(Factor)));
    Factor *const factors = (Factor *)(inputs + tiles * tile_bytes);  // [rows of all tiles][chunks]

    // A block of the weight; of 8 bits if it is to be.
    template <class Weight> const uint8_t *packed(int64_t block) const {
        return (const uint8_t *)a.packed + block * block_bytes<Weight>(a.cols);
    }
    template <class Weight> const uint8_t *expanded(int64_t block) const {
        if constexpr (std::is_same_v<Weight, Int8>) return packed<Int8>(block);
        uint8_t *const to = scratch<1>(block_bytes<Int8>(a.cols));
        expand_block<Weight>(packed<Weight>(block), a.cols, to);
        return to;
    }

    // Round a tile of rows to bytes, with zeros behind each row and below the last.
    void round_tile(int64_t tile) const {
        for (int64_t r = 0; r < tile_rows; r++) {
            const int64_t row = tile * TILE_ROWS + r;
            uint8_t *const to = inputs + tile * tile_bytes + r * STEP;
            for (int64_t chunk = 0; chunk < chunks; chunk++) {
                alignas(64) float values[CHUNK] = {};
                const int64_t first = chunk * CHUNK;
                const auto *x = (const typename E::Scalar *)a.x + row * a.x_stride + first;
                if (row < a.rows) E::read(x, std::min(CHUNK, a.cols - first), values);
                alignas(64) uint8_t bytes[CHUNK];
                const Rounded rounded = round_to_bytes<CHUNK>(values, bytes);
                factors[row * chunks + chunk] = {rounded.scale, (uint32_t)rounded.sum * -128u};
                for (int64_t w = 0; w < words_of(a.cols, chunk); w += STEP / 4)
                    std::memcpy(to + (first + w * 4) * tile_rows, bytes + w * 4, STEP);
            }
        }
    }

    // total [height][32] += a chunk's sums, scaled.
    template <class Sum> void add(const uint8_t *head, const Factor &factor, Sum left, Sum right, float *total) const {
        const f32x16 l = to_float(left) * load<f32x16>(head) * factor.scale;
        const f32x16 r = to_float(right) * load<f32x16>(head + 64) * factor.scale;
        store(total, load<f32x16>(total) + l);
        store(total + 16, load<f32x16>(total + 16) + r);
    }

    // Sums of 32 outputs, with the bias, to their place.
    void finish(const float *sums, int64_t row, int64_t block) const {
        const int64_t first = block * SIDE, count = std::min(SIDE, a.outs - first);
        f32x16 low = load<f32x16>(sums), high = load<f32x16>(sums + 16);
        if (a.bias) {
            low += load<f32x16>(a.bias + first);
            high += load<f32x16>(a.bias + first + 16);
        }
        auto *out = (typename E::Scalar *)a.out + row * a.outs + first;
        if (count == SIDE) return E::write(out, low, high);
        typename E::Scalar whole[SIDE];
        E::write(whole, low, high);
        std::memcpy(out, whole, count * sizeof *out);
    }
};

// Sums by vector instructions: up to eight rows of a tile against one block.
struct VectorUnit {
#ifdef __AVX512F__
    static constexpr int64_t MOST = 8;
#else
    static constexpr int64_t MOST = 2;
#endif

    template <class At> explicit VectorUnit(const At &) {}

    template <class Weight, int R, class At>
    static void rows(const At &at, const uint8_t *chunk, int64_t row, int64_t block) {
        const Factor *factors = at.factors + row * at.chunks;
        const uint8_t *x = at.inputs + row / TILE_ROWS * at.tile_bytes + row % TILE_ROWS * STEP;
        alignas(64) float total[R * SIDE] = {};
        for (int64_t c = 0; c < at.chunks; c++) {
            const uint8_t *from = chunk + Weight::HEAD_BYTES;
            u32x16 sum[R][2];
            for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = factors[r * at.chunks + c].offset - u32x16{};
            for (int64_t first = 0; first < words_of(at.a.cols, c); first += GROUP_WORDS) {
                const typename Weight::Group group(chunk, first / GROUP_WORDS);
                for (int64_t w = 0; w < GROUP_WORDS; w++, from += Weight::WORD_BYTES) {
                    const Pair weight = group.word(from);
                    for (int64_t line = 0; R < MOST && line < Weight::WORD_BYTES; line += 64)
                        __builtin_prefetch(from + AHEAD + line, 0, 2);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        const auto word = load<uint32_t>(x + r * STEP + first % 16 * 4 + w * 4);
                        sum[r][0] = dot_bytes(sum[r][0], weight.left, word);
                        sum[r][1] = dot_bytes(sum[r][1], weight.right, word);
                    }
                }
                if (first % 16) x += at.tile_rows * STEP;
            }
            for (int r = 0; r < R; r++)
                at.add(chunk, factors[r * at.chunks + c], sum[r][0], sum[r][1], total + r * SIDE);
            chunk = from;
        }
        for (int r = 0; r < R; r++) at.finish(total + r * SIDE, row + r, block);
    }

    template <class Weight, class At>
    static void block_by_rows(const At &at, const uint8_t *weight, int64_t block, const Item &item) {
        for (int64_t row = item.row, end = row + item.rows; row < end;) {
            const int64_t left = std::min(end - row, TILE_ROWS - row % TILE_ROWS);
            if (MOST == 8 && left >= 8) rows<Weight, MOST>(at, weight, row, block), row += MOST;
            else if (MOST == 8 && left >= 4) rows<Weight, MOST / 2>(at, weight, row, block), row += MOST / 2;
            else if (left >= 2) rows<Weight, 2>(at, weight, row, block), row += 2;
            else rows<Weight, 1>(at, weight, row, block), row += 1;
        }
    }

    template <class Weight, class At> static void run(const At &at, const Item &item) {
        for (int64_t block = item.block; block < item.block + item.blocks; block++) {
            if (item.rows <= 2 * MOST) block_by_rows<Weight>(at, at.template packed<Weight>(block), block, item);
            else block_by_rows<Int8>(at, at.template expanded<Weight>(block), block, item);
        }
    }
};

#ifdef ARGOSY_AMX
// Sums by the matrix unit: tiles 0-3 collect, 4-5 hold rows of x, 6-7 panels of the weight.
struct MatrixUnit {
    AmxTiles tiles;

    template <class At> explicit MatrixUnit(const At &at) : MatrixUnit((uint8_t)at.tile_rows) {}
    explicit MatrixUnit(uint8_t n) : tiles({n, n, n, n, n, n, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}) {}

    // A chunk of one or two tiles of rows: sums [TILES * 16][32].
    template <int TILES, class At>
    static void sums(const At &at, const uint8_t *x, const uint8_t *w, int64_t words, uint32_t *out) {
        AMX_ZERO(0); AMX_ZERO(1);
        if constexpr (TILES == 2) { AMX_ZERO(2); AMX_ZERO(3); }
        for (int64_t first = 0; first < words; first += 16, x += at.tile_rows * STEP, w += 16 * SIDE * 4) {
            AMX_LOAD(4, x, STEP);
            AMX_LOAD(6, w, SIDE * 4);
            AMX_MADD_INT8(0, 4, 6);
            AMX_LOAD(7, w + 64, SIDE * 4);
            AMX_MADD_INT8(1, 4, 7);
            if constexpr (TILES == 2) {
                AMX_LOAD(5, x + at.tile_bytes, STEP);
                AMX_MADD_INT8(2, 5, 6);
                AMX_MADD_INT8(3, 5, 7);
            }
        }
        AMX_STORE(0, out, SIDE * 4); AMX_STORE(1, out + 16, SIDE * 4);
        if constexpr (TILES == 2) {
            AMX_STORE(2, out + 16 * SIDE, SIDE * 4); AMX_STORE(3, out + 16 * SIDE + 16, SIDE * 4);
        }
    }

    template <class Weight, class At> static void run(const At &at, const Item &item) {
        float *const totals = (float *)scratch<2>(CHUNK_ROWS * SIDE * sizeof(float));
        alignas(64) uint32_t sum[2 * TILE_ROWS * SIDE];
        for (int64_t block = item.block; block < item.block + item.blocks; block++) {
            const uint8_t *chunk = at.template expanded<Weight>(block);
            std::memset(totals, 0, item.rows * SIDE * sizeof(float));
            for (int64_t c = 0; c < at.chunks; c++) {
                const int64_t words = words_of(at.a.cols, c);
                const uint8_t *const w = chunk + Int8::HEAD_BYTES;
                for (int64_t first = 0; first < item.rows; first += 2 * TILE_ROWS) {
                    const int64_t row = item.row + first, count = std::min(2 * TILE_ROWS, item.rows - first);
                    const uint8_t *x = at.inputs + row / TILE_ROWS * at.tile_bytes + c * CHUNK * at.tile_rows;
                    count <= TILE_ROWS ? sums<1>(at, x, w, words, sum) : sums<2>(at, x, w, words, sum);
                    for (int64_t r = 0; r < count; r++) {
                        const Factor &factor = at.factors[(row + r) * at.chunks + c];
                        const u32x16 left = load<u32x16>(sum + r * SIDE) + factor.offset;
                        const u32x16 right = load<u32x16>(sum + r * SIDE + 16) + factor.offset;
                        at.add(chunk, factor, left, right, totals + (first + r) * SIDE);
                    }
                }
                chunk = w + words * Int8::WORD_BYTES;
            }
            for (int64_t r = 0; r < item.rows; r++) at.finish(totals + r * SIDE, item.row + r, block);
        }
    }
};
#endif

// Chunks of rows by groups of blocks, taken by the threads.
template <class Unit, class Weight, class E> void run(const ArgosyLinearInt &a) {
    if (a.rows == 0) return;
    const Layout<E> at{a};
    const int64_t blocks = blocks_of(a.outs), parts = (a.rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
    const int64_t threads = std::clamp<int64_t>(a.outs * a.cols / THREAD_WEIGHTS * (100 + a.rows) / 100, 1, a.threads);
    const int64_t shares = threads * (a.rows <= FEW_ROWS ? 8 : 2);
    const int64_t group = std::clamp<int64_t>(blocks * parts / shares, 1, ITEM_BLOCKS);
    const int64_t groups = (blocks + group - 1) / group;
    const bool alone = a.rows <= ALONE_ROWS;
    for (int64_t tile = 0; alone && tile < at.tiles; tile++) at.round_tile(tile);
#pragma omp parallel num_threads((int)threads)
    {
        [[maybe_unused]] const Unit unit(at);
        if (!alone) {
#pragma omp for schedule(static)
            for (int64_t tile = 0; tile < at.tiles; tile++) at.round_tile(tile);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < parts * groups; i++) {
            const int64_t row = i % parts * CHUNK_ROWS, block = i / parts * group;
            Unit::template run<Weight>(at, {row, std::min(CHUNK_ROWS, a.rows - row), block, std::min(group, blocks - block)});
        }
    }
}

template <class Weight, class E> void run_best(const ArgosyLinearInt &a) {
#ifdef ARGOSY_AMX
    if (a.rows > VECTOR_ROWS && amx_allowed()) return run<MatrixUnit, Weight, E>(a);
#endif
    run<VectorUnit, Weight, E>(a);
}

}  // namespace

// Of each format: the bytes that a packed weight takes; by dtype, packing a weight [outs, cols], which tells whether all
// of it is finite, and the linear.
#define ARGOSY_LINEAR_DTYPE(name, Weight, dtype, E)                                                                   \
    int64_t argosy_linear_##name##_pack_##dtype(const void *weight, int64_t outs, int64_t cols, uint8_t *packed,      \
                                                int64_t threads) {                                                    \
        return pack<Weight, E>({weight, outs, cols}, packed, threads);                                                \
    }                                                                                                                 \
    void argosy_linear_##name##_##dtype(const ArgosyLinearInt *call) { run_best<Weight, E>(*call); }

#define ARGOSY_LINEAR(name, Weight)                                                                                   \
    int64_t argosy_linear_##name##_bytes(int64_t outs, int64_t cols) {                                                \
        return blocks_of(outs) * block_bytes<Weight>(cols);                                                           \
    }                                                                                                                 \
    ARGOSY_LINEAR_DTYPE(name, Weight, bfloat16, Half)                                                                 \
    ARGOSY_LINEAR_DTYPE(name, Weight, float32, Wide)

extern "C" {
ARGOSY_LINEAR(int8, Int8)
ARGOSY_LINEAR(int4, Int4)
}
