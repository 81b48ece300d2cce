// Passes streams on while nothing about them has to be decided, in a thread of its own beside the interpreter.
//
// A stream comes here in the middle: between two chunks (RFC 9112, 7.1) of its replica's answer, with all that was sent
// to its client taken by the kernel. Pieces are regular that are whole events, each sealed by a block that names
// its token ids (see argosy/gateway/backends/native_stream_parser.py): they go to the client without the blocks, in chunks of their
// own, and are counted. Whatever else comes, or is in the way, gives the stream back with the bytes that are left on
// either side.
//
// Each stream has descriptors of its own for its two sockets, so nothing that is closed elsewhere can make it write into
// another's. One thread of the interpreter calls; the functions are told of in argosy/gateway/proxy/fast_path.py.

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

namespace {

constexpr size_t CHUNK_BYTES = 64 * 1024;  // larger ones are not for here
constexpr ptrdiff_t SIZE_DIGITS = 8;
constexpr int ID_DIGITS = 10;  // of a token id: longer ones are none
constexpr size_t READ_BYTES = 64 * 1024;
constexpr int EVENTS = 256;
constexpr int BUSY = 4;  // streams that have something at once: then a moment more lets the interpreter work meanwhile,
constexpr timespec MOMENT{0, 250'000};  // and saves as many ways back and forth
constexpr std::string_view EVENT = "data: {";
constexpr std::string_view SEAL = ": argosy 0 ";  // of the only choice

struct News {
    const double* times;  // of the pieces that were passed on since the last news, on the monotonic clock
    int64_t pieces;
    const char* ids;  // of their tokens, comma-separated
    int64_t ids_bytes;
    int64_t output;  // tokens of the stream, in all
    const char* rest;  // once it is given back: what came from the replica and was not looked at
    int64_t rest_bytes;
    const char* unsent;  // what was passed on, and the client's socket did not take
    int64_t unsent_bytes;
};

struct Stream {
    const int64_t number;
    int64_t* const counter;  // of its output tokens, for the ledger
    const int64_t most;
    std::mutex lock{};  // over what follows
    int replica, client;
    int64_t output;
    bool here = true;
    std::string rest{}, unsent{}, ids{};
    std::vector<double> times{};
    std::string told_ids{};  // what the last news point to
    std::vector<double> told_times{};

    Stream(int64_t number, int replica, int client, int64_t* counter, int64_t output, int64_t most)
        : number(number), counter(counter), most(most), replica(replica), client(client), output(output) {}

    ~Stream() { close_both(); }

    // It goes on elsewhere. Its descriptors are closed at once: a connection ends with the last of them.
    void give_back(int poll) {
        here = false;
        epoll_ctl(poll, EPOLL_CTL_DEL, replica, nullptr);
        close_both();
    }

    void tell(News& news) {
        std::lock_guard guard(lock);
        auto left = [this](const std::string& all) { return here ? 0 : static_cast<int64_t>(all.size()); };
        told_ids.swap(ids);
        told_times.swap(times);
        ids.clear();
        times.clear();
        auto size = [](const auto& all) { return static_cast<int64_t>(all.size()); };
        news = {told_times.data(), size(told_times), told_ids.data(), size(told_ids), output,
                rest.data(), left(rest), unsent.data(), left(unsent)};
    }

  private:
    void close_both() {
        for (int* descriptor : {&replica, &client}) {
            if (*descriptor >= 0) close(*descriptor);
            *descriptor = -1;
        }
    }
};

double now_s() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

enum class Found { WHOLE, PART, OTHER };

// The body of the chunk that begins at `at`, which is moved behind it.
Found next_chunk(const char*& at, const char* end, std::string_view& body) {
    size_t size = 0;
    const char* p = at;
    for (; p < end; p++) {
        char c = *p;
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0) break;
        size = size * 16 + static_cast<size_t>(digit);
        if (p - at == SIZE_DIGITS || size > CHUNK_BYTES) return Found::OTHER;
    }
    if (p == end) return Found::PART;
    if (*p != '\r' || size == 0) return Found::OTHER;
    if (end - p < static_cast<ptrdiff_t>(size) + 4) return Found::PART;
    if (p[1] != '\n' || p[size + 2] != '\r' || p[size + 3] != '\n') return Found::OTHER;
    body = {p + 2, size};
    at = p + size + 4;
    return Found::WHOLE;
}

// What is made of the chunks of one read.
struct Passed {
    std::string out{}, ids{};
    std::vector<double> pieces{};
    int64_t tokens = 0;

