// out = x . weight^T + bias in bfloat16 with float32 sums, behind a plain C ABI.
//
// oneDNN chooses how it splits a long sum by the number of rows, so that a token's result depends on who shares
// its batch. Here each output is one sum over the words of its row, in order, whatever else is computed.
//
// Packed weight: [ceil(N / 32)][padded K / 32 steps][2 panels][16 words][16 outputs], a word holding two neighbours
// along K; N and K are padded with zeros. A block of 32 outputs is read front to back, and a panel of a step is an
// operand of the matrix unit as it lies. The rows of x are packed to operands too, since in x they lie a power of
// two apart too often: [tile of 16 rows][step][row][16 words].

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "amx.h"
#include "simd.h"

extern "C" {

// One call, sizes in elements; mirrored field by field by native.py.
struct ArgosyLinear {
    const void *x;       // [rows, cols] bfloat16, rows of `x_stride`
    const void *packed;  // the weight as argosy_linear_pack laid it out
    const float *bias;   // [outs, padded to a multiple of 32], or null
    void *out;           // [rows, outs] bfloat16, contiguous
    int64_t rows, cols, outs, x_stride, threads;
};
}

namespace {

using namespace argosy;

constexpr int64_t SIDE = 32;          // outputs of a block
constexpr int64_t TILE_ROWS = 16;     // rows of an operand
constexpr int64_t STEP = 32;          // elements of an operand along K: sixteen words, a cache line
constexpr int64_t PANEL_WORDS = 256;  // one panel of one step
constexpr int64_t STEP_BYTES = 2048;  // both panels
constexpr int64_t CHUNK_ROWS = 256;   // most rows of a work item
constexpr int64_t GROUP = 8;          // most blocks of a work item: its sums stay in the second-level cache
constexpr int64_t DEPTH = 10;         // steps of a block that stay in the first-level cache for all rows of an item
constexpr int64_t FEW_ROWS = 64;      // up to which an item takes all steps at once
constexpr int64_t ALONE_ROWS = 32;    // up to which the caller packs x: a meeting of the threads costs more
constexpr int64_t THREAD_WEIGHTS = 1 << 18;  // met by up to a hundred rows in the time that it takes to wake a thread
constexpr int64_t AHEAD = 8192;       // bytes of weight asked for before they are used

int64_t steps_of(int64_t cols) { return (cols + STEP - 1) / STEP; }
// The size of equal parts of `whole`, at most `most` each.
int64_t even(int64_t whole, int64_t most) {
    const int64_t parts = (whole + most - 1) / most;
    return (whole + parts - 1) / parts;
}
int64_t blocks_of(int64_t outs) { return (outs + SIDE - 1) / SIDE; }

// Memory that each thread keeps, one for each use: giving it back after a call costs more than the packing.
template <int USE> uint8_t *scratch(size_t bytes) {
    static thread_local std::unique_ptr<void, decltype(&std::free)> kept(nullptr, &std::free);
    static thread_local size_t held = 0;
    if (held < bytes) {
        kept.reset(std::aligned_alloc(64, bytes));
        held = bytes;
    }
    return (uint8_t *)kept.get();
}

// A work item: some rows by some blocks.
struct Item {
    int64_t row, rows, block, blocks;
};

// Where things lie in one call.
struct Layout {
    const ArgosyLinear &a;
    const int64_t steps = steps_of(a.cols);
    const int64_t tile_rows = std::min(TILE_ROWS, a.rows);  // a single tile is as high as there are rows
    const int64_t tiles = (a.rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t tile_bytes = steps * tile_rows * 64;

    // Rows of x as operands, with zeros behind each row and below the last.
    void pack_tile(uint8_t *inputs, int64_t tile) const {
        uint8_t *to = inputs + tile * tile_bytes;
        for (int64_t r = 0; r < tile_rows; r++) {
            const int64_t row = tile * TILE_ROWS + r, bytes = row < a.rows ? a.cols * 2 : 0;
            const uint8_t *x = (const uint8_t *)a.x + row * a.x_stride * 2;
            for (int64_t step = 0; step < steps; step++) {
                uint8_t *line = to + (step * tile_rows + r) * 64;
                const int64_t held = std::clamp<int64_t>(bytes - step * 64, 0, 64);
                if (held == 64) {
                    store(line, load<u32x16>(x + step * 64));
                } else {
                    std::memset(line, 0, 64);
                    std::memcpy(line, x + step * 64, held);
                }
            }
        }
    }

    const uint8_t *weight(int64_t block) const {
        return (const uint8_t *)a.packed + block * steps * STEP_BYTES;
    }

    // Sums [blocks][height][32], with the bias, to bfloat16 in their place: row by row, as memory likes it.
    void finish(const float *sums, int64_t height, const Item &item) const {
        for (int64_t r = 0; r < item.rows; r++)
            for (int64_t i = 0; i < item.blocks; i++)
                finish_line(sums + (i * height + r) * SIDE, item.row + r, item.block + i);
    }

  private:
    void finish_line(const float *sums, int64_t row, int64_t block) const {
        const int64_t first = block * SIDE, count = std::min(SIDE, a.outs - first);
        f32x16 low = load<f32x16>(sums), high = load<f32x16>(sums + 16);
        if (a.bias) {
            low += load<f32x16>(a.bias + first);
            high += load<f32x16>(a.bias + first + 16);
        }
        uint16_t *out = (uint16_t *)a.out + row * a.outs + first;
        if (count == SIDE) return store_bfloat16(out, low, high);
        uint16_t whole[SIDE];
        store_bfloat16(whole, low, high);
        std::memcpy(out, whole, count * 2);
    }
};

// Sums by vector multiply-adds: R rows of a tile against one block.
struct VectorUnit {
#ifdef __AVX512F__
    static constexpr int64_t ROWS = 8;
#else
    static constexpr int64_t ROWS = 2;
#endif

