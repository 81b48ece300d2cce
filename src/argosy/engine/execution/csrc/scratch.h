// A thread's working memory: kept from call to call, given out in cache lines, never returned.
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
    // How many lines `count` elements take.
    template <class E> static size_t lines_of(size_t count) {
        return (count * sizeof(E) + sizeof(Line) - 1) / sizeof(Line);
    }

    // Begin anew with room for so many lines: what was taken before is gone.
    void reset(size_t room) {
        if (lines.size() < room) lines.resize(room);
        used = 0;
    }

    // `count` elements, not cleared.
    template <class E> E *take(size_t count) {
        E *taken = (E *)(lines.data() + used);
        used += lines_of<E>(count);
        return taken;
    }
};

// One use's memory in this thread: giving it back after a call costs more than most calls.
template <int USE> uint8_t *scratch(size_t bytes) {
    static thread_local Scratch kept;
    kept.reset(Scratch::lines_of<uint8_t>(bytes));
    return kept.take<uint8_t>(bytes);
}

}  // namespace argosy
