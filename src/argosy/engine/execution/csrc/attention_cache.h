// The paged cache of one layer: where keys and values lie, and how new ones get there.
#pragma once

#include <algorithm>

#include "attention_call.h"
#include "attention_units.h"
#include "elements.h"

namespace argosy {

template <class Unit> class Cache {
    using T = typename Unit::T;
    using Scalar = typename T::Scalar;
    static constexpr int N = T::PER_WORD;
    static constexpr int W = Unit::PANEL;

    const ArgosyAttention &a;

    // Values of a panel with zeros after the first `held` keys, in `copy`: a cache block may still hold another
    // sequence's there, not all of them finite.
    const uint32_t *cut(const uint32_t *values, int64_t held, uint32_t *copy) const {
        const int64_t whole = held / N * width;
        std::copy_n(values, whole, copy);
        std::fill_n(copy + whole, W / N * width - whole, 0u);
        if (held % N)  // the last key without its partner
            for (int64_t d = 0; d < width; d++) copy[whole + d] = values[whole + d] & 0xffffu;
        return copy;
    }

    // One token's values beside those of its partner in the words at `base`, which another thread may be writing.
    void store_value(int64_t base, int64_t place, const Scalar *from) const {
        Scalar *to = (Scalar *)((uint32_t *)a.values + base) + place;
        int64_t d = 0;
#ifdef __AVX512BW__
        if constexpr (N == 2)
            for (; d + LANES <= a.head_dim; d += LANES) {
                const u32x16 word = as_words(load<u16x16>(from + d)) << (place ? 16 : 0);
                _mm512_mask_storeu_epi16(to - place + d * N, place ? 0xaaaaaaaau : 0x55555555u, (__m512i)word);
            }
#endif
        for (; d < a.head_dim; d++) to[d * N] = from[d];
    }

  public:
    using Row = std::conditional_t<N == 2, Bfloat16Row, FloatRow>;
    const int64_t words = (a.head_dim + LANES * N - 1) / (LANES * N) * LANES;
    const int64_t width = words * N;  // the padded head dimension
    const int64_t head_words = a.block_size * words;  // of one block, keys or values

    explicit Cache(const ArgosyAttention &call) : a(call) {}

    // A head of token t to `to`, padded with zeros, rotated.
    void load_row(uint32_t *to, const void *rows, int64_t stride, int64_t t, int64_t head) const {
        const Scalar *from = (const Scalar *)rows + t * stride + head * a.head_dim;
        std::fill_n((Scalar *)to + a.head_dim, width - a.head_dim, Scalar{});
        std::memcpy(to, from, a.head_dim * sizeof(Scalar));
        if (a.turning) rotate<Row>((Scalar *)to, from, a.cos + t * a.turning, a.sin + t * a.turning, a.turning);
    }

    // Put token t's keys and values where the layout wants them. row: memory for a row.
    void store_token(int64_t t, uint32_t *row) const {
        const int64_t block = a.slots[t] / a.block_size, offset = a.slots[t] % a.block_size;
        for (int64_t head = 0; head < a.kv_heads; head++) {
            const int64_t base = (block * a.kv_heads + head) * head_words;
            uint32_t *key = (uint32_t *)a.keys + base + offset / W * W * words + offset % W;
            load_row(row, a.k, a.k_stride, t, head);
            for (int64_t word = 0; word < words; word++) key[word * W] = row[word];
            const Scalar *v = (const Scalar *)a.v + t * a.v_stride + head * a.head_dim;
            store_value(base + offset / N * width, offset % N, v);
        }
    }

    // The tile of keys from `start` on, up to position `newest`. copy: memory for a panel; null when the tile is only
    // to be fetched.
    Tile tile(int64_t sequence, int64_t head, int64_t start, int64_t newest, uint32_t *copy) const {
        const int32_t *pages = a.pages + sequence * a.page_stride;
        const int64_t seen = std::min<int64_t>(TILE, newest + 1 - start), length = a.seq_lens[sequence];
        Tile tile;
        tile.live = (int)((seen + W - 1) / W * W);
        for (int i = 0; i < TILE / W; i++) {
            const int64_t at = start + std::min(i * W, tile.live - W), held = std::min<int64_t>(W, length - at);
            const int64_t base = (pages[at / a.block_size] * a.kv_heads + head) * head_words;
            const int64_t panel = base + at % a.block_size / W * W * words;
            tile.keys[i] = (const uint32_t *)a.keys + panel;
            tile.values[i] = (const uint32_t *)a.values + panel;
            if (copy && i * W < tile.live && held < W) tile.values[i] = cut(tile.values[i], held, copy);
        }
        return tile;
    }
};

}  // namespace argosy