    explicit VectorUnit(const Layout &) {}

    template <int R> static void sums(const Layout &at, const uint8_t *x, const uint32_t *weight, float *out) {
        f32x16 sum[R][2] = {};
        for (int64_t step = 0; step < at.steps; step++, x += at.tile_rows * 64, weight += 2 * PANEL_WORDS)
            for (int64_t w = 0; w < 16; w++) {
                const u32x16 left = load<u32x16>(weight + w * 16);
                const u32x16 right = load<u32x16>(weight + PANEL_WORDS + w * 16);
                for (int r = 0; r < R; r++) {
                    uint32_t word;
                    std::memcpy(&word, x + r * 64 + w * 4, 4);
                    sum[r][0] = Bfloat16::madd(sum[r][0], word, left);
                    sum[r][1] = Bfloat16::madd(sum[r][1], word, right);
                }
            }
        std::memcpy(out, sum, sizeof sum);
    }

    static void run(const Layout &at, const uint8_t *inputs, const Item &item, float *out) {
        for (int64_t block = 0; block < item.blocks; block++) {
            const uint32_t *weight = (const uint32_t *)at.weight(item.block + block);
            for (int64_t r = 0; r < item.rows;) {
                const int64_t row = item.row + r, inside = row % TILE_ROWS;
                const uint8_t *x = inputs + row / TILE_ROWS * at.tile_bytes + inside * 64;
                float *to = out + (block * item.rows + r) * SIDE;
                const bool many = r + ROWS <= item.rows && inside + ROWS <= TILE_ROWS;
                many ? sums<ROWS>(at, x, weight, to) : sums<1>(at, x, weight, to);
                r += many ? ROWS : 1;
            }
        }
        at.finish(out, item.rows, item);
    }
};

#ifdef ARGOSY_AMX
// Sums by the matrix unit: tiles 0-3 collect, 4-5 hold rows of x, 6-7 panels of the weight.
struct MatrixUnit {
    AmxTiles tiles;

    explicit MatrixUnit(const Layout &at) : MatrixUnit((uint8_t)at.tile_rows) {}
    explicit MatrixUnit(uint8_t n) : tiles({n, n, n, n, n, n, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}) {}

    // One block by one or two tiles of rows, over some steps; meanwhile `lines` cache lines a step are asked for.
    struct Pass {
        const uint8_t *x, *w, *wanted;
        int64_t steps, lines;
        bool first;
    };

    // Adds to sums [TILES * 16][32], or begins them.
    template <int TILES> static void sums(const Layout &at, const Pass &pass, float *out) {
        const int64_t operand = at.tile_rows * 64;
        const uint8_t *x = pass.x, *w = pass.w, *wanted = pass.wanted;
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
            AMX_LOAD(7, w + STEP_BYTES / 2, 64);
            AMX_MADD(1, 4, 7);
            if constexpr (TILES == 2) {
                AMX_LOAD(5, x + at.tile_bytes, 64);
                AMX_MADD(2, 5, 6);
                AMX_MADD(3, 5, 7);
            }
        }
        AMX_STORE(0, out, SIDE * 4); AMX_STORE(1, out + 16, SIDE * 4);
        if constexpr (TILES == 2) {
            AMX_STORE(2, out + 16 * SIDE, SIDE * 4); AMX_STORE(3, out + 16 * SIDE + 16, SIDE * 4);
        }
    }