    void clear() {
        out.clear();
        ids.clear();
        pieces.clear();
        tokens = 0;
    }

    // Takes the pieces of a chunk, unless they are not regular or have more tokens than that.
    bool add(std::string_view body, int64_t most, double now) {
        size_t out_before = out.size(), ids_before = ids.size(), pieces_before = pieces.size();
        int64_t tokens_before = tokens;
        events.clear();
        bool sealed = false;
        while (!body.empty()) {
            size_t end = body.find("\n\n");
            if (end == std::string_view::npos) break;
            std::string_view block = body.substr(0, end);
            if (block.substr(0, EVENT.size()) == EVENT) {
                events.append(body.data(), end + 2);
                sealed = false;
            } else if (block.substr(0, SEAL.size()) == SEAL && count(block.substr(SEAL.size()))) {
                pieces.push_back(now);
                sealed = true;
            } else {
                break;
            }
            body.remove_prefix(end + 2);
        }
        if (!body.empty() || !sealed || tokens > most) {
            out.resize(out_before);
            ids.resize(ids_before);
            pieces.resize(pieces_before);
            tokens = tokens_before;
            return false;
        }
        if (!events.empty()) frame();
        return true;
    }

  private:
    std::string events{};

    // Takes token ids; false when they are something else.
    bool count(std::string_view told) {
        int64_t found = 1;
        int digits = 0;
        for (char c : told) {
            bool comma = c == ',';
            if (comma ? digits == 0 : c < '0' || c > '9' || digits == ID_DIGITS) return false;
            digits = comma ? 0 : digits + 1;
            found += comma;
        }
        if (digits == 0) return false;
        if (!ids.empty()) ids += ',';
        ids += told;
        tokens += found;
        return true;
    }

    void frame() {
        char size[20];
        int digits = snprintf(size, sizeof size, "%zx\r\n", events.size());
        out.append(size, static_cast<size_t>(digits)).append(events).append("\r\n");
    }
};

class FastPath {
  public:
    FastPath() {
        poll_ = epoll_create1(EPOLL_CLOEXEC);
        stop_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        left_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        epoll_event event{};
        event.events = EPOLLIN;  // of no stream
        epoll_ctl(poll_, EPOLL_CTL_ADD, stop_, &event);
        if (able()) thread_ = std::thread([this] { run(); });
    }

    ~FastPath() {
        if (thread_.joinable()) {
            eventfd_write(stop_, 1);
            thread_.join();
        }
        for (int descriptor : {poll_, stop_, left_}) {
            if (descriptor >= 0) close(descriptor);
        }
    }

    bool able() const { return poll_ >= 0 && stop_ >= 0 && left_ >= 0; }

    int left() const { return left_; }

    Stream* take(int64_t number, int replica, int client, int64_t* counter, int64_t output, int64_t most) {
        auto stream = std::make_unique<Stream>(
            number, fcntl(replica, F_DUPFD_CLOEXEC, 0), fcntl(client, F_DUPFD_CLOEXEC, 0), counter, output, most);
        if (stream->replica < 0 || stream->client < 0) return nullptr;
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.ptr = stream.get();
        if (epoll_ctl(poll_, EPOLL_CTL_ADD, stream->replica, &event) < 0) return nullptr;
        return stream.release();
    }

    void stop(Stream* stream) {
        std::lock_guard guard(stream->lock);
        if (stream->here) stream->give_back(poll_);
    }

    void forget(Stream* stream) {
        // What the thread has been told of it already it may still look at.
        std::lock_guard guard(lists_);
        forgotten_.emplace_back(stream);
    }

    int64_t gave_back(int64_t* numbers, int64_t room) {
        eventfd_t count;
        eventfd_read(left_, &count);
        std::lock_guard guard(lists_);
        int64_t told = std::min(room, static_cast<int64_t>(given_back_.size()));
        std::copy_n(given_back_.begin(), told, numbers);
        given_back_.erase(given_back_.begin(), given_back_.begin() + told);
        if (!given_back_.empty()) eventfd_write(left_, 1);
        return told;
    }

