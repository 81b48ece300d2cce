// out = x . weight^T + bias with weights of 8 or 4 bits and rows of x rounded to 8, behind a plain C ABI.
//
// Both are rounded by chunks of 256 along K. A chunk's products are integers that float32 holds exactly, so that every
// way to sum them gives the same bits; chunks are scaled and added in float32, in order, without fused multiply-adds.
//
// Weights stand as unsigned bytes, 128 above their value; four neighbours along K of one output make a word. Packed:
// [ceil(N / 32)][chunks] of a head, then [words][32 outputs]; the last chunk is as long as K, padded to 64, wants.
//   8 bits: the head is a float32 scale for each output, a word has 32 bits.
//   4 bits: behind the scales, the head has a byte for each group of 32 along K and output, a multiplier in its low half
//     and a zero point in its high one. A line of 64 bytes holds a word of every output: outputs 0-15 in the low halves
//     of its bytes, 16-31 in the high ones. (half - zero) * multiplier is the value, -127..127: a word is expanded to
//     8 bits by one multiplication and one addition.

// torch rounds a product before it is added; so must we.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "amx.h"
#include "bytes.h"
#include "simd.h"

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

constexpr int64_t SIDE = 32;         // outputs of a block
constexpr int64_t TILE_ROWS = 16;    // rows of an operand
constexpr int64_t STEP = 64;         // elements of an operand along K: sixteen words, a cache line
constexpr int64_t CHUNK = 256;       // elements along K that share a scale
constexpr int64_t CHUNK_WORDS = CHUNK / 4;
constexpr int64_t GROUP_WORDS = 8;   // words along K that share a multiplier
constexpr int64_t CHUNK_ROWS = 256;  // most rows of a work item
constexpr int64_t ITEM_BLOCKS = 8;   // most blocks of a work item
constexpr int64_t FEW_ROWS = 64;     // up to which items are small
constexpr int64_t ALONE_ROWS = 32;   // up to which the caller rounds x: a meeting of the threads costs more
constexpr int64_t THREAD_WEIGHTS = 1 << 18;  // met by up to a hundred rows in the time that it takes to wake a thread
constexpr int64_t AHEAD = 4096;      // bytes of weight asked for before they are used

int64_t blocks_of(int64_t outs) { return (outs + SIDE - 1) / SIDE; }
int64_t steps_of(int64_t cols) { return (cols + STEP - 1) / STEP; }
int64_t chunks_of(int64_t cols) { return (cols + CHUNK - 1) / CHUNK; }

// Memory that each thread keeps, one for each use: giving it back after a call costs more than the rounding.
template <int USE> uint8_t *scratch(size_t bytes) {
    static thread_local std::unique_ptr<void, decltype(&std::free)> kept(nullptr, &std::free);
    static thread_local size_t held = 0;
    if (held < bytes) {
        held = (bytes + 63) / 64 * 64;
        kept.reset(std::aligned_alloc(64, held));
    }
    return (uint8_t *)kept.get();
}

// The dtype of x and out: floats from it, and 32 floats to it.
struct Wide {
    using Scalar = float;
    static void read(const float *from, int64_t count, float *to) { std::memcpy(to, from, count * 4); }
    static void write(float *to, f32x16 low, f32x16 high) { store(to, low), store(to + 16, high); }
};

struct Half {
    using Scalar = uint16_t;
    static void read(const uint16_t *from, int64_t count, float *to) {
        for (int64_t i = 0; i < count; i++) {
            const uint32_t bits = (uint32_t)from[i] << 16;
            std::memcpy(to + i, &bits, 4);
        }
    }
    static void write(uint16_t *to, f32x16 low, f32x16 high) { store_bfloat16(to, low, high); }
};

struct Pair {
    u32x16 left, right;  // a word of outputs 0-15 and of outputs 16-31
};

