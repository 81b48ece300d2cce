// The matrix unit (AMX, bfloat16): permission, tile shapes, and its instructions.
//
// Written as assembly because GCC 12's intrinsics do not tell the optimiser which memory they read.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AMX_BF16__) && defined(__linux__)
#define ARGOSY_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

#define AMX_ZERO(t) asm volatile("tilezero %%tmm" #t ::: "memory")
#define AMX_LOAD(t, from, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"((const void *)(from)), "r"((int64_t)(stride)) : "memory")
#define AMX_STORE(t, to, stride) \
    asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"((void *)(to)), "r"((int64_t)(stride)) : "memory")
// c += a . b: a [16][words] rows of pairs, b [words][16] pairs.
#define AMX_MADD(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")

namespace argosy {

// Whether the kernel lets this process use the tiles; asked once.
inline bool amx_allowed() {
    static const bool allowed = [] {
        constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
        return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    }();
    return allowed;
}

// The shapes of the eight tiles while this is alive, in this thread.
class AmxTiles {
    struct alignas(64) Config {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };

  public:
    AmxTiles(const uint8_t (&rows)[8], const uint16_t (&row_bytes)[8]) {
        Config config;
        std::memset(&config, 0, sizeof config);
        config.palette = 1;
        std::memcpy(config.rows, rows, sizeof rows);
        std::memcpy(config.row_bytes, row_bytes, sizeof row_bytes);
        asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
    }
    ~AmxTiles() { asm volatile("tilerelease" ::: "memory"); }
    AmxTiles(const AmxTiles &) = delete;
    AmxTiles &operator=(const AmxTiles &) = delete;
};

}  // namespace argosy
#else
namespace argosy {
inline bool amx_allowed() { return false; }
}  // namespace argosy
#endif