    static void run(const Layout &at, const uint8_t *inputs, const Item &item, float *out) {
        const int64_t pairs = (item.rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS), height = pairs * 2 * TILE_ROWS;
        const int64_t depth = item.rows <= FEW_ROWS ? at.steps : even(at.steps, DEPTH);
        const int64_t lines = (STEP_BYTES / 64 + pairs - 1) / pairs;
        for (int64_t step = 0; step < at.steps; step += depth) {
            const int64_t steps = std::min(depth, at.steps - step);
            for (int64_t block = 0; block < item.blocks; block++) {
                const uint8_t *w = at.weight(item.block + block) + step * STEP_BYTES;
                const uint8_t *wanted = w + (pairs == 1 ? AHEAD : at.steps * STEP_BYTES);
                const uint8_t *x = inputs + item.row / TILE_ROWS * at.tile_bytes + step * at.tile_rows * 64;
                float *to = out + block * height * SIDE;
                for (int64_t left = item.rows; left > 0; left -= 2 * TILE_ROWS) {
                    const Pass pass{x, w, wanted, steps, lines, step == 0};
                    left <= TILE_ROWS ? sums<1>(at, pass, to) : sums<2>(at, pass, to);
                    x += 2 * at.tile_bytes;
                    to += 2 * TILE_ROWS * SIDE;
                    wanted += steps * lines * 64;
                }
            }
        }
        at.finish(out, height, item);
    }
};
#endif

// Chunks of rows by groups of blocks, taken by the threads.
template <class Unit> void run(const ArgosyLinear &a) {
    if (a.rows == 0) return;
    const Layout at{a};
    uint8_t *const inputs = scratch<0>(at.tiles * at.tile_bytes);
    const int64_t blocks = blocks_of(a.outs), chunks = (a.rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
    const int64_t threads = std::clamp<int64_t>(a.outs * a.cols / THREAD_WEIGHTS * (100 + a.rows) / 100, 1, a.threads);
    const int64_t shares = threads * (a.rows <= FEW_ROWS ? 8 : 2);
    const int64_t group = std::clamp<int64_t>(blocks * chunks / shares, 1, GROUP);
    const int64_t groups = (blocks + group - 1) / group;
    const bool alone = a.rows <= ALONE_ROWS;
    for (int64_t tile = 0; alone && tile < at.tiles; tile++) at.pack_tile(inputs, tile);
#pragma omp parallel num_threads((int)threads)
    {
        [[maybe_unused]] const Unit unit(at);
        float *const sums = (float *)scratch<1>(CHUNK_ROWS * GROUP * SIDE * sizeof(float));
        if (!alone) {
#pragma omp for schedule(static)
            for (int64_t tile = 0; tile < at.tiles; tile++) at.pack_tile(inputs, tile);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < chunks * groups; i++) {
            const int64_t row = i % chunks * CHUNK_ROWS, block = i / chunks * group;
            Unit::run(at, inputs, {row, std::min(CHUNK_ROWS, a.rows - row), block, std::min(group, blocks - block)},
                      sums);
        }
    }
}

}  // namespace

extern "C" {

// Bytes that the packed weight [outs, cols] takes.
int64_t argosy_linear_bytes(int64_t outs, int64_t cols) { return blocks_of(outs) * SIDE * steps_of(cols) * STEP * 2; }

// Lay out weight [outs, cols], bfloat16, contiguous, into `packed`: panels are transposed in the first-level cache.
void argosy_linear_pack(const uint16_t *weight, int64_t outs, int64_t cols, uint16_t *packed, int64_t threads) {
    const int64_t steps = steps_of(cols), panels = blocks_of(outs) * 2;
#pragma omp parallel for num_threads((int)threads)
    for (int64_t panel = 0; panel < panels; panel++) {
        uint32_t *to = (uint32_t *)packed + (panel / 2 * steps * 2 + panel % 2) * PANEL_WORDS;
        for (int64_t step = 0; step < steps; step++, to += 2 * PANEL_WORDS) {
            uint32_t rows[16][16] = {};
            const int64_t held = std::min(STEP, cols - step * STEP) * 2;
            for (int64_t n = panel * 16; n < std::min(outs, panel * 16 + 16); n++)
                std::memcpy(rows[n % 16], weight + n * cols + step * STEP, held);
            for (int64_t word = 0; word < 16; word++)
                for (int64_t n = 0; n < 16; n++) to[word * 16 + n] = rows[n][word];
        }
    }
}

void argosy_linear(const ArgosyLinear *call) {
#ifdef ARGOSY_AMX
    if (amx_allowed()) return run<MatrixUnit>(*call);
#endif
    run<VectorUnit>(*call);
}

// The same by the vector unit, for tests.
void argosy_linear_vector(const ArgosyLinear *call) { run<VectorUnit>(*call); }
}
