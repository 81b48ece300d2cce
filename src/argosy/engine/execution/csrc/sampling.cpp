// Which token comes next, and how likely each was: no row is sorted, behind a plain C ABI.
//
// A token's weight is 2^((logit - largest) * scale) in fixed point. Sums of integers are exact in any order, and each
// weight is made of operations that IEEE 754 rounds in one way, so draws.py gives the same tokens on any device.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "simd.h"

#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

extern "C" {

// Draws one token for each of `rows` rows of logits; each struct is mirrored field by field by native.py.
struct ArgosyDraw {
    const void *logits;     // [rows, vocab], rows `stride` apart
    const float *scale;     // [rows]: log2(e) / temperature; 0 is greedy
    const int64_t *top_k;   // [rows], 1 to vocab
    const float *top_p;     // [rows]
    const float *least;     // [rows]: log2(min_p)
    const double *chance;   // [rows], in [0, 1)
    int64_t *tokens;        // [rows]; -1 where the logits hold NaN or infinity, or nothing that is not -infinity
    int64_t rows, vocab, stride, threads;
};

// Tells how likely `tokens` were, and which were the likeliest.
struct ArgosyTelling {
    const void *logits;     // [any, vocab], rows `stride` apart
    const int64_t *which;   // [rows]: the row of logits
    const int64_t *tokens;  // [rows]
    const int64_t *counts;  // [rows]: how many of the likeliest, at most `most`
    int64_t *ranks;         // [rows]: 1 + how many are likelier
    int64_t *masses;        // [rows]: the sum of all weights at temperature 1
    float *own, *largest;   // [rows]: logits
    int64_t *ids;           // [rows, most]
    float *likeliest;       // [rows, most]: their logits
    int64_t rows, vocab, stride, most, threads;
};
}

