// Sampling of the next token, and log-probabilities, without sorting a row, behind a C ABI.
//
// A token's weight is 2^((logit - largest) * logit_scale) in fixed point. Integer sums are exact in any order, and each
// weight consists of operations whose rounding IEEE 754 defines. sampling_ops.py therefore gives the same tokens on any
// device.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "simd.h"
#include "threads.h"

#include "no_contraction.h"

extern "C" {

// Arguments of sampling: one token for each row of logits. native_calls.py mirrors both structs field by field.
struct ArgosySample {
    const void *logits;           // [rows, vocab], rows `stride` apart
    const float *logit_scale;     // [rows]: log2(e) / temperature; 0 is greedy
    const int64_t *top_k;         // [rows], 1 to vocab
    const float *top_p;           // [rows]
    const float *log2_min_p;      // [rows]
    const double *random_values;  // [rows], in [0, 1)
    int64_t *tokens;              // [rows]; -1 if the logits contain NaN or infinity, or only -infinity
    int64_t rows, vocab, stride, threads;
};

// Arguments of log-probabilities: how likely `tokens` were, and which tokens were the likeliest.
struct ArgosyLogprobs {
    const void *logits;           // [any, vocab], rows `stride` apart
    const int64_t *logit_rows;    // [rows]: row of logits
    const int64_t *tokens;        // [rows]
    const int64_t *top_counts;    // [rows]: number of likeliest tokens, at most `max_top`
    int64_t *ranks;               // [rows]: 1 + number of likelier tokens
    int64_t *weight_sums;         // [rows]: sum of all weights at temperature 1
    float *token_logits, *largest;  // [rows]
    int64_t *top_ids;             // [rows, max_top]
    float *top_logits;            // [rows, max_top]
    int64_t rows, vocab, stride, max_top, threads;
};
}

