// out = x . weight^T + bias in bfloat16 with float32 sums, behind a C ABI.
//
// oneDNN splits a long sum depending on the number of rows, so a token's result would depend on the rest of its batch.
// Here each output is one sum over the words of its row, in order, for every batch.
//
// Packed weight: [ceil(N / 32)][padded K / 32 steps][2 panels][16 words][16 outputs]. A word holds two neighbours along
// K. N and K are padded with zeros. A block of 32 outputs is read sequentially, and a panel of a step is an operand of
// the matrix unit without rearrangement. The rows of x are packed into operands too, because their distance in x is
// often a power of two, so that they compete for few cache sets: [tile of rows][step][row][a line of 16 words in the
// unit's format].

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "linear_call.h"
#include "linear_units.h"
#include "scratch.h"
#include "threads.h"

namespace {

using namespace argosy;

constexpr int64_t MAX_SMALL_BATCH_ROWS = 64;         // up to this, an item finishes one block after the other
constexpr int64_t MAX_SINGLE_THREAD_PACK_ROWS = 32;  // up to this, the caller packs x, because a barrier costs more
constexpr int64_t MIN_THREAD_WEIGHTS = 1 << 18;      // weights that up to 100 rows process while a thread wakes up

int64_t ceil_div(int64_t total, int64_t divisor) { return (total + divisor - 1) / divisor; }
// Size of equal chunks of `total`, at most `max_size` each.
int64_t even_chunk_size(int64_t total, int64_t max_size) { return ceil_div(total, ceil_div(total, max_size)); }

// Work item: some rows times some blocks.
struct WorkItem {
    int64_t row, rows, block, blocks;
};

// One call, divided into tiles of rows, steps along K and blocks of outputs.
template <class Unit> struct LinearKernel {
    const ArgosyLinear &a;
    const int64_t steps = ceil_div(a.cols, STEP_ELEMENTS);
    const int64_t blocks = ceil_div(a.outs, BLOCK_OUTPUTS);
    const int64_t tile_rows =
        Unit::PASS_TILES > 1 ? std::min(Unit::TILE_ROWS, a.rows) : even_chunk_size(a.rows, Unit::TILE_ROWS);
    const int64_t tiles = ceil_div(a.rows, tile_rows);
    const int64_t tile_bytes = steps * tile_rows * Unit::OPERAND_ROW_BYTES;

    // Pack a tile of rows of x into operands, padded with zeros in both directions.
    void pack_tile(uint8_t *inputs, int64_t tile) const {
        uint8_t *to = inputs + tile * tile_bytes;
        for (int64_t r = 0; r < tile_rows; r++) {
            const int64_t row = tile * tile_rows + r, bytes = row < a.rows ? a.cols * 2 : 0;
            const uint8_t *x = (const uint8_t *)a.x + row * a.x_stride * 2;
            for (int64_t step = 0; step < steps; step++) {
                u32x16 words{};
                const int64_t available = std::clamp<int64_t>(bytes - step * 64, 0, 64);
                if (available == 64) words = load<u32x16>(x + step * 64);
                else std::memcpy(&words, x + step * 64, available);
                Unit::pack(to + (step * tile_rows + r) * Unit::OPERAND_ROW_BYTES, words);
            }
        }
    }

    // Compute the sums of an item, [blocks][height][32], one part of the steps after the other, then store its outputs.
    void compute(const uint8_t *inputs, const WorkItem &item, float *sums) const {
        const int64_t pass_rows = Unit::PASS_TILES * tile_rows, passes = ceil_div(item.rows, pass_rows);
        const int64_t depth =
            item.rows <= Unit::MAX_FULL_DEPTH_ROWS ? steps : even_chunk_size(steps, Unit::MAX_PASS_STEPS);
        const int64_t parts = ceil_div(steps, depth), pass_count = parts * item.blocks;
        const auto pass_position = [&](int64_t pass_index) {
            return item.rows <= MAX_SMALL_BATCH_ROWS ? std::pair(pass_index / parts, pass_index % parts)
                                         : std::pair(pass_index % item.blocks, pass_index / item.blocks);
        };
        const auto weight_at = [&](int64_t pass_index) {
            const auto [block, part] = pass_position(std::min(pass_index, pass_count - 1));
            return (const uint8_t *)a.packed + ((item.block + block) * steps + part * depth) * STEP_BYTES;
        };
        for (int64_t pass_index = 0; pass_index < pass_count; pass_index++) {
            const auto [block, part] = pass_position(pass_index);
            LinearPass pass;
            pass.x = inputs + item.row / tile_rows * tile_bytes + part * depth * tile_rows * Unit::OPERAND_ROW_BYTES;
            pass.weight = weight_at(pass_index);
            pass.sums = sums + block * passes * pass_rows * BLOCK_OUTPUTS;
            pass.tile_rows = tile_rows;
            pass.tile_bytes = tile_bytes;
            pass.steps = std::min(depth, steps - part * depth);
            pass.is_first = part == 0;
            pass.is_single_use = passes == 1;
            pass.prefetch = pass.is_single_use ? pass.weight + PREFETCH_BYTES : weight_at(pass_index + 1);
            const uint8_t *const prefetch_end = pass.prefetch + pass.steps * STEP_BYTES;
            // Each block prefetches its share of the next part of x.
            const bool has_next_part = item.rows > MAX_SMALL_BATCH_ROWS && part + 1 < parts;
            pass.x_lines = has_next_part ? ceil_div(tile_rows * Unit::OPERAND_ROW_BYTES / 64, item.blocks) : 0;
            const int64_t next_part_offset =
                pass.steps * (tile_rows * Unit::OPERAND_ROW_BYTES + block * pass.x_lines * 64);
            for (int64_t row = 0; row < item.rows; row += pass_rows) {
                pass.rows = std::min(pass_rows, item.rows - row);
                pass.lines = pass.prefetch < prefetch_end ? ceil_div(STEP_BYTES / 64, passes) : 0;
                pass.x_prefetch = pass.x + next_part_offset;
                Unit::run(pass);
                pass.x += Unit::PASS_TILES * tile_bytes;
                pass.prefetch += pass.steps * pass.lines * 64;
                pass.sums += pass_rows * BLOCK_OUTPUTS;
            }
        }
        store_outputs(sums, passes * pass_rows, item);
    }

  private:
    // Add the bias, round to bfloat16 and store, row by row for sequential writes.
    void store_outputs(const float *sums, int64_t height, const WorkItem &item) const {
        for (int64_t r = 0; r < item.rows; r++)
            for (int64_t i = 0; i < item.blocks; i++)
                store_output_line(sums + (i * height + r) * BLOCK_OUTPUTS, item.row + r, item.block + i);
    }

    void store_output_line(const float *sums, int64_t row, int64_t block) const {
        const int64_t first = block * BLOCK_OUTPUTS, count = std::min(BLOCK_OUTPUTS, a.outs - first);
        f32x16 low = load<f32x16>(sums), high = load<f32x16>(sums + 16);
        if (a.bias) {
            low += load<f32x16>(a.bias + first);
            high += load<f32x16>(a.bias + first + 16);
        }
        uint16_t *out = (uint16_t *)a.out + row * a.outs + first;
        if (count == BLOCK_OUTPUTS) return store_bfloat16(out, low, high);
        uint16_t line[BLOCK_OUTPUTS];
        store_bfloat16(line, low, high);
        std::memcpy(out, line, count * 2);
    }
};

// Distribute the chunks of rows and groups of blocks over the threads.
template <class Unit> void run_linear(const ArgosyLinear &a) {
    if (a.rows == 0) return;
    const LinearKernel<Unit> linear{a};
    const int64_t blocks = linear.blocks, tiles = linear.tiles;
    const int64_t threads =
        std::clamp<int64_t>(a.outs * a.cols / MIN_THREAD_WEIGHTS * (100 + a.rows) / 100, 1, limit_threads(a.threads));
    const int64_t chunk = even_chunk_size(tiles, Unit::CHUNK_ROWS / linear.tile_rows) * linear.tile_rows;
    const int64_t chunks = ceil_div(a.rows, chunk);
    const int64_t shares = ceil_div(threads * (a.rows <= MAX_SMALL_BATCH_ROWS ? 8 : 4), chunks);
    const int64_t min_groups = std::max(ceil_div(blocks, Unit::MAX_ITEM_BLOCKS), shares);
    const int64_t groups = std::min(ceil_div(min_groups, threads) * threads, blocks);
    uint8_t *const inputs = thread_buffer<0>(tiles * linear.tile_bytes);
    const bool packs_alone = a.rows <= MAX_SINGLE_THREAD_PACK_ROWS;
    for (int64_t tile = 0; packs_alone && tile < tiles; tile++) linear.pack_tile(inputs, tile);
#pragma omp parallel num_threads((int)threads)
    {
        [[maybe_unused]] const Unit unit((uint8_t)linear.tile_rows);
        constexpr int64_t MAX_SUM_ROWS = Unit::CHUNK_ROWS + Unit::TILE_ROWS;  // the last pass may be half empty
        float *const sums =
            (float *)thread_buffer<1>(MAX_SUM_ROWS * Unit::MAX_ITEM_BLOCKS * BLOCK_OUTPUTS * sizeof(float));
        if (!packs_alone) {
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

// Request huge pages. A decode step reads every weight once, and small pages make address translation expensive.
void advise_huge_pages([[maybe_unused]] void *start, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t HUGE_PAGE = 2 << 20;
    const uintptr_t first = ((uintptr_t)start + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    const uintptr_t end = ((uintptr_t)start + bytes) / HUGE_PAGE * HUGE_PAGE;
    if (first < end) madvise((void *)first, end - first, MADV_HUGEPAGE);  // a refusal does no harm
#endif
}

}  // namespace

extern "C" {

// Return the bytes of a packed weight [outs, cols].
int64_t argosy_linear_packed_bytes(int64_t outs, int64_t cols) {
    return ceil_div(outs, BLOCK_OUTPUTS) * ceil_div(cols, STEP_ELEMENTS) * STEP_BYTES;
}

// Pack weight [outs, cols], bfloat16 and contiguous, into `packed`. Panels are transposed in the first-level cache.
void argosy_linear_pack(const uint16_t *weight, int64_t outs, int64_t cols, uint16_t *packed, int64_t threads) {
    advise_huge_pages(packed, argosy_linear_packed_bytes(outs, cols));
    const int64_t steps = ceil_div(cols, STEP_ELEMENTS), panels = ceil_div(outs, BLOCK_OUTPUTS) * 2;
    const int64_t words = PANEL_BYTES / 4;
#pragma omp parallel for num_threads((int)threads)
    for (int64_t panel = 0; panel < panels; panel++) {
        uint32_t *to = (uint32_t *)packed + (panel / 2 * steps * 2 + panel % 2) * words;
        for (int64_t step = 0; step < steps; step++, to += 2 * words) {
            uint32_t rows[16][16] = {};
            const int64_t available = std::min(STEP_ELEMENTS, cols - step * STEP_ELEMENTS) * 2;
            for (int64_t n = panel * 16; n < std::min(outs, panel * 16 + 16); n++)
                std::memcpy(rows[n % 16], weight + n * cols + step * STEP_ELEMENTS, available);
            for (int64_t word = 0; word < 16; word++)
                for (int64_t n = 0; n < 16; n++) to[word * 16 + n] = rows[n][word];
        }
    }
}

void argosy_linear(const ArgosyLinear *call) {
#ifdef ARGOSY_AMX
    if (amx_allowed()) return run_linear<MatrixUnit>(*call);
#endif
    run_linear<VectorUnit>(*call);
}
}
