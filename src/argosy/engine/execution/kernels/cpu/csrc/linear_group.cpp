// out = x . weight^T + bias with a weight as in weights_group.h and rows of x rounded to 8 bits, behind a C ABI.
//
// Rows are rounded in chunks of 256 along K. The sums of a group are integers that float32 represents exactly, so every
// order of summation gives the same bits. Groups are scaled and added in float32, in order, without fused
// multiply-adds.

#include "no_contraction.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "bytes.h"
#include "rounded_rows.h"
#include "scratch.h"
#include "simd.h"
#include "weights_group.h"
#include "weights_int.h"

namespace {

using namespace argosy;

#ifdef __AVX512F__
constexpr int64_t MAX_UNIT_ROWS = 4;  // rows whose sums stay in registers
#else
constexpr int64_t MAX_UNIT_ROWS = 2;
#endif
constexpr int64_t MAX_DIRECT_ROWS = 8;  // up to this, codes are looked up again for every few rows

// Rows of x for one block, with the distances between rows.
struct BlockInput {
    const uint8_t *bytes;
    int64_t row_bytes;
    const float *scales;   // of chunks
    int64_t chunks;
    const int32_t *sums;   // of groups
    int64_t groups;
};

// Compute the sums of R rows of one block, [R][32]. The loops over rows are unrolled, so that sums stay in registers.
template <class Weight, int R, bool OFFSETS>
void sum_block(const uint8_t *chunk, const GroupLayout &weight, const ByteTable &table, const BlockInput &input,
               float *to) {
    constexpr int64_t UNROLLED_WORDS = 4;  // of a group of 16, the smallest
    const uint8_t *x = input.bytes;
    const int32_t *x_sums = input.sums;
    const int64_t group_words = weight.group / 4;
    f32x16 total[R][2] = {};
    for (int64_t c = 0; c < input.chunks; c++) {
        const int64_t count = weight.chunk_groups(c);
        int64_t words = chunk_words(weight.cols, c);
        const uint8_t *header = chunk, *from = chunk + weight.header_bytes(c);
        for (int64_t g = 0; g < count; g++, header += BLOCK_OUTPUTS * 4, x_sums++, words -= group_words) {
            u32x16 sum[R][2];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
                sum[r][0] = sum[r][1] = (uint32_t)x_sums[r * input.groups] * -128u - u32x16{};
            const uint8_t *const end = x + std::min(words, group_words) * 4;
            while (x != end) {
#pragma GCC unroll 4
                for (int64_t w = 0; w < UNROLLED_WORDS; w++, x += 4, from += Weight::WORD_BYTES) {
                    const OutputPair pair = Weight::word(from, table);
                    for (int64_t line = 0; line < Weight::WORD_BYTES; line += 64)
                        __builtin_prefetch(from + PREFETCH_BYTES + line, 0, 2);
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) {
                        const auto word = load<uint32_t>(x + r * input.row_bytes);
                        sum[r][0] = dot_bytes(sum[r][0], pair.left, word);
                        sum[r][1] = dot_bytes(sum[r][1], pair.right, word);
                    }
                }
            }
            const f32x16 scale[] = {load<f32x16>(header), load<f32x16>(header + 64)};
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const float x_scale = input.scales[r * input.chunks + c];
                const float x_sum = OFFSETS ? (float)x_sums[r * input.groups] : 0.0f;
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    f32x16 scaled = to_float(sum[r][half]) * scale[half];
                    if constexpr (OFFSETS)
                        scaled += x_sum * load<f32x16>(header + count * BLOCK_OUTPUTS * 4 + half * 64);
                    total[r][half] += scaled * x_scale;
                }
            }
        }
        chunk = from;
    }
    std::memcpy(to, total, sizeof total);
}

