// out = x . weight^T + bias in bfloat16 with float32 sums, behind a plain C ABI.
//
// oneDNN chooses how it splits a long sum by the number of rows, so that a token's result depends on who shares
// its batch. Here each output is one sum over the words of its row, in order, whatever else is computed.
//
// Packed weight: [ceil(N / 32)][padded K / 32 steps][2 panels][16 words][16 outputs], a word holding two neighbours
// along K; N and K are padded with zeros. A block of 32 outputs is read front to back, and a panel of a step is an
// operand of the matrix unit as it lies. The rows of x are packed to operands too, since in x they lie a power of
// two apart too often: [tile of rows][step][row][a line of 16 words, as the unit wants them].

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "linear_units.h"
#include "scratch.h"

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

constexpr int64_t FEW_ROWS = 64;   // up to which an item takes block after block, else a depth of all blocks
constexpr int64_t ALONE_ROWS = 32; // up to which the caller packs x: a meeting of the threads costs more
constexpr int64_t THREAD_WEIGHTS = 1 << 18;  // met by up to a hundred rows in the time that it takes to wake a thread

int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
// The size of equal parts of `whole`, at most `most` each.
int64_t even(int64_t whole, int64_t most) { return parts_of(whole, parts_of(whole, most)); }

// A work item: some rows by some blocks.
struct Item {
    int64_t row, rows, block, blocks;
};

// One call, cut into tiles of rows, steps along K and blocks of outputs.
template <class Unit> struct Linear {
    const ArgosyLinear &a;
    const int64_t steps = parts_of(a.cols, STEP);
    const int64_t blocks = parts_of(a.outs, SIDE);
    const int64_t tile_rows = Unit::PASS_TILES > 1 ? std::min(Unit::TILE_ROWS, a.rows) : even(a.rows, Unit::TILE_ROWS);
    const int64_t tiles = parts_of(a.rows, tile_rows);
    const int64_t tile_bytes = steps * tile_rows * Unit::LINE;

    // Rows of x as operands, with zeros behind each row and below the last.
    void pack_tile(uint8_t *inputs, int64_t tile) const {
        uint8_t *to = inputs + tile * tile_bytes;
        for (int64_t r = 0; r < tile_rows; r++) {
            const int64_t row = tile * tile_rows + r, bytes = row < a.rows ? a.cols * 2 : 0;
            const uint8_t *x = (const uint8_t *)a.x + row * a.x_stride * 2;
            for (int64_t step = 0; step < steps; step++) {
                u32x16 words{};
                const int64_t held = std::clamp<int64_t>(bytes - step * 64, 0, 64);
                if (held == 64) words = load<u32x16>(x + step * 64);
                else std::memcpy(&words, x + step * 64, held);
                Unit::pack(to + (step * tile_rows + r) * Unit::LINE, words);
            }
        }
    }

    // The sums of an item [blocks][height][32], part of the steps after part, then its outputs.
    void compute(const uint8_t *inputs, const Item &item, float *sums) const {
        const int64_t pass_rows = Unit::PASS_TILES * tile_rows, passes = parts_of(item.rows, pass_rows);
        const int64_t depth = item.rows <= Unit::WHOLE_ROWS ? steps : even(steps, Unit::DEPTH);
        const int64_t parts = parts_of(steps, depth), turns = parts * item.blocks;
        const auto turn_at = [&](int64_t turn) {
            return item.rows <= FEW_ROWS ? std::pair(turn / parts, turn % parts)
                                         : std::pair(turn % item.blocks, turn / item.blocks);
        };
        const auto weight_at = [&](int64_t turn) {
            const auto [block, part] = turn_at(std::min(turn, turns - 1));
            return (const uint8_t *)a.packed + ((item.block + block) * steps + part * depth) * STEP_BYTES;
        };
        for (int64_t turn = 0; turn < turns; turn++) {
            const auto [block, part] = turn_at(turn);
            LinearPass pass;
            pass.x = inputs + item.row / tile_rows * tile_bytes + part * depth * tile_rows * Unit::LINE;
            pass.weight = weight_at(turn);
            pass.sums = sums + block * passes * pass_rows * SIDE;
            pass.tile_rows = tile_rows;
            pass.tile_bytes = tile_bytes;
            pass.steps = std::min(depth, steps - part * depth);
            pass.first = part == 0;
            pass.once = passes == 1;
            pass.wanted = pass.once ? pass.weight + AHEAD : weight_at(turn + 1);
            const uint8_t *const enough = pass.wanted + pass.steps * STEP_BYTES;
            // Each block asks for its share of the next part of x.
            const bool more = item.rows > FEW_ROWS && part + 1 < parts;
            pass.x_lines = more ? parts_of(tile_rows * Unit::LINE / 64, item.blocks) : 0;
            const int64_t later = pass.steps * (tile_rows * Unit::LINE + block * pass.x_lines * 64);
            for (int64_t done = 0; done < item.rows; done += pass_rows) {
                pass.rows = std::min(pass_rows, item.rows - done);
                pass.lines = pass.wanted < enough ? parts_of(STEP_BYTES / 64, passes) : 0;
                pass.x_wanted = pass.x + later;
                Unit::run(pass);
                pass.x += Unit::PASS_TILES * tile_bytes;
                pass.wanted += pass.steps * pass.lines * 64;
                pass.sums += pass_rows * SIDE;
            }
        }
        finish(sums, passes * pass_rows, item);
    }

  private:
    // Sums, with the bias, to bfloat16 in their place: row by row, as memory likes it.
    void finish(const float *sums, int64_t height, const Item &item) const {
        for (int64_t r = 0; r < item.rows; r++)
            for (int64_t i = 0; i < item.blocks; i++)
                finish_line(sums + (i * height + r) * SIDE, item.row + r, item.block + i);
    }

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

// Chunks of rows by groups of blocks, taken by the threads.
template <class Unit> void run(const ArgosyLinear &a) {
    if (a.rows == 0) return;
    const Linear<Unit> linear{a};
    const int64_t blocks = linear.blocks, tiles = linear.tiles;
    const int64_t threads = std::clamp<int64_t>(a.outs * a.cols / THREAD_WEIGHTS * (100 + a.rows) / 100, 1, a.threads);
    const int64_t chunk = even(tiles, Unit::CHUNK_ROWS / linear.tile_rows) * linear.tile_rows;
    const int64_t chunks = parts_of(a.rows, chunk);
    const int64_t shares = parts_of(threads * (a.rows <= FEW_ROWS ? 8 : 4), chunks);
    const int64_t wanted = std::max(parts_of(blocks, Unit::GROUP), shares);
    const int64_t groups = std::min(parts_of(wanted, threads) * threads, blocks);
    uint8_t *const inputs = scratch<0>(tiles * linear.tile_bytes);
    const bool alone = a.rows <= ALONE_ROWS;
    for (int64_t tile = 0; alone && tile < tiles; tile++) linear.pack_tile(inputs, tile);
#pragma omp parallel num_threads((int)threads)
    {
        [[maybe_unused]] const Unit unit((uint8_t)linear.tile_rows);
        constexpr int64_t MOST_ROWS = Unit::CHUNK_ROWS + Unit::TILE_ROWS;  // the last pass may be half empty
        float *const sums = (float *)scratch<1>(MOST_ROWS * Unit::GROUP * SIDE * sizeof(float));
        if (!alone) {
#pragma omp for schedule(static)
            for (int64_t tile = 0; tile < tiles; tile++) linear.pack_tile(inputs, tile);
        }
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t i = 0; i < chunks * groups; i++) {
            const int64_t row = i % chunks * chunk, group = i / chunks;
            const int64_t block = group * blocks / groups, end = (group + 1) * blocks / groups;
            linear.compute(inputs, {row, std::min(chunk, a.rows - row), block, end - block}, sums);
        }
    }
}

