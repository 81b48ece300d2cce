// out = x . weight^T + bias in bfloat16 with float32 sums, behind a plain C ABI.
//
// oneDNN chooses how it splits a long sum by the number of rows, so that a token's result depends on who shares
// its batch. Here each output is one sum over the words of its row, in order, whatever else is computed.
//
// Packed weight: [ceil(N / 16)][padded K / 2 words][16 columns], a word holding two neighbours along K; K is
// padded with zeros to a multiple of 32. A run of 16 words is an operand of the matrix unit as it lies.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "amx.h"
#include "simd.h"

extern "C" {

// One call, sizes in elements; mirrored field by field by native.py.
struct ArgosyLinear {
    const void *x;       // [rows, cols] bfloat16, rows of `x_stride`
    const void *packed;  // the weight as argosy_linear_pack laid it out
    const float *bias;   // [outs], or null
    void *out;           // [rows, outs] bfloat16, contiguous
    int64_t rows, cols, outs, x_stride, threads;
};
}

namespace {

using namespace argosy;

constexpr int64_t PANEL = 16;             // columns side by side
constexpr int64_t K_STEP = 32;            // elements of one operand of the matrix unit along K
constexpr int64_t CACHED_BYTES = 1 << 20; // of x that a block of rows may take: it stays in the second-level cache

int64_t padded(int64_t cols) { return (cols + K_STEP - 1) / K_STEP * K_STEP; }
int64_t panels_of(int64_t outs) { return (outs + PANEL - 1) / PANEL; }

// A block of sums [rows][16] to bfloat16 in its place.
void finish(const ArgosyLinear &a, const float *sums, int64_t row, int64_t rows, int64_t panel) {
    const int64_t first = panel * PANEL, count = std::min(PANEL, a.outs - first);
    f32x16 bias{};
    if (a.bias) std::memcpy(&bias, a.bias + first, count * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        const u16x16 rounded = halves(to_bfloat16(load<f32x16>(sums + r * PANEL) + bias));
        std::memcpy((uint16_t *)a.out + (row + r) * a.outs + first, &rounded, count * 2);
    }
}

// Sums by vector multiply-adds: R rows of x against one panel.
struct VectorUnit {
    static constexpr int64_t BLOCK = 8;

    template <int R>
    static void sums(const ArgosyLinear &a, const uint16_t *x, int64_t stride, int64_t row, int64_t panel) {
        const int64_t words = padded(a.cols) / 2;
        const uint32_t *weight = (const uint32_t *)a.packed + panel * words * PANEL;
        f32x16 sum[R] = {};
        for (int64_t w = 0; w < words; w++) {
            const u32x16 b = load<u32x16>(weight + w * PANEL);
            for (int r = 0; r < R; r++) {
                uint32_t word;
                std::memcpy(&word, x + r * stride + 2 * w, 4);
                sum[r] = Bfloat16::madd(sum[r], word, b);
            }
        }
        finish(a, (const float *)sum, row, R, panel);
    }

    static void run(const ArgosyLinear &a, const uint16_t *x, int64_t stride, int64_t row, int64_t rows,
                    int64_t first, int64_t last) {
        for (int64_t panel = first; panel < last; panel++) {
            int64_t r = 0;
            for (; r + BLOCK <= rows; r += BLOCK) sums<BLOCK>(a, x + r * stride, stride, row + r, panel);
            for (; r < rows; r++) sums<1>(a, x + r * stride, stride, row + r, panel);
        }
    }
};

#ifdef ARGOSY_AMX
// Sums by the matrix unit: tiles 0-3 collect, 4-5 hold rows of x, 6-7 panels of the weight.
struct MatrixUnit {
    static void run(const ArgosyLinear &a, const uint16_t *x, int64_t stride, int64_t row, int64_t rows,
                    int64_t first, int64_t last) {
        int64_t r = 0;
        if (rows >= 32) {
            const AmxTiles tiles({16, 16, 16, 16, 16, 16, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64});
            for (int64_t panel = first; panel < last; panel += 2)
                for (r = 0; r + 32 <= rows; r += 32)
                    if (panel + 1 < last)
                        two_by_two(a, x + r * stride, stride, row + r, panel);
                    else
                        pair_of_rows(a, x + r * stride, stride, row + r, panel);
            r = rows / 32 * 32;
        }
        for (; r < rows; r += 16) {
            const uint8_t n = (uint8_t)std::min<int64_t>(16, rows - r);
            const AmxTiles tiles({n, n, n, n, n, 16, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64});
            int64_t panel = first;
            for (; panel + 4 <= last; panel += 4) one_by_four(a, x + r * stride, stride, row + r, n, panel);
            for (; panel < last; panel++) one_by_one(a, x + r * stride, stride, row + r, n, panel);
        }
    }

  private:
    static const uint32_t *weight(const ArgosyLinear &a, int64_t panel) {
        return (const uint32_t *)a.packed + panel * padded(a.cols) / 2 * PANEL;
    }

