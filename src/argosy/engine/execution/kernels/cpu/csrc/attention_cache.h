// Paged KV cache of one layer: addresses of keys and values, and the storage of new ones.
#pragma once

#include <algorithm>

#include "attention_bytes.h"
#include "attention_call.h"
#include "attention_units.h"
#include "elements.h"

namespace argosy {

#ifdef __AVX512BW__
// Transpose up to eight words [word][16 keys] of two elements to eight rows [two keys][16 elements], `stride` apart.
inline void transpose_pairs(const uint32_t *from, int64_t words, int64_t keys, uint32_t *to, int64_t stride) {
    const __m512i swap_middle = _mm512_set4_epi32(0x0f0e0b0a, 0x0d0c0908, 0x07060302, 0x05040100);
    const __mmask16 valid = (__mmask16)((1u << keys) - 1);
    __m512i row[8], pair[8], quad[8];
    for (int i = 0; i < 8; i++)
        row[i] = i < words
                     ? _mm512_shuffle_epi8(_mm512_maskz_loadu_epi32(valid, from + i * LANES), swap_middle)
                     : _mm512_setzero_si512();
    for (int i = 0; i < 8; i += 2) {  // columns 0, 2, 4, 6 and 1, 3, 5, 7 of two rows
        pair[i] = _mm512_unpacklo_epi64(row[i], row[i + 1]);
        pair[i + 1] = _mm512_unpackhi_epi64(row[i], row[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)  // columns 0 and 4, 2 and 6, 1 and 5, 3 and 7 of four rows
        for (int odd = 0; odd < 2; odd++) {
            quad[i + 2 * odd] = _mm512_shuffle_i64x2(pair[i + odd], pair[i + 2 + odd], 0x88);
            quad[i + 2 * odd + 1] = _mm512_shuffle_i64x2(pair[i + odd], pair[i + 2 + odd], 0xdd);
        }
    for (int i = 0; i < 4; i++) {
        const int column = (i & 1) * 2 + i / 2;
        _mm512_storeu_si512(to + column * stride, _mm512_shuffle_i64x2(quad[i], quad[i + 4], 0x88));
        _mm512_storeu_si512(to + (column + 4) * stride, _mm512_shuffle_i64x2(quad[i], quad[i + 4], 0xdd));
    }
}
#endif

// Cache of the unit's elements, or of rows that are rounded to bytes if ROUNDED, see attention_bytes.h.
template <class Unit, bool ROUNDED> class KvCache {
    using T = typename Unit::T;
    using Scalar = typename T::Scalar;
    static constexpr int N = T::PER_WORD;
    static constexpr int W = Unit::PANEL;

    const ArgosyAttention &a;

    // Copy the values of a panel to `copy`, with zeros after the first `valid` keys. The rest of a cache block may hold
    // values of another sequence, which need not be finite.
    const uint32_t *zero_tail(const uint32_t *values, int64_t valid, uint32_t *copy) const {
        const int64_t full_words = valid / N * width;
        std::copy_n(values, full_words, copy);
        std::fill_n(copy + full_words, W / N * width - full_words, 0u);
        if (valid % N)  // the word of the last key, without its neighbour
            for (int64_t d = 0; d < width; d++) copy[full_words + d] = values[full_words + d] & 0xffffu;
        return copy;
    }

    // Store one token's values in the words at `words`. Another thread may be writing the other element of these words.
    void store_value(uint32_t *words, int64_t element, const Scalar *from) const {
        Scalar *to = (Scalar *)words + element;
        int64_t d = 0;
#ifdef __AVX512BW__
        if constexpr (N == 2)
            for (; d + LANES <= a.head_dim; d += LANES) {
                const u32x16 word = as_words(load<u16x16>(from + d)) << (element ? 16 : 0);
                _mm512_mask_storeu_epi16(to - element + d * N, element ? 0xaaaaaaaau : 0x55555555u, (__m512i)word);
            }
#endif
        for (; d < a.head_dim; d++) to[d * N] = from[d];
    }

    // Transpose `value_words` words of a panel's first `count` keys to the layout of values.
    void extract_panel(const uint32_t *from, int64_t value_words, int64_t count, uint32_t *to) const {
#ifdef __AVX512BW__
        if constexpr (N == 2 && W == LANES) {
            for (int64_t word = 0; word < value_words; word += 8)
                transpose_pairs(from + word * W, std::min<int64_t>(8, value_words - word), count, to + 2 * word,
                                value_width);
            return;
        }
#endif
        for (int64_t word = 0; word < value_words; word++, from += W)
            for (int64_t key = 0; key < W; key += N) {
                const uint32_t first = key < count ? from[key] : 0u;
                if constexpr (N == 1) {
                    to[key * value_width + word] = first;
                } else {  // two elements of two keys
                    const uint32_t second = key + 1 < count ? from[key + 1] : 0u;
                    uint32_t *pair = to + key / 2 * value_width + 2 * word;
                    pair[0] = (first & 0xffffu) | second << 16;
                    pair[1] = first >> 16 | (second & 0xffff0000u);
                }
            }
    }

    // Words before the panel of a block's token at `offset`.
    int64_t panel_offset(int64_t block, int64_t head, int64_t offset) const {
        return ((block * a.kv_heads + head) * (a.block_size / W) + offset / W) * panel_words;
    }

  public:
    using Row = std::conditional_t<N == 2, Bfloat16Row, FloatRow>;
    using Bytes = BytePanels<Unit, Row>;
    const int64_t words = padded_words(a.head_dim);
    const int64_t width = words * N;                        // padded head dimension
    const int64_t value_width = padded_words(a.value_dim) * N;  // padded size of a value
    const Bytes bytes{width, a.values ? 0 : a.head_dim - a.value_dim};
    const int64_t panel_words = ROUNDED ? bytes.panel_words : W * words;  // words of a panel of keys, or of values


    explicit KvCache(const ArgosyAttention &call) : a(call) {}

    // Words that a tile takes when its bytes are expanded, and its scales.
    size_t expanded_words() const { return ROUNDED ? (a.values ? 2 : 1) * TILE * words : 0; }
    size_t scale_count() const { return ROUNDED ? 2 * TILE : 0; }

    static int64_t padded_words(int64_t size) { return (size + LANES * N - 1) / (LANES * N) * LANES; }

    // Load a head of token t to `to`, padded with zeros and rotated.
    void load_row(uint32_t *to, const void *rows, int64_t stride, int64_t t, int64_t head) const {
        const Scalar *from = (const Scalar *)rows + t * stride + head * a.head_dim;
        std::fill_n((Scalar *)to + a.head_dim, width - a.head_dim, Scalar{});
        std::memcpy(to, from, a.head_dim * sizeof(Scalar));
        if (a.rotary_dim)
            rotate<Row>((Scalar *)to, from, a.cos + t * a.rotary_dim, a.sin + t * a.rotary_dim, a.rotary_dim);
    }

    // Store token t's keys and values in the cache. `row` is scratch memory for a row, and `rounded` for its bytes.
    void store_token(int64_t t, uint32_t *row, RoundedRow &rounded) const {
        const int64_t block = a.slot_mapping[t] / a.block_size, offset = a.slot_mapping[t] % a.block_size;
        const int64_t element = offset % W;
        for (int64_t head = 0; head < a.kv_heads; head++) {
            const int64_t panel = panel_offset(block, head, offset);
            uint32_t *key = (uint32_t *)a.keys + panel, *value = (uint32_t *)a.values + panel;
            load_row(row, a.k, a.k_stride, t, head);
            if constexpr (ROUNDED)
                bytes.store_key(row, element, rounded, key);
            else
                for (int64_t word = 0; word < words; word++) key[word * W + element] = row[word];
            if (!a.values) continue;
            const Scalar *v = (const Scalar *)a.v + t * a.v_stride + head * a.head_dim;
            if constexpr (ROUNDED)
                bytes.store_value(v, a.head_dim, element, rounded, value);
            else
                store_value(value + element / N * width, element % N, v);
        }
    }

    // Return the tile of keys at `start`, from position `oldest` up to `newest`. Panels outside are replaced by the
    // nearest one inside, because the sequence may have no block there. `copy` is scratch memory for a panel, or null if
    // the tile is only prefetched.
    Tile load_tile(int64_t sequence, int64_t head, int64_t start, int64_t oldest, int64_t newest,
                   uint32_t *copy) const {
        const int32_t *blocks = a.block_table + sequence * a.block_table_stride;
        const int64_t visible = std::min<int64_t>(TILE, newest + 1 - start), length = a.seq_lens[sequence];
        Tile tile;
        tile.used_keys = (int)((visible + W - 1) / W * W);
        tile.unused_keys = (int)std::max<int64_t>(0, oldest - start) / W * W;
        for (int i = 0; i < TILE / W; i++) {
            const int64_t position = start + std::clamp(i * W, tile.unused_keys, tile.used_keys - W);
            const int64_t valid = std::min<int64_t>(W, length - position);
            const int64_t panel = panel_offset(blocks[position / a.block_size], head, position % a.block_size);
            tile.keys[i] = (const uint32_t *)a.keys + panel;
            tile.values[i] = a.values ? (const uint32_t *)a.values + panel : tile.keys[i];
            if constexpr (!ROUNDED)
                if (copy && a.values && i * W < tile.used_keys && valid < W)
                    tile.values[i] = zero_tail(tile.values[i], valid, copy);
        }
        return tile;
    }

    // Copy the scales of a tile's keys and values to `to`, [2][TILE]. Scales of keys after the first `valid` become
    // zeros, as they may be those of another sequence. The scales of `next` are prefetched, or all of its panels.
    void read_scales(const Tile &tile, int64_t valid, float *to, const Tile &next, bool prefetches_panels) const {
        for (int i = 0; i < TILE / W; i++) {
            const int panel = std::clamp(i, tile.unused_keys / W, tile.used_keys / W - 1);
            const int64_t count = i == panel ? valid - i * W : 0;
            bytes.prefetch(next.keys[i], prefetches_panels);
            if (a.values) bytes.prefetch(next.values[i], prefetches_panels);
            bytes.read_scales(tile.keys[i], count, to + i * W);
            bytes.read_scales(tile.values[i], count, to + TILE + i * W);
        }
    }

    // Return the tile with its bytes expanded to elements in `copy`.
    Tile expand_tile(const Tile &tile, uint32_t *copy) const {
        Tile expanded = tile;
        const int first = tile.unused_keys / W, last = tile.used_keys / W - 1;
        uint32_t *const values = copy + TILE * words;
        for (int panel = first; panel <= last; panel++) {
            bytes.expand_keys(tile.keys[panel], copy + panel * W * words);
            if (a.values) bytes.expand_values(tile.values[panel], values + panel * W * words);
        }
        for (int i = 0; i < TILE / W; i++) {
            const int64_t at = std::clamp(i, first, last) * W * words;
            expanded.keys[i] = copy + at;
            expanded.values[i] = a.values ? values + at : expanded.keys[i];
        }
        return expanded;
    }

    // Return the tile with its values extracted from its keys to `copy`, scratch memory for a tile of values. Keys
    // that are not in use, and those after the first `valid`, have zeros, because a cache block may hold values of
    // another sequence. Padding columns of the values are undefined. They affect no other column.
    Tile extract_values(const Tile &tile, int64_t valid, uint32_t *copy) const {
        Tile extracted = tile;
        const int64_t first_word = (a.head_dim - a.value_dim) / N, value_words = (a.value_dim + N - 1) / N;
        for (int panel = 0; panel < tile.used_keys / W; panel++) {
            uint32_t *to = copy + panel * (W / N) * value_width;
            const int64_t count = panel * W < tile.unused_keys ? 0 : std::min<int64_t>(W, valid - panel * W);
            extract_panel(tile.keys[panel] + first_word * W, value_words, count, to);
            extracted.values[panel] = to;
        }
        return extracted;
    }
};

}  // namespace argosy