namespace {

using namespace argosy;

using i64x8 = int64_t __attribute__((vector_size(64)));
using f32x8 = float __attribute__((vector_size(32)));

constexpr int64_t SEGMENT_TOKENS = 512;             // tokens per segment, whose largest logit and weight sum are stored
constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 16;  // below this, one thread is faster
constexpr int FRACTION_BITS = 40;                   // the largest weight is 2^40, so 2^22 tokens cannot overflow
constexpr float MIN_EXPONENT = -FRACTION_BITS - 1;  // largest exponent whose weight is zero
constexpr int BUCKETS_PER_OCTAVE = 32;              // buckets per factor of two
constexpr int NUM_BUCKETS = (FRACTION_BITS + 1) * BUCKETS_PER_OCTAVE + 1;
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float LOG2E = 1.44269504088896341f;

struct Candidate {
    float logit;
    int64_t id;
    // Order of top-k and top-p: falling logits, and the lower id first among equals.
    bool operator<(const Candidate &other) const {
        return logit > other.logit || (logit == other.logit && id < other.id);
    }
};

struct Bucket {
    int64_t count, weight;
};

struct Weights {
    i64x8 low, high;
};

inline f32x16 to_float(const float *from) { return load<f32x16>(from); }
inline f32x16 to_float(const uint16_t *from) {
    return (f32x16)(__builtin_convertvector(load<u16x16>(from), u32x16) << 16);
}
inline float scalar_to_float(float x) { return x; }
inline float scalar_to_float(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline bool any(i32x16 mask) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    int64_t words[LANES / 2], combined = 0;
    store(words, mask);
    for (const int64_t word : words) combined |= word;
    return combined != 0;
#endif
}

inline int64_t sum(i64x8 x) { return (x[0] + x[1]) + (x[2] + x[3]) + ((x[4] + x[5]) + (x[6] + x[7])); }

// Compute 2^exponent for exponents up to 0, in units of 2^-FRACTION_BITS, rounded down. Exactly 2^FRACTION_BITS at 0.
inline Weights compute_weights(f32x16 exponent) {
    const f32x16 y = exponent < MIN_EXPONENT ? broadcast(MIN_EXPONENT) : exponent;
    const f32x16 magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const f32x16 shifted = y + magic;
    const f32x16 f = y - (shifted - magic);
    f32x16 p = f * 1.5403530e-4f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    p = (f32x16)((i32x16)p + (((i32x16)shifted - (i32x16)magic + FRACTION_BITS) << 23));
    f32x8 half[2];
    std::memcpy(half, &p, sizeof p);
    return {__builtin_convertvector(half[0], i64x8), __builtin_convertvector(half[1], i64x8)};
}

// One row of logits and its statistics. A thread uses the same object for one row after the other.
template <class Scalar> class LogitRow {
  public:
    explicit LogitRow(int64_t vocab)
        : vocab(vocab), segment_peaks((vocab + SEGMENT_TOKENS - 1) / SEGMENT_TOKENS),
          segment_weights(segment_peaks.size()) {}

    // Load a row: find the largest logit and the first token that has it. Returns false if the logits are invalid.
    bool load_row(const Scalar *row) {
        logits = row;
        i32x16 invalid{};
        size_t best = 0;
        for (size_t s = 0; s < segment_peaks.size(); s++) {
            f32x16 top = broadcast(-INF);
            for (int64_t i = segment_begin(s); i < segment_end(s); i += LANES) {
                const f32x16 x = lanes_at(i);
                top = maximum(top, x);
                invalid |= ~(x < INF);
            }
            segment_peaks[s] = reduce_max(top);
            if (segment_peaks[s] > segment_peaks[best]) best = s;
        }
        largest = segment_peaks[best];
        if (any(invalid) || largest == -INF) return false;
        best_token = segment_begin(best);
        while (logit_at(best_token) != largest) best_token++;
        return true;
    }

    int64_t sample(float new_scale, int64_t top_k, float top_p, float log2_min_p, double random_value) {
        if (new_scale == 0.0f) return best_token;
        logit_scale = new_scale;
        const Candidate last = top_k < vocab || top_p < 1.0f ? find_cut(top_k, top_p) : no_cut();
        const int64_t total = sum_weights(last, log2_min_p);
        const int64_t target = std::min((int64_t)(random_value * (double)total), total - 1);
        return select_token(last, log2_min_p, target);
    }

    void compute_logprobs(const ArgosyLogprobs &a, int64_t row) {
        logit_scale = LOG2E;
        const float token_logit = logit_at(a.tokens[row]);
        i32x16 above{};
        for_each_above(token_logit, [&](f32x16 x, int64_t) { above -= x > token_logit; });
        a.ranks[row] = 1;
        for (int lane = 0; lane < LANES; lane++) a.ranks[row] += above[lane];
        a.token_logits[row] = token_logit;
        a.largest[row] = largest;
        a.weight_sums[row] = sum_weights(no_cut(), -INF);
        if (!a.top_counts[row]) return;
        const Candidate last = a.top_counts[row] < vocab ? find_cut(a.top_counts[row], 1.0f) : no_cut();
        candidates.clear();
        for_each_above(last.logit, [&](f32x16 x, int64_t i) { collect_lanes(x, i, ranks_within(x, i, last)); });
        std::sort(candidates.begin(), candidates.end());
        for (int64_t i = 0; i < a.top_counts[row]; i++) {
            a.top_ids[row * a.max_top + i] = candidates[i].id;
            a.top_logits[row * a.max_top + i] = candidates[i].logit;
        }
    }

  private:
    int64_t vocab, best_token = 0;
    const Scalar *logits = nullptr;
    float largest = 0.0f, logit_scale = 0.0f;
    std::vector<float> segment_peaks;
    std::vector<int64_t> segment_weights;
    std::vector<Bucket> buckets;
    std::vector<Candidate> candidates;
    std::vector<float> peaks;

    int64_t segment_begin(size_t segment) const { return (int64_t)segment * SEGMENT_TOKENS; }
    int64_t segment_end(size_t segment) const { return std::min(segment_begin(segment) + SEGMENT_TOKENS, vocab); }
    float logit_at(int64_t id) const { return scalar_to_float(logits[id]); }

    // Sixteen logits, with -infinity after the end of the vocabulary.
    f32x16 lanes_at(int64_t i) const {
        if (i + LANES <= vocab) return to_float(logits + i);
        f32x16 x = broadcast(-INF);
        for (int64_t lane = 0; i + lane < vocab; lane++) x[lane] = logit_at(i + lane);
        return x;
    }

    // Call body(sixteen logits, id of the first) in all segments with a logit of at least `floor`.
    template <class Body> void for_each_above(float floor, Body body) const {
        for (size_t s = 0; s < segment_peaks.size(); s++)
            if (segment_peaks[s] >= floor)
                for (int64_t i = segment_begin(s); i < segment_end(s); i += LANES) body(lanes_at(i), i);
    }

    f32x16 exponents(f32x16 x) const { return (x - largest) * logit_scale; }
    float exponent(float x) const { return (x - largest) * logit_scale; }

    Candidate no_cut() const { return {-INF, vocab}; }

    // Mask of the lanes that rank no later than `last`.
    static i32x16 ranks_within(f32x16 x, int64_t i, const Candidate &last) {
        const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        return (x > last.logit) | ((x == last.logit) & (lanes + (int32_t)i <= (int32_t)last.id));
    }

    Weights kept_weights(f32x16 x, int64_t i, const Candidate &last, float log2_min_p) const {
        const f32x16 y = exponents(x);
        return compute_weights(ranks_within(x, i, last) & (y >= log2_min_p) ? y : broadcast(MIN_EXPONENT));
    }

    // Sum the weights of the tokens that rank no later than `last` and have an exponent of at least `log2_min_p`.
    // Stores the sum of each segment and returns the total.
    int64_t sum_weights(const Candidate &last, float log2_min_p) {
        int64_t total = 0;
        const float floor = std::max(log2_min_p, MIN_EXPONENT);
        for (size_t s = 0; s < segment_peaks.size(); s++) {
            i64x8 weight_sum{};
            if (segment_peaks[s] >= last.logit && exponent(segment_peaks[s]) >= floor)
                for (int64_t i = segment_begin(s); i < segment_end(s); i += LANES) {
                    const Weights w = kept_weights(lanes_at(i), i, last, log2_min_p);
                    weight_sum += w.low + w.high;
                }
            segment_weights[s] = sum(weight_sum);
            total += segment_weights[s];
        }
        return total;
    }

    // Return the first token, by id, at which the cumulative kept weight exceeds `target`.
    int64_t select_token(const Candidate &last, float log2_min_p, int64_t target) const {
        size_t s = 0;
        while (target >= segment_weights[s]) target -= segment_weights[s++];
        for (int64_t i = segment_begin(s);; i += LANES) {
            const Weights w = kept_weights(lanes_at(i), i, last, log2_min_p);
            int64_t lane[LANES];
            std::memcpy(lane, &w, sizeof w);
            for (int j = 0; j < LANES; j++)
                if ((target -= lane[j]) < 0) return i + j;
        }
    }

    // Return the last token in rank order that remains after top-k and then top-p.
    Candidate find_cut(int64_t top_k, float top_p) {
        const bool has_top_k = top_k < vocab;
        const int64_t total = has_top_k ? 0 : sum_weights(no_cut(), -INF);
        const float floor = has_top_k ? min_exponent_for(top_k) : min_exponent_for(top_p, total);
        fill_buckets(floor);
        Candidate last = no_cut();
        int64_t weight_sum = total;
        if (has_top_k) {
            int64_t count = 0;
            int bucket = 0;
            for (weight_sum = 0; count + buckets[bucket].count < top_k; bucket++) {
                count += buckets[bucket].count;
                weight_sum += buckets[bucket].weight;
            }
            collect_bucket(bucket, floor);
            std::nth_element(candidates.begin(), candidates.begin() + (top_k - count - 1), candidates.end());
            last = candidates[top_k - count - 1];
            for (const Candidate &candidate : candidates)
                if (!(last < candidate)) weight_sum += weight(candidate.logit);
        }
        return top_p < 1.0f ? find_nucleus_end(last, (int64_t)((double)top_p * (double)weight_sum), floor) : last;
    }

    // Return the last token before which the weights sum to less than `limit`, or `last` if that ranks earlier.
    Candidate find_nucleus_end(const Candidate &last, int64_t limit, float floor) {
        if (limit <= 0) return {largest, best_token};
        int64_t weight_before = 0;
        int bucket = 0;
        for (; bucket < NUM_BUCKETS - 1 && weight_before + buckets[bucket].weight < limit; bucket++)
            weight_before += buckets[bucket].weight;
        collect_bucket(bucket, floor);
        std::sort(candidates.begin(), candidates.end());
        Candidate last_kept = last;
        for (const Candidate &candidate : candidates) {
            if (last < candidate || weight_before >= limit) break;
            last_kept = candidate;
            weight_before += weight(candidate.logit);
        }
        return last_kept;
    }

    // Return a lower bound of the exponent of the k-th largest logit, which the k-th largest segment peak is.
    float min_exponent_for(int64_t top_k) {
        if (top_k > (int64_t)segment_peaks.size()) return -INF;
        peaks = segment_peaks;
        std::nth_element(peaks.begin(), peaks.begin() + (top_k - 1), peaks.end(), std::greater<float>());
        return exponent(peaks[top_k - 1]);
    }

    // Return a lower bound of the exponents in the nucleus: all weights below it sum to less than top-p excludes.
    float min_exponent_for(float top_p, int64_t total) const {
        const double cut = (1.0 - (double)top_p) * (double)total / (double)vocab;
        return (float)(std::log2(cut) - FRACTION_BITS) - 0.01f;
    }

    // Position of exponents among the buckets.
    static f32x16 bucket_position(f32x16 y) {
        return (y < MIN_EXPONENT ? broadcast(MIN_EXPONENT) : y) * (float)-BUCKETS_PER_OCTAVE;
    }
    static int bucket_index(float exponent) { return (int)(std::max(exponent, MIN_EXPONENT) * -BUCKETS_PER_OCTAVE); }

    // Count tokens and sum weights by bucket of their exponent. Tokens with an exponent below `floor` share an extra
    // bucket.
    void fill_buckets(float floor) {
        buckets.assign(NUM_BUCKETS + 1, {0, 0});
        for (size_t s = 0; s < segment_peaks.size(); s++) {
            if (exponent(segment_peaks[s]) < floor) continue;
            for (int64_t i = segment_begin(s); i < segment_end(s); i += LANES) {
                const f32x16 y = exponents(lanes_at(i));
                const i32x16 above_floor = y >= floor;
                if (!any(above_floor)) continue;
                const Weights w = compute_weights(y);
                const i32x16 positions = __builtin_convertvector(bucket_position(y), i32x16);
                int64_t weight[LANES];
                int32_t position[LANES];
                std::memcpy(weight, &w, sizeof w);
                store(position, above_floor ? positions : i32x16{} + NUM_BUCKETS);
                const int64_t count = std::min<int64_t>(LANES, segment_end(s) - i);
                for (int64_t lane = 0; lane < count; lane++) {
                    buckets[position[lane]].count++;
                    buckets[position[lane]].weight += weight[lane];
                }
            }
        }
    }

    // Collect the tokens of a bucket into `candidates`.
    void collect_bucket(int bucket, float floor) {
        candidates.clear();
        for (size_t s = 0; s < segment_peaks.size(); s++) {
            if (bucket_index(exponent(segment_peaks[s])) > bucket) continue;
            for (int64_t i = segment_begin(s); i < segment_end(s); i += LANES) {
                const f32x16 x = lanes_at(i), y = exponents(x), position = bucket_position(y);
                collect_lanes(x, i, (y >= floor) & (position >= (float)bucket) & (position < (float)(bucket + 1)));
            }
        }
    }

    // Append the tokens of the lanes in `mask` to `candidates`.
    void collect_lanes(f32x16 x, int64_t i, i32x16 mask) {
        if (!any(mask)) return;
        float logit[LANES];
        int32_t set[LANES];
        store(logit, x);
        store(set, mask);
        for (int64_t lane = 0; lane < std::min<int64_t>(LANES, vocab - i); lane++)
            if (set[lane]) candidates.push_back({logit[lane], i + lane});
    }

    int64_t weight(float logit) const { return compute_weights(broadcast(exponent(logit))).low[0]; }
};

template <class Scalar> void sample(const ArgosySample &a) {
#pragma omp parallel num_threads(limit_threads(a.threads)) if (a.rows > 1 && a.rows * a.vocab >= MIN_PARALLEL_ELEMENTS)
    {
        LogitRow<Scalar> row(a.vocab);
#pragma omp for schedule(dynamic, 1)
        for (int64_t r = 0; r < a.rows; r++)
            a.tokens[r] =
                row.load_row((const Scalar *)a.logits + r * a.stride)
                    ? row.sample(a.logit_scale[r], a.top_k[r], a.top_p[r], a.log2_min_p[r], a.random_values[r])
                    : -1;
    }
}

template <class Scalar> void compute_logprobs(const ArgosyLogprobs &a) {
#pragma omp parallel num_threads(limit_threads(a.threads)) if (a.rows > 1 && a.rows * a.vocab >= MIN_PARALLEL_ELEMENTS)
    {
        LogitRow<Scalar> row(a.vocab);
#pragma omp for schedule(dynamic, 1)
        for (int64_t r = 0; r < a.rows; r++)
            if (row.load_row((const Scalar *)a.logits + a.logit_rows[r] * a.stride)) row.compute_logprobs(a, r);
    }
}

}  // namespace

extern "C" {

void argosy_sample_float32(const ArgosySample *call) { sample<float>(*call); }
void argosy_sample_bfloat16(const ArgosySample *call) { sample<uint16_t>(*call); }
void argosy_logprobs_float32(const ArgosyLogprobs *call) { compute_logprobs<float>(*call); }
void argosy_logprobs_bfloat16(const ArgosyLogprobs *call) { compute_logprobs<uint16_t>(*call); }
}
