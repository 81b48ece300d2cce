// Forwards streams that need no decision, in a thread beside the interpreter.
//
// A stream is attached between two chunks (RFC 9112, 7.1) of its replica's response, when the kernel has accepted
// everything that was sent to its client. A chunk is regular if it consists of whole events, each followed by a metadata
// block with its token ids (see argosy/gateway/backends/native_stream_parser.py). The thread forwards regular events
// without the blocks, in chunks of its own, and counts their tokens. Any other input, and a client that does not accept
// the output at once, returns the stream with the unread and unsent bytes.
//
// Each stream duplicates its two descriptors, so a socket that is closed elsewhere cannot make it write into another
// connection. A single interpreter thread calls the functions. argosy/gateway/proxy/fast_path.py documents them.

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

constexpr size_t MAX_CHUNK_BYTES = 64 * 1024;  // a stream with larger chunks is returned
constexpr ptrdiff_t MAX_SIZE_DIGITS = 8;
constexpr int MAX_ID_DIGITS = 10;  // of a token id
constexpr size_t READ_BYTES = 64 * 1024;
constexpr int MAX_EVENTS = 256;
// With this number of readable streams the thread pauses, so that the interpreter can work and more input is batched.
constexpr int BATCHING_STREAMS = 4;
constexpr timespec BATCHING_PAUSE{0, 250'000};
constexpr std::string_view EVENT_PREFIX = "data: {";
constexpr std::string_view METADATA_PREFIX = ": argosy 0 ";  // metadata of choice 0, the only one

// Mirrored by _NativeProgress in fast_path.py. Pointers are valid until the next call for the stream.
struct Progress {
    const double* chunk_times;  // monotonic time of each chunk that was forwarded since the last report
    int64_t chunk_count;
    const char* token_ids;  // of these chunks, comma-separated
    int64_t token_ids_bytes;
    int64_t output_tokens;  // of the whole stream
    const char* unread;  // of a detached stream: bytes of the replica that were not parsed
    int64_t unread_bytes;
    const char* unsent;  // of a detached stream: forwarded bytes that the client's socket did not accept
    int64_t unsent_bytes;
};

struct Stream {
    const int64_t number;
    int64_t* const token_counter;  // receives `output_tokens`, for the usage log
    const int64_t max_output_tokens;
    std::mutex lock{};  // guards all members below
    int replica_fd, client_fd;
    int64_t output_tokens;
    bool attached = true;
    std::string unread{}, unsent{}, token_ids{};
    std::vector<double> chunk_times{};
    std::string reported_ids{};  // buffers that the last report points to
    std::vector<double> reported_times{};

    Stream(int64_t number, int replica_fd, int client_fd, int64_t* token_counter, int64_t output_tokens,
           int64_t max_output_tokens)
        : number(number),
          token_counter(token_counter),
          max_output_tokens(max_output_tokens),
          replica_fd(replica_fd),
          client_fd(client_fd),
          output_tokens(output_tokens) {}

    ~Stream() { close_descriptors(); }

    // Stops forwarding. Closes the descriptors at once, because a connection ends only with its last descriptor.
    void detach(int poll_fd) {
        attached = false;
        epoll_ctl(poll_fd, EPOLL_CTL_DEL, replica_fd, nullptr);
        close_descriptors();
    }

    void report(Progress& progress) {
        std::lock_guard guard(lock);
        auto size_if_detached = [this](const std::string& bytes) {
            return attached ? 0 : static_cast<int64_t>(bytes.size());
        };
        reported_ids.swap(token_ids);
        reported_times.swap(chunk_times);
        token_ids.clear();
        chunk_times.clear();
        auto size = [](const auto& values) { return static_cast<int64_t>(values.size()); };
        progress = {reported_times.data(), size(reported_times), reported_ids.data(),
                    size(reported_ids),    output_tokens,        unread.data(),
                    size_if_detached(unread), unsent.data(),     size_if_detached(unsent)};
    }

  private:
    void close_descriptors() {
        for (int* descriptor : {&replica_fd, &client_fd}) {
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

enum class ParseResult { COMPLETE, INCOMPLETE, IRREGULAR };

int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

// Parses the chunk that starts at `at`. If it is complete, sets its body and moves `at` behind it.
ParseResult parse_chunk(const char*& at, const char* end, std::string_view& body) {
    size_t size = 0;
    const char* p = at;
    for (; p < end; p++) {
        int digit = hex_digit(*p);
        if (digit < 0) break;
        size = size * 16 + static_cast<size_t>(digit);
        if (p - at == MAX_SIZE_DIGITS || size > MAX_CHUNK_BYTES) return ParseResult::IRREGULAR;
    }
    if (p == end) return ParseResult::INCOMPLETE;
    if (*p != '\r' || size == 0) return ParseResult::IRREGULAR;
    if (end - p < static_cast<ptrdiff_t>(size) + 4) return ParseResult::INCOMPLETE;
    if (p[1] != '\n' || p[size + 2] != '\r' || p[size + 3] != '\n') return ParseResult::IRREGULAR;
    body = {p + 2, size};
    at = p + size + 4;
    return ParseResult::COMPLETE;
}

// Output for the client, built from the chunks of one read.
struct Output {
    std::string bytes{}, token_ids{};
    std::vector<double> chunk_times{};
    int64_t token_count = 0;

    void clear() {
        bytes.clear();
        token_ids.clear();
        chunk_times.clear();
        token_count = 0;
    }

    // Adds a chunk. Returns false, and adds nothing, if it is not regular or exceeds `max_tokens`.
    bool add_chunk(std::string_view body, int64_t max_tokens, double now) {
        size_t bytes_before = bytes.size(), ids_before = token_ids.size(), times_before = chunk_times.size();
        int64_t count_before = token_count;
        events.clear();
        bool has_metadata = false;
        while (!body.empty()) {
            size_t end = body.find("\n\n");
            if (end == std::string_view::npos) break;
            std::string_view block = body.substr(0, end);
            if (block.substr(0, EVENT_PREFIX.size()) == EVENT_PREFIX) {
                events.append(body.data(), end + 2);
                has_metadata = false;
            } else if (block.substr(0, METADATA_PREFIX.size()) == METADATA_PREFIX &&
                       add_token_ids(block.substr(METADATA_PREFIX.size()))) {
                chunk_times.push_back(now);
                has_metadata = true;
            } else {
                break;
            }
            body.remove_prefix(end + 2);
        }
        if (!body.empty() || !has_metadata || token_count > max_tokens) {
            bytes.resize(bytes_before);
            token_ids.resize(ids_before);
            chunk_times.resize(times_before);
            token_count = count_before;
            return false;
        }
        if (!events.empty()) append_events_as_chunk();
        return true;
    }

  private:
    std::string events{};

    // Adds comma-separated token ids. Returns false if the text is anything else.
    bool add_token_ids(std::string_view text) {
        int64_t count = 1;
        int digits = 0;
        for (char c : text) {
            bool is_comma = c == ',';
            if (is_comma ? digits == 0 : c < '0' || c > '9' || digits == MAX_ID_DIGITS) return false;
            digits = is_comma ? 0 : digits + 1;
            count += is_comma;
        }
        if (digits == 0) return false;
        if (!token_ids.empty()) token_ids += ',';
        token_ids += text;
        token_count += count;
        return true;
    }

    void append_events_as_chunk() {
        char size_line[20];
        int length = snprintf(size_line, sizeof size_line, "%zx\r\n", events.size());
        bytes.append(size_line, static_cast<size_t>(length)).append(events).append("\r\n");
    }
};

class FastPath {
  public:
    FastPath() {
        poll_fd_ = epoll_create1(EPOLL_CLOEXEC);
        stop_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        returned_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        epoll_event event{};
        event.events = EPOLLIN;  // without a stream, which means stop
        epoll_ctl(poll_fd_, EPOLL_CTL_ADD, stop_fd_, &event);
        if (is_open()) thread_ = std::thread([this] { run(); });
    }

    ~FastPath() {
        if (thread_.joinable()) {
            eventfd_write(stop_fd_, 1);
            thread_.join();
        }
        for (int descriptor : {poll_fd_, stop_fd_, returned_fd_}) {
            if (descriptor >= 0) close(descriptor);
        }
    }

    bool is_open() const { return poll_fd_ >= 0 && stop_fd_ >= 0 && returned_fd_ >= 0; }

    int returned_fd() const { return returned_fd_; }

    Stream* attach(int64_t number, int replica_fd, int client_fd, int64_t* token_counter, int64_t output_tokens,
                   int64_t max_output_tokens) {
        auto stream = std::make_unique<Stream>(number, fcntl(replica_fd, F_DUPFD_CLOEXEC, 0),
                                               fcntl(client_fd, F_DUPFD_CLOEXEC, 0), token_counter, output_tokens,
                                               max_output_tokens);
        if (stream->replica_fd < 0 || stream->client_fd < 0) return nullptr;
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.ptr = stream.get();
        if (epoll_ctl(poll_fd_, EPOLL_CTL_ADD, stream->replica_fd, &event) < 0) return nullptr;
        return stream.release();
    }

    void detach(Stream* stream) {
        std::lock_guard guard(stream->lock);
        if (stream->attached) stream->detach(poll_fd_);
    }

    void release(Stream* stream) {
        // The thread deletes the stream, since its current batch of events may still refer to it.
        std::lock_guard guard(lists_lock_);
        released_.emplace_back(stream);
    }

    int64_t take_returned(int64_t* numbers, int64_t capacity) {
        eventfd_t ignored;
        eventfd_read(returned_fd_, &ignored);
        std::lock_guard guard(lists_lock_);
        int64_t count = std::min(capacity, static_cast<int64_t>(returned_.size()));
        std::copy_n(returned_.begin(), count, numbers);
        returned_.erase(returned_.begin(), returned_.begin() + count);
        if (!returned_.empty()) eventfd_write(returned_fd_, 1);
        return count;
    }

  private:
    int poll_fd_, stop_fd_, returned_fd_;
    std::thread thread_;
    std::mutex lists_lock_;  // guards the two lists below
    std::vector<int64_t> returned_;
    std::vector<std::unique_ptr<Stream>> released_;
    // Only used by the thread.
    std::unique_ptr<char[]> buffer_ = std::make_unique<char[]>(MAX_CHUNK_BYTES + READ_BYTES + 16);
    Output output_;

    void run() {
        epoll_event events[MAX_EVENTS];
        std::vector<std::unique_ptr<Stream>> deleted;
        std::vector<int64_t> returned;
        for (;;) {
            {
                std::lock_guard guard(lists_lock_);
                deleted.swap(released_);
            }
            deleted.clear();  // safe here, because no event of the last batch is left
            int count = epoll_wait(poll_fd_, events, MAX_EVENTS, -1);
            if (count >= BATCHING_STREAMS) {
                nanosleep(&BATCHING_PAUSE, nullptr);
                count = epoll_wait(poll_fd_, events, MAX_EVENTS, 0);
            }
            double now = now_s();
            for (int i = 0; i < count; i++) {
                auto* stream = static_cast<Stream*>(events[i].data.ptr);
                if (stream == nullptr) return;
                std::lock_guard guard(stream->lock);
                if (!stream->attached || forward(*stream, now)) continue;
                stream->detach(poll_fd_);
                returned.push_back(stream->number);
            }
            if (returned.empty()) continue;
            {
                std::lock_guard guard(lists_lock_);
                returned_.insert(returned_.end(), returned.begin(), returned.end());
            }
            returned.clear();
            eventfd_write(returned_fd_, 1);
        }
    }

    // Forwards the chunks that can be read. Returns false if the stream must be returned.
    bool forward(Stream& stream, double now) {
        char* bytes = buffer_.get();
        size_t size = stream.unread.copy(bytes, stream.unread.size());
        ssize_t received = recv(stream.replica_fd, bytes + size, READ_BYTES, MSG_DONTWAIT);
        if (received < 0 && (errno == EAGAIN || errno == EINTR)) return true;
        if (received <= 0) return false;
        const char *at = bytes, *end = bytes + size + received;
        output_.clear();
        bool is_regular = true;
        while (is_regular && at < end) {
            const char* next = at;
            std::string_view body;
            ParseResult result = parse_chunk(next, end, body);
            if (result == ParseResult::INCOMPLETE) break;
            is_regular = result == ParseResult::COMPLETE &&
                         output_.add_chunk(body, stream.max_output_tokens - stream.output_tokens, now);
            if (is_regular) at = next;
        }
        stream.unread.assign(at, end);
        return send_output(stream) && is_regular;
    }

    bool send_output(Stream& stream) {
        if (output_.chunk_times.empty()) return true;
        const std::string& bytes = output_.bytes;
        stream.output_tokens += output_.token_count;
        if (stream.token_counter != nullptr) {
            __atomic_store_n(stream.token_counter, stream.output_tokens, __ATOMIC_RELAXED);
        }
        if (!stream.token_ids.empty()) stream.token_ids += ',';
        stream.token_ids += output_.token_ids;
        stream.chunk_times.insert(stream.chunk_times.end(), output_.chunk_times.begin(), output_.chunk_times.end());
        if (bytes.empty()) return true;
        ssize_t sent = send(stream.client_fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent == static_cast<ssize_t>(bytes.size())) return true;
        stream.unsent.assign(bytes, sent < 0 ? 0 : static_cast<size_t>(sent), std::string::npos);
        return false;
    }
};

}  // namespace

extern "C" {

// Returns null if no descriptor or thread is available.
void* argosy_fast_path_open() {
    try {
        auto path = std::make_unique<FastPath>();
        return path->is_open() ? path.release() : nullptr;
    } catch (const std::system_error&) {
        return nullptr;
    }
}

void argosy_fast_path_close(void* path) { delete static_cast<FastPath*>(path); }

int64_t argosy_fast_path_returned_fd(void* path) { return static_cast<FastPath*>(path)->returned_fd(); }

void* argosy_fast_path_attach(void* path, int64_t number, int64_t replica_fd, int64_t client_fd, int64_t* token_counter,
                              int64_t output_tokens, int64_t max_output_tokens) {
    return static_cast<FastPath*>(path)->attach(number, static_cast<int>(replica_fd), static_cast<int>(client_fd),
                                                token_counter, output_tokens, max_output_tokens);
}

void argosy_fast_path_poll_progress(void* stream, Progress* progress) {
    static_cast<Stream*>(stream)->report(*progress);
}

void argosy_fast_path_detach(void* path, void* stream, Progress* progress) {
    static_cast<FastPath*>(path)->detach(static_cast<Stream*>(stream));
    static_cast<Stream*>(stream)->report(*progress);
}

void argosy_fast_path_release(void* path, void* stream) {
    static_cast<FastPath*>(path)->release(static_cast<Stream*>(stream));
}

int64_t argosy_fast_path_take_returned(void* path, int64_t* numbers, int64_t capacity) {
    return static_cast<FastPath*>(path)->take_returned(numbers, capacity);
}
}
