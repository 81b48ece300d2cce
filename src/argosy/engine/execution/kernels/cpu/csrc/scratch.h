// Working memory of a thread, allocated in cache lines and kept from call to call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace argosy {

class Scratch {
    struct alignas(64) Line {
        char bytes[64];
    };
    std::vector<Line> lines;
    size_t used = 0;

  public:
    // Number of cache lines that `count` elements occupy.
    template <class E> static size_t lines_for(size_t count) {
        return (count * sizeof(E) + sizeof(Line) - 1) / sizeof(Line);
    }

    // Start over with room for `line_count` lines. Earlier allocations become invalid.
    void reset(size_t line_count) {
        if (lines.size() < line_count) lines.resize(line_count);
        used = 0;
    }

    // Allocate `count` elements, uninitialised.
    template <class E> E *allocate(size_t count) {
        E *elements = (E *)(lines.data() + used);
        used += lines_for<E>(count);
        return elements;
    }
};

// Buffer of this thread for one purpose, numbered USE. It is kept, because freeing it costs more than most calls.
template <int USE> uint8_t *thread_buffer(size_t bytes) {
    static thread_local Scratch buffer;
    buffer.reset(Scratch::lines_for<uint8_t>(bytes));
    return buffer.allocate<uint8_t>(bytes);
}

}  // namespace argosy