// A decode step reads every weight once: with small pages, much of that time goes to translating addresses.
void ask_for_huge_pages([[maybe_unused]] void *start, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t HUGE_PAGE = 2 << 20;
    const uintptr_t first = ((uintptr_t)start + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    const uintptr_t end = ((uintptr_t)start + bytes) / HUGE_PAGE * HUGE_PAGE;
    if (first < end) madvise((void *)first, end - first, MADV_HUGEPAGE);  // refused, it costs nothing
#endif
}

}  // namespace

extern "C" {

// Bytes that the packed weight [outs, cols] takes.
int64_t argosy_linear_bytes(int64_t outs, int64_t cols) {
    return parts_of(outs, SIDE) * parts_of(cols, STEP) * STEP_BYTES;
}

// Lay out weight [outs, cols], bfloat16, contiguous, into `packed`: panels are transposed in the first-level cache.
void argosy_linear_pack(const uint16_t *weight, int64_t outs, int64_t cols, uint16_t *packed, int64_t threads) {
    ask_for_huge_pages(packed, argosy_linear_bytes(outs, cols));
    const int64_t steps = parts_of(cols, STEP), panels = parts_of(outs, SIDE) * 2, words = PANEL_BYTES / 4;
#pragma omp parallel for num_threads((int)threads)
    for (int64_t panel = 0; panel < panels; panel++) {
        uint32_t *to = (uint32_t *)packed + (panel / 2 * steps * 2 + panel % 2) * words;
        for (int64_t step = 0; step < steps; step++, to += 2 * words) {
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
}