struct Int8 {
    static constexpr int64_t HEAD_BYTES = SIDE * 4, WORD_BYTES = SIDE * 4;

    struct Group {
        Group(const uint8_t *, int64_t) {}
        static Pair word(const uint8_t *at) { return {load<u32x16>(at), load<u32x16>(at + 64)}; }
    };

    static void put(uint8_t *words, int64_t out, int64_t k, int8_t value) {
        words[k / 4 * WORD_BYTES + out * 4 + k % 4] = (uint8_t)(value + 128);
    }
    static void put_group(uint8_t *, int64_t, int64_t, uint8_t) {}
};

struct Int4 {
    static constexpr int64_t HEAD_BYTES = SIDE * 4 + CHUNK_WORDS / GROUP_WORDS * SIDE, WORD_BYTES = SIDE * 2;

    // The multipliers of a group, twice in each lane for products of 16 bits, and what a half of zero becomes.
    class Group {
        u32x16 left, right, left_base, right_base;
        // No byte's product passes 15 * 15, so that none reaches into its neighbour.
        static u32x16 times(u32x16 a, u32x16 b) { return (u32x16)((u16x32)a * (u16x32)b); }
        static void split(const uint8_t *head, u32x16 &multiplier, u32x16 &base) {
            const u32x16 both = widen(load<u8x16>(head)), m = both & 15u;
            const u32x16 zero = times(m, both >> 4), twice = zero | zero << 8;
            multiplier = m | m << 16;
            base = 0x80808080u - (twice | twice << 16);
        }

      public:
        Group(const uint8_t *chunk, int64_t group) {
            const uint8_t *const head = chunk + SIDE * 4 + group * SIDE;
            split(head, left, left_base);
            split(head + 16, right, right_base);
        }
        Pair word(const uint8_t *at) const {
            const u32x16 both = load<u32x16>(at);
            return {times(both & 0x0f0f0f0fu, left) + left_base, times((both >> 4) & 0x0f0f0f0fu, right) + right_base};
        }
    };

    static void put(uint8_t *words, int64_t out, int64_t k, int8_t value) {
        words[k / 4 * WORD_BYTES + out % 16 * 4 + k % 4] |= (uint8_t)value << out / 16 * 4;
    }
    static void put_group(uint8_t *chunk, int64_t out, int64_t group, uint8_t byte) {
        chunk[SIDE * 4 + group * SIDE + out] = byte;
    }
};