namespace {

using namespace argosy;

using i64x8 = int64_t __attribute__((vector_size(64)));
using f32x8 = float __attribute__((vector_size(32)));

constexpr int64_t SEGMENT = 512;      // tokens whose largest logit and mass are kept
constexpr int64_t SHARED = 1 << 16;   // elements from which on threads share
constexpr int FRACTION = 40;          // the largest weight is 2^40: a vocabulary of 2^22 cannot overflow
constexpr float NOTHING = -FRACTION - 1;  // weights of this exponent and below are zero
constexpr int PER_OCTAVE = 32;            // buckets for each factor of two
constexpr int BUCKETS = (FRACTION + 1) * PER_OCTAVE + 1;
constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr float LOG2E = 1.44269504088896341f;

struct Member {
    float logit;
    int64_t id;
    // The order that every cut follows: falling logits, of equals the lower id first.
    bool operator<(const Member &other) const { return logit > other.logit || (logit == other.logit && id < other.id); }
};

struct Bucket {
    int64_t count, mass;
};

struct Weights {
    i64x8 low, high;
};

inline f32x16 widened(const float *from) { return load<f32x16>(from); }
inline f32x16 widened(const uint16_t *from) {
    return (f32x16)(__builtin_convertvector(load<u16x16>(from), u32x16) << 16);
}
inline float widened_one(float x) { return x; }
inline float widened_one(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

inline bool any(i32x16 mask) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    int64_t words[LANES / 2], all = 0;
    store(words, mask);
    for (const int64_t word : words) all |= word;
    return all != 0;
#endif
}

inline int64_t sum(i64x8 x) { return (x[0] + x[1]) + (x[2] + x[3]) + ((x[4] + x[5]) + (x[6] + x[7])); }

// 2^exponent for exponents up to 0, in units of 2^-FRACTION, rounded down; exactly 2^FRACTION at 0.
inline Weights weigh(f32x16 exponent) {
    const f32x16 y = exponent < NOTHING ? broadcast(NOTHING) : exponent;
    const f32x16 magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const f32x16 shifted = y + magic;
    const f32x16 f = y - (shifted - magic);
    f32x16 p = f * 1.5403530e-4f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    p = (f32x16)((i32x16)p + (((i32x16)shifted - (i32x16)magic + FRACTION) << 23));
    f32x8 half[2];
    std::memcpy(half, &p, sizeof p);
    return {__builtin_convertvector(half[0], i64x8), __builtin_convertvector(half[1], i64x8)};
}

// One row of logits and what has been found out about it; a thread uses the same for row after row.
template <class Scalar> class Row {
  public:
    explicit Row(int64_t vocab) : vocab(vocab), tops((vocab + SEGMENT - 1) / SEGMENT), masses(tops.size()) {}

    // Take up a row: finds the largest logit, the first token that has it, and whether all numbers are sound.
    bool survey(const Scalar *row) {
        logits = row;
        i32x16 unsound{};
        size_t best = 0;
        for (size_t s = 0; s < tops.size(); s++) {
            f32x16 top = broadcast(-INFINITE);
            for (int64_t i = begin(s); i < end(s); i += LANES) {
                const f32x16 x = at(i);
                top = maximum(top, x);
                unsound |= ~(x < INFINITE);
            }
            tops[s] = reduce_max(top);
            if (tops[s] > tops[best]) best = s;
        }
        largest = tops[best];
        if (any(unsound) || largest == -INFINITE) return false;
        likeliest = begin(best);
        while (one(likeliest) != largest) likeliest++;
        return true;
    }

    int64_t draw(float by, int64_t top_k, float top_p, float least, double chance) {
        if (by == 0.0f) return likeliest;
        scale = by;
        const Member last = top_k < vocab || top_p < 1.0f ? cut(top_k, top_p) : everything();
        const int64_t total = measure(last, least);
        const int64_t target = std::min((int64_t)(chance * (double)total), total - 1);
        return pick(last, least, target);
    }

    void tell(const ArgosyTelling &a, int64_t row) {
        scale = LOG2E;
        const float own = one(a.tokens[row]);
        i32x16 above{};
        visit(own, [&](f32x16 x, int64_t) { above -= x > own; });
        a.ranks[row] = 1;
        for (int lane = 0; lane < LANES; lane++) a.ranks[row] += above[lane];
        a.own[row] = own;
        a.largest[row] = largest;
        a.masses[row] = measure(everything(), -INFINITE);
        if (!a.counts[row]) return;
        const Member last = a.counts[row] < vocab ? cut(a.counts[row], 1.0f) : everything();
        members.clear();
        visit(last.logit, [&](f32x16 x, int64_t i) { gather(x, i, within(x, i, last)); });
        std::sort(members.begin(), members.end());
        for (int64_t i = 0; i < a.counts[row]; i++) {
            a.ids[row * a.most + i] = members[i].id;
            a.likeliest[row * a.most + i] = members[i].logit;
        }
    }

  private:
    int64_t vocab, likeliest = 0;
    const Scalar *logits = nullptr;
    float largest = 0.0f, scale = 0.0f;
    std::vector<float> tops;
    std::vector<int64_t> masses;
    std::vector<Bucket> buckets;
    std::vector<Member> members;
    std::vector<float> spare;

    int64_t begin(size_t segment) const { return (int64_t)segment * SEGMENT; }
    int64_t end(size_t segment) const { return std::min(begin(segment) + SEGMENT, vocab); }
    float one(int64_t id) const { return widened_one(logits[id]); }

    // Sixteen logits; beyond the vocabulary stands -infinity.
    f32x16 at(int64_t i) const {
        if (i + LANES <= vocab) return widened(logits + i);
        f32x16 x = broadcast(-INFINITE);
        for (int64_t lane = 0; i + lane < vocab; lane++) x[lane] = one(i + lane);
        return x;
    }

    // Calls body(sixteen logits, id of the first) in the segments that hold a logit of at least `floor`.
    template <class Body> void visit(float floor, Body body) const {
        for (size_t s = 0; s < tops.size(); s++)
            if (tops[s] >= floor)
                for (int64_t i = begin(s); i < end(s); i += LANES) body(at(i), i);
    }

    f32x16 exponents(f32x16 x) const { return (x - largest) * scale; }
    float exponent(float x) const { return (x - largest) * scale; }

    Member everything() const { return {-INFINITE, vocab}; }

    // Which lanes come no later than `last`.
    static i32x16 within(f32x16 x, int64_t i, const Member &last) {
        const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        return (x > last.logit) | ((x == last.logit) & (lanes + (int32_t)i <= (int32_t)last.id));
    }

    Weights kept(f32x16 x, int64_t i, const Member &last, float least) const {
        const f32x16 y = exponents(x);
        return weigh(within(x, i, last) & (y >= least) ? y : broadcast(NOTHING));
    }

    // The mass of what comes no later than `last` and has an exponent of at least `least`, also by segments.
    int64_t measure(const Member &last, float least) {
        int64_t total = 0;
        const float floor = std::max(least, NOTHING);
        for (size_t s = 0; s < tops.size(); s++) {
            i64x8 mass{};
            if (tops[s] >= last.logit && exponent(tops[s]) >= floor)
                for (int64_t i = begin(s); i < end(s); i += LANES) {
                    const Weights w = kept(at(i), i, last, least);
                    mass += w.low + w.high;
                }
            masses[s] = sum(mass);
            total += masses[s];
        }
        return total;
    }

    // The first token, by id, at which the sum of the kept weights exceeds `target`.
    int64_t pick(const Member &last, float least, int64_t target) const {
        size_t s = 0;
        while (target >= masses[s]) target -= masses[s++];
        for (int64_t i = begin(s);; i += LANES) {
            const Weights w = kept(at(i), i, last, least);
            int64_t lane[LANES];
            std::memcpy(lane, &w, sizeof w);
            for (int j = 0; j < LANES; j++)
                if ((target -= lane[j]) < 0) return i + j;
        }
    }

    // The last token that top-k, then top-p of what is left, keep.
    Member cut(int64_t top_k, float top_p) {
        const bool few = top_k < vocab;
        const int64_t all = few ? 0 : measure(everything(), -INFINITE);
        const float floor = few ? floor_of(top_k) : floor_of(top_p, all);
        fill(floor);
        Member last = everything();
        int64_t mass = all;
        if (few) {
            int64_t count = 0;
            int bucket = 0;
            for (mass = 0; count + buckets[bucket].count < top_k; bucket++) {
                count += buckets[bucket].count;
                mass += buckets[bucket].mass;
            }
            open(bucket, floor);
            std::nth_element(members.begin(), members.begin() + (top_k - count - 1), members.end());
            last = members[top_k - count - 1];
            for (const Member &member : members)
                if (!(last < member)) mass += weight(member.logit);
        }
        return top_p < 1.0f ? nucleus(last, (int64_t)((double)top_p * (double)mass), floor) : last;
    }

    // The last token before which there is less mass than `limit`, or `last` if that comes earlier.
    Member nucleus(const Member &last, int64_t limit, float floor) {
        if (limit <= 0) return {largest, likeliest};
        int64_t before = 0;
        int bucket = 0;
        for (; bucket < BUCKETS - 1 && before + buckets[bucket].mass < limit; bucket++) before += buckets[bucket].mass;
        open(bucket, floor);
        std::sort(members.begin(), members.end());
        Member found = last;
        for (const Member &member : members) {
            if (last < member || before >= limit) break;
            found = member;
            before += weight(member.logit);
        }
        return found;
    }

    // An exponent that the k-th largest logit reaches: k segments hold one that does.
    float floor_of(int64_t top_k) {
        if (top_k > (int64_t)tops.size()) return -INFINITE;
        spare = tops;
        std::nth_element(spare.begin(), spare.begin() + (top_k - 1), spare.end(), std::greater<float>());
        return exponent(spare[top_k - 1]);
    }

    // An exponent that the whole nucleus reaches: all weights below it together are less than is cut.
    float floor_of(float top_p, int64_t all) const {
        const double cut = (1.0 - (double)top_p) * (double)all / (double)vocab;
        return (float)(std::log2(cut) - FRACTION) - 0.01f;
    }

    // Exponents as places among the buckets.
    static f32x16 place_of(f32x16 y) { return (y < NOTHING ? broadcast(NOTHING) : y) * (float)-PER_OCTAVE; }
    static int bucket_of(float exponent) { return (int)(std::max(exponent, NOTHING) * -PER_OCTAVE); }

    // Count and weigh the tokens that reach `floor`, by their exponent; the others share one bucket more.
    void fill(float floor) {
        buckets.assign(BUCKETS + 1, {0, 0});
        for (size_t s = 0; s < tops.size(); s++) {
            if (exponent(tops[s]) < floor) continue;
            for (int64_t i = begin(s); i < end(s); i += LANES) {
                const f32x16 y = exponents(at(i));
                const i32x16 reached = y >= floor;
                if (!any(reached)) continue;
                const Weights w = weigh(y);
                const i32x16 places = __builtin_convertvector(place_of(y), i32x16);
                int64_t weight[LANES];
                int32_t place[LANES];
                std::memcpy(weight, &w, sizeof w);
                store(place, reached ? places : i32x16{} + BUCKETS);
                const int64_t count = std::min<int64_t>(LANES, end(s) - i);
                for (int64_t lane = 0; lane < count; lane++) {
                    buckets[place[lane]].count++;
                    buckets[place[lane]].mass += weight[lane];
                }
            }
        }
    }

    // Collect the members of a bucket.
    void open(int bucket, float floor) {
        members.clear();
        for (size_t s = 0; s < tops.size(); s++) {
            if (bucket_of(exponent(tops[s])) > bucket) continue;
            for (int64_t i = begin(s); i < end(s); i += LANES) {
                const f32x16 x = at(i), y = exponents(x), place = place_of(y);
                gather(x, i, (y >= floor) & (place >= (float)bucket) & (place < (float)(bucket + 1)));
            }
        }
    }

    // Adds the tokens of the lanes that are set.
    void gather(f32x16 x, int64_t i, i32x16 mask) {
        if (!any(mask)) return;
        float logit[LANES];
        int32_t set[LANES];
        store(logit, x);
        store(set, mask);
        for (int64_t lane = 0; lane < std::min<int64_t>(LANES, vocab - i); lane++)
            if (set[lane]) members.push_back({logit[lane], i + lane});
    }

    int64_t weight(float logit) const { return weigh(broadcast(exponent(logit))).low[0]; }
};

template <class Scalar> void draw(const ArgosyDraw &a) {
#pragma omp parallel num_threads((int)a.threads) if (a.rows > 1 && a.rows * a.vocab >= SHARED)
    {
        Row<Scalar> row(a.vocab);
#pragma omp for schedule(dynamic, 1)
        for (int64_t r = 0; r < a.rows; r++)
            a.tokens[r] = row.survey((const Scalar *)a.logits + r * a.stride)
                              ? row.draw(a.scale[r], a.top_k[r], a.top_p[r], a.least[r], a.chance[r])
                              : -1;
    }
}

template <class Scalar> void tell(const ArgosyTelling &a) {
#pragma omp parallel num_threads((int)a.threads) if (a.rows > 1 && a.rows * a.vocab >= SHARED)
    {
        Row<Scalar> row(a.vocab);
#pragma omp for schedule(dynamic, 1)
        for (int64_t r = 0; r < a.rows; r++)
            if (row.survey((const Scalar *)a.logits + a.which[r] * a.stride)) row.tell(a, r);
    }
}

}  // namespace

extern "C" {

void argosy_draw_float32(const ArgosyDraw *call) { draw<float>(*call); }
void argosy_draw_bfloat16(const ArgosyDraw *call) { draw<uint16_t>(*call); }
void argosy_tell_float32(const ArgosyTelling *call) { tell<float>(*call); }
void argosy_tell_bfloat16(const ArgosyTelling *call) { tell<uint16_t>(*call); }
}