    static void two_by_two(const ArgosyLinear &a, const uint16_t *x, int64_t stride, int64_t row, int64_t panel) {
        const uint32_t *left = weight(a, panel), *right = weight(a, panel + 1);
        const uint16_t *below = x + 16 * stride;
        alignas(64) float sums[4][256];
        AMX_ZERO(0); AMX_ZERO(1); AMX_ZERO(2); AMX_ZERO(3);
        for (int64_t k = 0; k < a.cols; k += K_STEP, left += 256, right += 256) {
            AMX_LOAD(4, x + k, stride * 2);
            AMX_LOAD(6, left, 64);
            AMX_MADD(0, 4, 6);
            AMX_LOAD(7, right, 64);
            AMX_MADD(1, 4, 7);
            AMX_LOAD(5, below + k, stride * 2);
            AMX_MADD(2, 5, 6);
            AMX_MADD(3, 5, 7);
        }
        AMX_STORE(0, sums[0], 64); AMX_STORE(1, sums[1], 64); AMX_STORE(2, sums[2], 64); AMX_STORE(3, sums[3], 64);
        for (int64_t i = 0; i < 4; i++) finish(a, sums[i], row + i / 2 * 16, 16, panel + i % 2);
    }

    static void pair_of_rows(const ArgosyLinear &a, const uint16_t *x, int64_t stride, int64_t row, int64_t panel) {
        const uint32_t *words = weight(a, panel);
        alignas(64) float sums[2][256];
        AMX_ZERO(0); AMX_ZERO(1);
        for (int64_t k = 0; k < a.cols; k += K_STEP, words += 256) {
            AMX_LOAD(6, words, 64);
            AMX_LOAD(4, x + k, stride * 2);
            AMX_MADD(0, 4, 6);
            AMX_LOAD(5, x + 16 * stride + k, stride * 2);
            AMX_MADD(1, 5, 6);
        }
        AMX_STORE(0, sums[0], 64); AMX_STORE(1, sums[1], 64);
        finish(a, sums[0], row, 16, panel);
        finish(a, sums[1], row + 16, 16, panel);
    }

    static void one_by_four(const ArgosyLinear &a, const uint16_t *x, int64_t stride, int64_t row, int64_t rows,
                            int64_t panel) {
        const uint32_t *words[4];
        for (int64_t i = 0; i < 4; i++) words[i] = weight(a, panel + i);
        alignas(64) float sums[4][256];
        AMX_ZERO(0); AMX_ZERO(1); AMX_ZERO(2); AMX_ZERO(3);
        for (int64_t k = 0, at = 0; k < a.cols; k += K_STEP, at += 256) {
            AMX_LOAD(4, x + k, stride * 2);
            AMX_LOAD(5, words[0] + at, 64);
            AMX_MADD(0, 4, 5);
            AMX_LOAD(6, words[1] + at, 64);
            AMX_MADD(1, 4, 6);
            AMX_LOAD(7, words[2] + at, 64);
            AMX_MADD(2, 4, 7);
            AMX_LOAD(5, words[3] + at, 64);
            AMX_MADD(3, 4, 5);
        }
        AMX_STORE(0, sums[0], 64); AMX_STORE(1, sums[1], 64); AMX_STORE(2, sums[2], 64); AMX_STORE(3, sums[3], 64);
        for (int64_t i = 0; i < 4; i++) finish(a, sums[i], row, rows, panel + i);
    }

    static void one_by_one(const ArgosyLinear &a, const uint16_t *x, int64_t stride, int64_t row, int64_t rows,
                           int64_t panel) {
        const uint32_t *words = weight(a, panel);
        alignas(64) float sums[256];
        AMX_ZERO(0);
        for (int64_t k = 0; k < a.cols; k += K_STEP, words += 256) {
            AMX_LOAD(4, x + k, stride * 2);
            AMX_LOAD(5, words, 64);
            AMX_MADD(0, 4, 5);
        }
        AMX_STORE(0, sums, 64);
        finish(a, sums, row, rows, panel);
    }
};
#endif

// Blocks of rows that stay in the cache, against groups of panels taken by the threads.
template <class Unit> void run(const ArgosyLinear &a) {
    const uint16_t *x = (const uint16_t *)a.x;
    int64_t stride = a.x_stride;
    std::vector<uint16_t> copy;
    if (a.cols % K_STEP) {  // whole operands only: x with zeros behind each row
        copy.assign(a.rows * padded(a.cols), 0);
        for (int64_t r = 0; r < a.rows; r++)
            std::memcpy(copy.data() + r * padded(a.cols), x + r * stride, a.cols * 2);
        x = copy.data();
        stride = padded(a.cols);
    }
    const int64_t block = std::max<int64_t>(32, CACHED_BYTES / (a.cols * 2) / 32 * 32);
    const int64_t blocks = (a.rows + block - 1) / block;
    const int64_t panels = panels_of(a.outs), size = panels >= 16 * a.threads ? 8 : 4;
    const int64_t groups = (panels + size - 1) / size;
#pragma omp parallel for num_threads((int)a.threads) schedule(dynamic, 1)
    for (int64_t i = 0; i < blocks * groups; i++) {
        const int64_t row = i / groups * block, panel = i % groups * size;
        Unit::run(a, x + row * stride, stride, row, std::min(block, a.rows - row), panel,
                  std::min(panels, panel + size));
    }
}

}  // namespace

extern "C" {

// Bytes that the packed weight [outs, cols] takes.
int64_t argosy_linear_bytes(int64_t outs, int64_t cols) { return panels_of(outs) * PANEL * padded(cols) * 2; }

// Lay out weight [outs, cols], bfloat16, contiguous, into `packed`.
void argosy_linear_pack(const uint16_t *weight, int64_t outs, int64_t cols, uint16_t *packed) {
    const int64_t depth = padded(cols);
    std::memset(packed, 0, argosy_linear_bytes(outs, cols));
    for (int64_t n = 0; n < outs; n++)
        for (int64_t k = 0; k < cols; k++)
            packed[((n / PANEL * depth / 2 + k / 2) * PANEL + n % PANEL) * 2 + k % 2] = weight[n * cols + k];
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
