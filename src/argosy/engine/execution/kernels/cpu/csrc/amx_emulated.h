// Software emulation of the matrix unit (AMX) for tests on CPUs without it: eight tiles per thread and instructions.
//
// The emulation traps where the hardware faults: on tiles that are not configured, and on operands whose shapes differ.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace argosy {

struct EmulatedTile {
    static constexpr int MAX_ROWS = 16, MAX_ROW_BYTES = 64;

    int rows = 0, bytes = 0;
    alignas(64) uint8_t data[MAX_ROWS][MAX_ROW_BYTES];

    void configure(int new_rows, int new_bytes) {
        if (new_rows > MAX_ROWS || new_bytes > MAX_ROW_BYTES || new_bytes % 4) __builtin_trap();
        rows = new_rows;
        bytes = new_bytes;
        std::memset(data, 0, sizeof data);
    }

    void zero() {
        if (!rows || !bytes) __builtin_trap();
        std::memset(data, 0, sizeof data);
    }

    void load_rows(const void *from, int64_t stride) {
        zero();
        for (int r = 0; r < rows; r++) std::memcpy(data[r], (const uint8_t *)from + r * stride, bytes);
    }

    void store_rows(void *to, int64_t stride) const {
        if (!rows || !bytes) __builtin_trap();
        for (int r = 0; r < rows; r++) std::memcpy((uint8_t *)to + r * stride, data[r], bytes);
    }

    template <class Lanes> Lanes row(int r) const { return load<Lanes>(data[r]); }
    uint32_t word(int r, int k) const {
        uint32_t word;
        std::memcpy(&word, data[r] + 4 * k, 4);
        return word;
    }

    // Trap unless the shapes fit. Lanes beyond a tile's width hold zeros in both operands, so whole rows are computed.
    void check_operands(const EmulatedTile &a, const EmulatedTile &b) const {
        const bool fit = rows && bytes && rows == a.rows && bytes == b.bytes && a.bytes == 4 * b.rows;
        if (!fit || this == &a || this == &b || &a == &b) __builtin_trap();
    }

    // TDPBF16PS: even and odd products of a row are summed separately, then the two sums are added.
    void add_bfloat16(const EmulatedTile &a, const EmulatedTile &b) {
        check_operands(a, b);
        for (int r = 0; r < rows; r++) {
            f32x16 even{}, odd{};
            for (int k = 0; k < b.rows; k++) {
                const uint32_t pair = a.word(r, k);
                const u32x16 pairs = b.row<u32x16>(k);
                even += (f32x16)(pairs << 16) * (f32x16)((pair << 16) - u32x16{});
                odd += (f32x16)(pairs & 0xffff0000u) * (f32x16)((pair & 0xffff0000u) - u32x16{});
            }
            store(data[r], row<f32x16>(r) + (even + odd));
        }
    }

    // TDPBSUD: each lane adds four products of a signed and an unsigned byte.
    void add_int8(const EmulatedTile &a, const EmulatedTile &b) {
        check_operands(a, b);
        for (int r = 0; r < rows; r++) {
            i32x16 sum = row<i32x16>(r);
            for (int k = 0; k < b.rows; k++) {
                const uint32_t a_bytes = a.word(r, k);
                const i32x16 b_bytes = b.row<i32x16>(k);
                for (int i = 0; i < 4; i++) sum += (b_bytes >> 8 * i & 255) * (int32_t)(int8_t)(a_bytes >> 8 * i);
            }
            store(data[r], sum);
        }
    }
};

static thread_local EmulatedTile emulated_tiles[8];

}  // namespace argosy
