// Index of a text of tokens, which finds what followed earlier occurrences of a text's last tokens, as LZ77 does.
//
// The tokens lie in a ring. A hash table has the latest position of each hash of MIN_MATCH tokens, and each position has
// the distance to the one before it with the same hash. A search follows at most MAX_STEPS positions and compares at
// most MAX_MATCH tokens at each. Negative tokens separate texts: no match and no continuation contains one.
// Not thread-safe. argosy/engine/execution/drafting/token_index.py documents the functions.

#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

namespace {

constexpr int MIN_MATCH = 3;
constexpr int MAX_MATCH = 32;
constexpr int MAX_CANDIDATES = 16;
constexpr int MAX_STEPS = 64;  // including positions of other tokens with the same hash
constexpr uint32_t FIRST_CAPACITY = 1024;

class TokenIndex {
   public:
    explicit TokenIndex(uint32_t max_tokens) : max_tokens_(max_tokens) { resize(std::min(max_tokens, FIRST_CAPACITY)); }

    void append(const int32_t* tokens, int64_t count) {
        for (const int32_t* token = tokens; token != tokens + count; ++token) {
            if (length_ == capacity_ && capacity_ < max_tokens_) resize(capacity_ * 2);
            ++last_;
            length_ = std::min(length_ + 1, capacity_);
            this->token(0) = *token;
            insert();
        }
    }

    // Find the longest match of a tail's end, the latest one of equal length. Without a tail, the index's own end is
    // continued, and a match that overlaps it repeats itself. Writes the tokens that follow and returns their number.
    int64_t find(const int32_t* tail, int64_t tail_size, int64_t limit, int32_t* out, int64_t* match_size,
                 int64_t* age) const {
        const bool is_own = tail == nullptr;
        int32_t own_tail[MAX_MATCH];
        if (is_own) {
            tail_size = std::min<int64_t>(length_, MAX_MATCH);
            for (int64_t i = 0; i < tail_size; ++i) own_tail[tail_size - 1 - i] = token(static_cast<uint32_t>(i));
            tail = own_tail;
        }
        *match_size = 0;
        if (tail_size < MIN_MATCH || limit <= 0) return 0;
        const int32_t* const end = tail + tail_size;
        const uint32_t max_match = static_cast<uint32_t>(std::min<int64_t>(tail_size, MAX_MATCH));
        uint32_t candidate = last_ - heads_[hash(end[-3], end[-2], end[-1])];  // as an age: tokens after the candidate
        uint32_t best = 0, best_size = MIN_MATCH - 1;
        int candidates = 0;
        for (int step = 0; step < MAX_STEPS && candidate < length_; ++step) {
            const uint32_t size = match(candidate, end, std::min(max_match, length_ - candidate));
            // age 0 has no continuation, and is the tail itself in its own index
            const bool has_next = candidate > 0 && (is_own || token(candidate - 1) >= 0);
            if (has_next && size > best_size) {
                best = candidate;
                best_size = size;
                if (size == max_match) break;
            }
            candidates += size >= MIN_MATCH && !(is_own && candidate == 0);
            if (candidates == MAX_CANDIDATES) break;
            const uint32_t distance = previous_[slot(candidate)];
            if (distance == 0 || distance >= length_ - candidate) break;
            candidate += distance;
        }
        if (best == 0) return 0;
        *match_size = best_size;
        *age = best;
        return copy(best, limit, is_own, out);
    }

   private:
    uint32_t slot(uint32_t age) const { return (last_ - age) & (capacity_ - 1); }
    int32_t& token(uint32_t age) { return tokens_[slot(age)]; }
    int32_t token(uint32_t age) const { return tokens_[slot(age)]; }

    uint32_t hash(int32_t a, int32_t b, int32_t c) const {
        const uint64_t mixed = (static_cast<uint64_t>(static_cast<uint32_t>(a)) * 0x9E3779B97F4A7C15u +
                                static_cast<uint32_t>(b)) * 0xC2B2AE3D27D4EB4Fu + static_cast<uint32_t>(c);
        return static_cast<uint32_t>((mixed * 0x9E3779B97F4A7C15u) >> 40) & static_cast<uint32_t>(heads_.size() - 1);
    }

    // Put the last position into the table.
    void insert() {
        uint32_t& distance = previous_[slot(0)];
        distance = 0;
        if (length_ < MIN_MATCH) return;
        uint32_t& head = heads_[hash(token(2), token(1), token(0))];
        distance = last_ - head;
        if (distance >= length_) distance = 0;
        head = last_;
    }

    uint32_t match(uint32_t age, const int32_t* end, uint32_t max_match) const {
        uint32_t size = 0;
        while (size < max_match && token(age + size) == end[-1 - static_cast<int64_t>(size)] && token(age + size) >= 0)
            ++size;
        return size;
    }

    int64_t copy(uint32_t age, int64_t limit, bool is_own, int32_t* out) const {
        int64_t count = 0;
        for (; count < limit; ++count) {
            if (count < age)
                out[count] = token(age - 1 - static_cast<uint32_t>(count));
            else if (is_own)
                out[count] = out[count - age];
            else
                break;
            if (out[count] < 0) break;
        }
        return count;
    }

    // Called before the ring is full, so that the positions 1 to `last_` are the tokens in their order.
    void resize(uint32_t capacity) {
        std::vector<int32_t> tokens(capacity);
        for (uint32_t position = 1; position <= last_; ++position)
            tokens[position & (capacity - 1)] = tokens_[position & (capacity_ - 1)];
        tokens_.swap(tokens);
        previous_.assign(capacity, 0);
        heads_.assign(capacity / 2, 0);
        capacity_ = capacity;
        const uint32_t count = last_;
        for (last_ = length_ = 0; length_ < count;) {
            ++last_;
            ++length_;
            insert();
        }
    }

    const uint32_t max_tokens_;  // a power of two, as is the capacity
    uint32_t capacity_ = 0;
    uint32_t length_ = 0;  // tokens in the ring
    uint32_t last_ = 0;    // position of the last token, from 1, modulo 2^32
    std::vector<int32_t> tokens_{};
    std::vector<uint32_t> previous_{};
    std::vector<uint32_t> heads_{};
};

}  // namespace

extern "C" {

void* argosy_token_index_open(int64_t max_tokens) {
    try {
        return new TokenIndex(static_cast<uint32_t>(max_tokens));
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void argosy_token_index_close(void* index) { delete static_cast<TokenIndex*>(index); }

// Returns 0, or 1 without memory, after which the index can only be closed.
int64_t argosy_token_index_append(void* index, const int32_t* tokens, int64_t count) {
    try {
        static_cast<TokenIndex*>(index)->append(tokens, count);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

int64_t argosy_token_index_find(const void* index, const int32_t* tail, int64_t tail_size, int64_t limit, int32_t* out,
                                int64_t* match_size, int64_t* age) {
    return static_cast<const TokenIndex*>(index)->find(tail, tail_size, limit, out, match_size, age);
}
}
