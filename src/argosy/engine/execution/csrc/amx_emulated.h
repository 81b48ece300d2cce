// The matrix unit in software, for tests on CPUs that have none: eight tiles a thread, and what each instruction does.
//
// Where the hardware would fault (a shape that was not configured, operands that do not fit), so does this.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace argosy {

struct EmulatedTile {
    static constexpr int MOST_ROWS = 16, MOST_BYTES = 64;

    int rows = 0, bytes = 0;
    alignas(64) uint8_t data[MOST_ROWS][MOST_BYTES];

    void configure(int new_rows, int new_bytes) {
        if (new_rows > MOST_ROWS || new_bytes > MOST_BYTES || new_bytes % 4) __builtin_trap();
        rows = new_rows;
        bytes = new_bytes;
        std::memset(data, 0, sizeof data);
    }

    void zero() {
        if (!rows || !bytes) __builtin_trap();
        std::memset(data, 0, sizeof data);
    }

    void read(const void *from, int64_t stride) {
        zero();
        for (int r = 0; r < rows; r++) std::memcpy(data[r], (const uint8_t *)from + r * stride, bytes);
    }

    void write(void *to, int64_t stride) const {
        if (!rows || !bytes) __builtin_trap();
        for (int r = 0; r < rows; r++) std::memcpy((uint8_t *)to + r * stride, data[r], bytes);
    }

    template <class Lanes> Lanes row(int r) const { return load<Lanes>(data[r]); }
    uint32_t word(int r, int k) const {
        uint32_t word;
        std::memcpy(&word, data[r] + 4 * k, 4);
        return word;
    }

    // The lanes beyond a tile's width hold zeros in both operands, so whole rows may be computed.
    void check_operands(const EmulatedTile &a, const EmulatedTile &b) const {
        const bool fit = rows && bytes && rows == a.rows && bytes == b.bytes && a.bytes == 4 * b.rows;
        if (!fit || this == &a || this == &b || &a == &b) __builtin_trap();
    }

    // TDPBF16PS: the even and the odd products of a row are summed apart, then added.
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

    // TDPBSUD: sums of four products of signed with unsigned bytes.
    void add_int8(const EmulatedTile &a, const EmulatedTile &b) {
        check_operands(a, b);
        for (int r = 0; r < rows; r++) {
            i32x16 sum = row<i32x16>(r);
            for (int k = 0; k < b.rows; k++) {
                const uint32_t four = a.word(r, k);
                const i32x16 fours = b.row<i32x16>(k);
                for (int i = 0; i < 4; i++) sum += (fours >> 8 * i & 255) * (int32_t)(int8_t)(four >> 8 * i);
            }
            store(data[r], sum);
        }
    }
};

static thread_local EmulatedTile emulated_tiles[8];

}  // namespace argosy