template <class Weight> int64_t block_bytes(int64_t cols) {
    return chunks_of(cols) * Weight::HEAD_BYTES + steps_of(cols) * (STEP / 4) * Weight::WORD_BYTES;
}

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
template <class W, class E> struct Layout {
    using Weight = W;
    const ArgosyLinearInt &a;
    const int64_t steps = steps_of(a.cols), chunks = chunks_of(a.cols);
    const int64_t tile_rows = std::min(TILE_ROWS, a.rows);  // a single tile is as high as there are rows
    const int64_t tiles = (a.rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t tile_bytes = steps * tile_rows * STEP;
    uint8_t *const inputs = scratch<0>(tiles * (tile_bytes + TILE_ROWS * chunks * sizeof(Factor)));
    Factor *const factors = (Factor *)(inputs + tiles * tile_bytes);  // [rows of all tiles][chunks]

    int64_t words(int64_t chunk) const { return std::min(CHUNK_WORDS, steps * (STEP / 4) - chunk * CHUNK_WORDS); }
    const uint8_t *weight(int64_t block) const { return (const uint8_t *)a.packed + block * block_bytes<W>(a.cols); }
    const uint8_t *next(const uint8_t *chunk, int64_t words) const {
        return chunk + W::HEAD_BYTES + words * W::WORD_BYTES;
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
                for (int64_t w = 0; w < words(chunk); w += STEP / 4)
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

    template <int R, class At> static void rows(const At &at, int64_t row, int64_t block) {
        using Weight = typename At::Weight;
        const Factor *factors = at.factors + row * at.chunks;
        const uint8_t *x = at.inputs + row / TILE_ROWS * at.tile_bytes + row % TILE_ROWS * STEP;
        const uint8_t *chunk = at.weight(block);
        alignas(64) float total[R * SIDE] = {};
        for (int64_t c = 0; c < at.chunks; c++) {
            const int64_t words = at.words(c);
            const uint8_t *from = chunk + Weight::HEAD_BYTES;
            u32x16 sum[R][2];
            for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = factors[r * at.chunks + c].offset - u32x16{};
            for (int64_t first = 0; first < words; first += GROUP_WORDS) {
                const typename Weight::Group group(chunk, first / GROUP_WORDS);
                for (int64_t w = 0; w < GROUP_WORDS; w++, from += Weight::WORD_BYTES) {
                    const Pair weight = group.word(from);
                    for (int64_t line = 0; line < Weight::WORD_BYTES; line += 64)
                        __builtin_prefetch(from + AHEAD + line, 0, 2);
                    for (int r = 0; r < R; r++) {
                        uint32_t word;
                        std::memcpy(&word, x + r * STEP + first % 16 * 4 + w * 4, 4);
                        sum[r][0] = dot_bytes(sum[r][0], weight.left, word);
                        sum[r][1] = dot_bytes(sum[r][1], weight.right, word);
                    }
                }
                if (first % 16) x += at.tile_rows * STEP;
            }
            for (int r = 0; r < R; r++)
                at.add(chunk, factors[r * at.chunks + c], sum[r][0], sum[r][1], total + r * SIDE);
            chunk = at.next(chunk, words);
        }
        for (int r = 0; r < R; r++) at.finish(total + r * SIDE, row + r, block);
    }

    template <class At> static void run(const At &at, const Item &item) {
        for (int64_t block = item.block; block < item.block + item.blocks; block++)
            for (int64_t row = item.row, end = row + item.rows; row < end;) {
                const int64_t left = std::min(end - row, TILE_ROWS - row % TILE_ROWS);
                if (MOST == 8 && left >= 8) rows<MOST>(at, row, block), row += MOST;
                else if (MOST == 8 && left >= 4) rows<MOST / 2>(at, row, block), row += MOST / 2;
                else if (left >= 2) rows<2>(at, row, block), row += 2;
                else rows<1>(at, row, block), row += 1;
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

    // The words of a chunk with 8 bits: where they lie, or expanded to `into`.
    template <class Weight> static const uint8_t *panels(const uint8_t *chunk, int64_t words, uint8_t *into) {
        const uint8_t *from = chunk + Weight::HEAD_BYTES;
        if constexpr (Weight::WORD_BYTES == Int8::WORD_BYTES) return from;
        for (int64_t first = 0; first < words; first += GROUP_WORDS) {
            const typename Weight::Group group(chunk, first / GROUP_WORDS);
            for (int64_t w = first; w < first + GROUP_WORDS; w++)
                store(into + w * SIDE * 4, group.word(from + w * Weight::WORD_BYTES));
        }
        return into;
    }

    template <class At> static void run(const At &at, const Item &item) {
        using Weight = typename At::Weight;
        float *const totals = (float *)scratch<1>(CHUNK_ROWS * SIDE * sizeof(float));
        alignas(64) uint8_t expanded[CHUNK * SIDE];
        alignas(64) uint32_t sum[2 * TILE_ROWS * SIDE];
        for (int64_t block = item.block; block < item.block + item.blocks; block++) {
            const uint8_t *chunk = at.weight(block);
            std::memset(totals, 0, item.rows * SIDE * sizeof(float));
            for (int64_t c = 0; c < at.chunks; c++) {
                const int64_t words = at.words(c);
                const uint8_t *w = panels<Weight>(chunk, words, expanded);
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
                chunk = at.next(chunk, words);
            }
            for (int64_t r = 0; r < item.rows; r++) at.finish(totals + r * SIDE, item.row + r, block);
        }
    }
};
#endif

// Chunks of rows by groups of blocks, taken by the threads.
template <class Unit, class Weight, class E> void run(const ArgosyLinearInt &a) {
    if (a.rows == 0) return;
    const Layout<Weight, E> at{a};
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
            Unit::run(at, {row, std::min(CHUNK_ROWS, a.rows - row), block, std::min(group, blocks - block)});
        }
    }
}

template <class Weight, class E> void run_best(const ArgosyLinearInt &a) {
#ifdef ARGOSY_AMX
    if (amx_allowed()) return run<MatrixUnit, Weight, E>(a);
#endif
    run<VectorUnit, Weight, E>(a);
}

// Rows of a weight as quantize.py makes them, contiguous.
struct Quantized {
    const int8_t *values;   // [rows, cols]: -127..127, or 0..15 with groups
    const uint8_t *groups;  // [rows, groups of 32]: multiplier + 16 * zero point; or null
    const float *scales;    // [rows, chunks]
    int64_t rows, cols;
};

// Lay out the rows of a block; outputs beyond them and elements beyond K become zeros.
template <class Weight> void pack_block(const Quantized &from, int64_t first, uint8_t *chunk) {
    const int64_t chunks = chunks_of(from.cols), groups = (from.cols + 31) / 32, steps = steps_of(from.cols);
    const int64_t count = std::min(SIDE, from.rows - first);
    std::memset(chunk, 0, block_bytes<Weight>(from.cols));
    for (int64_t c = 0; c < chunks; c++) {
        const int64_t words = std::min(CHUNK_WORDS, steps * (STEP / 4) - c * CHUNK_WORDS);
        const int64_t held = std::min(CHUNK, from.cols - c * CHUNK);
        uint8_t *const to = chunk + Weight::HEAD_BYTES;
        for (int64_t out = 0; out < count; out++) {
            const int64_t row = first + out;
            std::memcpy(chunk + out * 4, from.scales + row * chunks + c, 4);
            for (int64_t g = c * 8; from.groups && g < std::min(groups, c * 8 + 8); g++)
                Weight::put_group(chunk, out, g % 8, from.groups[row * groups + g]);
            for (int64_t k = 0; k < words * 4; k++)
                Weight::put(to, out, k, k < held ? from.values[row * from.cols + c * CHUNK + k] : 0);
        }
        chunk = to + words * Weight::WORD_BYTES;
    }
}

template <class Weight> void pack(const Quantized &from, uint8_t *packed) {
    const int64_t bytes = block_bytes<Weight>(from.cols);
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks_of(from.rows); block++)
        pack_block<Weight>(from, block * SIDE, packed + block * bytes);
}

}  // namespace

// Of each format: the bytes that a packed weight takes; packing, by blocks of 32 outputs; the linear by dtype, by the
// best unit there is or by the vector unit, for tests.
#define ARGOSY_LINEAR(name, Weight)                                                                                   \
    int64_t argosy_linear_##name##_bytes(int64_t outs, int64_t cols) { return blocks_of(outs) * block_bytes<Weight>(cols); } \
    void argosy_linear_##name##_pack(const int8_t *values, const uint8_t *groups, const float *scales,                \
                                     int64_t rows, int64_t cols, uint8_t *packed) {                                   \
        pack<Weight>({values, groups, scales, rows, cols}, packed);                                              \
    }                                                                                                                 \
    void argosy_linear_##name##_bfloat16(const ArgosyLinearInt *call) { run_best<Weight, Half>(*call); }              \
    void argosy_linear_##name##_float32(const ArgosyLinearInt *call) { run_best<Weight, Wide>(*call); }

extern "C" {
ARGOSY_LINEAR(int8, Int8)
ARGOSY_LINEAR(int4, Int4)
}
