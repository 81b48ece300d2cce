// Matrix unit (AMX): permission, tile shapes and instructions, by the hardware or emulated in software.
//
// The instructions are inline assembly, because GCC 12's intrinsics do not declare which memory they read.
#pragma once

#include <cstdint>
#include <cstring>

// AMX_MADD: c += a . b in float32 for a [16][words] and b [words][16], whose words hold two bfloat16 numbers.
// AMX_MADD_INT8: c += a . b in int32 for words of four bytes, which are signed in a and unsigned in b.
#if defined(ARGOSY_AMX_EMULATED)
#define ARGOSY_AMX 1
#include "amx_emulated.h"

#define AMX_ZERO(t) argosy::emulated_tiles[t].zero()
#define AMX_LOAD(t, from, stride) argosy::emulated_tiles[t].load_rows(from, stride)
#define AMX_STORE(t, to, stride) argosy::emulated_tiles[t].store_rows(to, stride)
#define AMX_MADD(c, a, b) argosy::emulated_tiles[c].add_bfloat16(argosy::emulated_tiles[a], argosy::emulated_tiles[b])
#define AMX_MADD_INT8(c, a, b) argosy::emulated_tiles[c].add_int8(argosy::emulated_tiles[a], argosy::emulated_tiles[b])

#elif defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define ARGOSY_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

#define AMX_ZERO(t) asm volatile("tilezero %%tmm" #t ::: "memory")
#define AMX_LOAD(t, from, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"((const void *)(from)), "r"((int64_t)(stride)) : "memory")
#define AMX_STORE(t, to, stride) \
    asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"((void *)(to)), "r"((int64_t)(stride)) : "memory")
#define AMX_MADD(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")
#define AMX_MADD_INT8(c, a, b) asm volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")
#endif

#ifdef ARGOSY_AMX
namespace argosy {

// Shapes of the current thread's eight tiles, configured for the lifetime of the object.
class AmxTiles {
  public:
    AmxTiles(const uint8_t (&rows)[8], const uint16_t (&row_bytes)[8]) {
#ifdef ARGOSY_AMX_EMULATED
        for (int t = 0; t < 8; t++) emulated_tiles[t].configure(rows[t], row_bytes[t]);
#else
        struct alignas(64) {
            uint8_t palette, start_row, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        } config;
        std::memset(&config, 0, sizeof config);
        config.palette = 1;
        std::memcpy(config.rows, rows, sizeof rows);
        std::memcpy(config.row_bytes, row_bytes, sizeof row_bytes);
        asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
#endif
    }
    ~AmxTiles() {
#ifdef ARGOSY_AMX_EMULATED
        for (EmulatedTile &tile : emulated_tiles) tile.configure(0, 0);
#else
        asm volatile("tilerelease" ::: "memory");
#endif
    }
    AmxTiles(const AmxTiles &) = delete;
    AmxTiles &operator=(const AmxTiles &) = delete;
};

}  // namespace argosy
#endif

namespace argosy {

// Return whether the CPU has tiles and the operating system permits their use. Permission is requested once.
inline bool amx_allowed() {
#if defined(ARGOSY_AMX_EMULATED)
    return true;
#elif defined(ARGOSY_AMX)
    static const bool allowed = [] {
        constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
        return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    }();
    return allowed;
#else
    return false;
#endif
}

}  // namespace argosy