  private:
    int poll_, stop_, left_;
    std::thread thread_;
    std::mutex lists_;  // over what follows
    std::vector<int64_t> given_back_;
    std::vector<std::unique_ptr<Stream>> forgotten_;
    // The thread's own.
    std::unique_ptr<char[]> buffer_ = std::make_unique<char[]>(CHUNK_BYTES + READ_BYTES + 16);
    Passed passed_;

    void run() {
        epoll_event events[EVENTS];
        std::vector<std::unique_ptr<Stream>> ended;
        std::vector<int64_t> back;
        for (;;) {
            {
                std::lock_guard guard(lists_);
                ended.swap(forgotten_);
            }
            ended.clear();  // nothing of the events at hand is of these
            int count = epoll_wait(poll_, events, EVENTS, -1);
            if (count >= BUSY) {
                nanosleep(&MOMENT, nullptr);
                count = epoll_wait(poll_, events, EVENTS, 0);
            }
            double now = now_s();
            for (int i = 0; i < count; i++) {
                auto* stream = static_cast<Stream*>(events[i].data.ptr);
                if (stream == nullptr) return;
                std::lock_guard guard(stream->lock);
                if (!stream->here || pass(*stream, now)) continue;
                stream->give_back(poll_);
                back.push_back(stream->number);
            }
            if (back.empty()) continue;
            {
                std::lock_guard guard(lists_);
                given_back_.insert(given_back_.end(), back.begin(), back.end());
            }
            back.clear();
            eventfd_write(left_, 1);
        }
    }

    // Pass on what came; false when the stream is to be given back.
    bool pass(Stream& stream, double now) {
        char* bytes = buffer_.get();
        size_t size = stream.rest.copy(bytes, stream.rest.size());
        ssize_t got = recv(stream.replica, bytes + size, READ_BYTES, MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
        if (got <= 0) return false;
        const char *at = bytes, *end = bytes + size + got;
        passed_.clear();
        bool regular = true;
        while (regular && at < end) {
            const char* next = at;
            std::string_view body;
            Found found = next_chunk(next, end, body);
            if (found == Found::PART) break;
            regular = found == Found::WHOLE && passed_.add(body, stream.most - stream.output, now);
            if (regular) at = next;
        }
        stream.rest.assign(at, end);
        return send_on(stream) && regular;
    }

    bool send_on(Stream& stream) {
        if (passed_.pieces.empty()) return true;
        const std::string& out = passed_.out;
        stream.output += passed_.tokens;
        if (stream.counter != nullptr) __atomic_store_n(stream.counter, stream.output, __ATOMIC_RELAXED);
        if (!stream.ids.empty()) stream.ids += ',';
        stream.ids += passed_.ids;
        stream.times.insert(stream.times.end(), passed_.pieces.begin(), passed_.pieces.end());
        if (out.empty()) return true;
        ssize_t sent = send(stream.client, out.data(), out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent == static_cast<ssize_t>(out.size())) return true;
        stream.unsent.assign(out, sent < 0 ? 0 : static_cast<size_t>(sent), std::string::npos);
        return false;
    }
};

}  // namespace

extern "C" {

// Null: there is no descriptor or thread to be had.
void* argosy_fast_path_open() {
    try {
        auto path = std::make_unique<FastPath>();
        return path->able() ? path.release() : nullptr;
    } catch (const std::system_error&) {
        return nullptr;
    }
}

void argosy_fast_path_close(void* path) { delete static_cast<FastPath*>(path); }

int64_t argosy_fast_path_left(void* path) { return static_cast<FastPath*>(path)->left(); }

void* argosy_fast_path_take(
    void* path, int64_t number, int64_t replica, int64_t client, int64_t* counter, int64_t output, int64_t most) {
    return static_cast<FastPath*>(path)->take(
        number, static_cast<int>(replica), static_cast<int>(client), counter, output, most);
}

void argosy_fast_path_news(void* stream, News* news) { static_cast<Stream*>(stream)->tell(*news); }

void argosy_fast_path_stop(void* path, void* stream, News* news) {
    static_cast<FastPath*>(path)->stop(static_cast<Stream*>(stream));
    static_cast<Stream*>(stream)->tell(*news);
}

void argosy_fast_path_forget(void* path, void* stream) {
    static_cast<FastPath*>(path)->forget(static_cast<Stream*>(stream));
}

int64_t argosy_fast_path_gave_back(void* path, int64_t* numbers, int64_t room) {
    return static_cast<FastPath*>(path)->gave_back(numbers, room);
}
}