// Memory layout of one call: rows of x as signed bytes, padded with zeros, their scales, and the sums of their groups.
template <class E> struct CallLayout {
    const ArgosyLinearGroup &a;
    const GroupLayout weight{a.cols, a.group, a.has_offsets != 0};
    const ByteTable table{a.table};
    const int64_t chunks = count_chunks(a.cols), groups = weight.groups();
    const int64_t row_bytes = count_steps(a.cols) * STEP_ELEMENTS;
    uint8_t *const inputs = thread_buffer<3>(a.rows * (row_bytes + chunks * sizeof(float) + groups * sizeof(int32_t)));
    float *const scales = (float *)(inputs + a.rows * row_bytes);      // [rows][chunks]
    int32_t *const sums = (int32_t *)(scales + a.rows * chunks);       // [rows][groups]

    void round_row(int64_t row) const {
        for (int64_t c = 0; c < chunks; c++) {
            alignas(64) float values[CHUNK] = {};
            alignas(64) uint8_t bytes[CHUNK];
            const int64_t first = c * CHUNK, size = chunk_words(a.cols, c) * 4;
            E::read((const typename E::Scalar *)a.x + row * a.x_stride + first, std::min(CHUNK, a.cols - first), values);
            scales[row * chunks + c] = round_to_bytes(values, CHUNK, bytes).scale;
            std::memcpy(inputs + row * row_bytes + first, bytes, size);
            for (int64_t g = 0; g < weight.chunk_groups(c); g++) {
                int32_t sum = 0;
                for (int64_t i = g * a.group; i < (g + 1) * a.group; i++) sum += (int8_t)bytes[i];
                sums[row * groups + c * (CHUNK / a.group) + g] = sum;
            }
        }
    }

    template <class Weight, int R> void compute_rows(const uint8_t *from, int64_t row, int64_t block) const {
        alignas(64) float total[R * BLOCK_OUTPUTS];
        const BlockInput input{inputs + row * row_bytes, row_bytes, scales + row * chunks, chunks,
                               sums + row * groups, groups};
        if (weight.has_offsets) sum_block<Weight, R, true>(from, weight, table, input, total);
        else sum_block<Weight, R, false>(from, weight, table, input, total);
        for (int r = 0; r < R; r++)
            store_outputs<E>(total + r * BLOCK_OUTPUTS, a.bias, a.out, a.outs, row + r, block);
    }

    template <class Weight> void compute_block(const uint8_t *from, int64_t block, int64_t row, int64_t end) const {
        for (int64_t left = end - row; left > 0; left = end - row) {
            if (left >= MAX_UNIT_ROWS) compute_rows<Weight, MAX_UNIT_ROWS>(from, row, block), row += MAX_UNIT_ROWS;
            else if (left >= 2) compute_rows<Weight, 2>(from, row, block), row += 2;
            else compute_rows<Weight, 1>(from, row, block), row += 1;
        }
    }

    template <class Weight> void compute(const WorkItem &item) const {
        const int64_t end = item.row + item.rows;
        for (int64_t block = item.block; block < item.block + item.blocks; block++) {
            const uint8_t *from = (const uint8_t *)a.packed + block * weight.template block_bytes<Weight>();
            if (std::is_same_v<Weight, Group8> || item.rows <= MAX_DIRECT_ROWS) {
                compute_block<Weight>(from, block, item.row, end);
                continue;
            }
            uint8_t *const expanded = thread_buffer<4>(weight.template block_bytes<Group8>());
            expand_group_block<Weight>(from, weight, table, expanded);
            compute_block<Group8>(expanded, block, item.row, end);
        }
    }
};

template <class Weight, class E> void run(const ArgosyLinearGroup &a) {
    if (a.rows == 0) return;
    const CallLayout<E> layout{a};
    run_rounded(
        a, a.rows, [] { return 0; }, [&](int64_t row) { layout.round_row(row); },
        [&](const WorkItem &item) { layout.template compute<Weight>(item); });
}

}  // namespace

// Functions of each format: the bytes of a packed weight, its packing, and the linear layer for each dtype.
#define ARGOSY_LINEAR_GROUP(name, Weight)                                                                             \
    int64_t argosy_linear_##name##_packed_bytes(int64_t outs, int64_t cols, int64_t group, int64_t has_offsets) {     \
        return count_blocks(outs) * GroupLayout{cols, group, has_offsets != 0}.block_bytes<Weight>();                 \
    }                                                                                                                 \
    void argosy_linear_##name##_pack(const uint8_t *bytes, const float *scales, const float *offsets, int64_t outs,   \
                                     int64_t cols, int64_t group, uint8_t *packed, int64_t threads) {                 \
        pack_groups<Weight>({bytes, scales, offsets, outs, {cols, group, offsets != nullptr}}, packed, threads);      \
    }                                                                                                                 \
    void argosy_linear_##name##_bfloat16(const ArgosyLinearGroup *call) { run<Weight, Bfloat16Io>(*call); }           \
    void argosy_linear_##name##_float32(const ArgosyLinearGroup *call) { run<Weight, Float32Io>(*call); }

extern "C" {
ARGOSY_LINEAR_GROUP(group8, Group8)
ARGOSY_LINEAR_GROUP(group4, Group4)
}
