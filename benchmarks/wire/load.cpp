// Asks a proxy in one of four ways, one thread, and tells what came as a line of JSON.
//
//   load json PORT KEY CONNECTIONS SECONDS    closed loop of small requests that are not streamed
//   load streams PORT KEY STREAMS SECONDS     so many streams at any time, each of 100 tokens
//   load most PORT KEY LATE_MS MOST           more and more streams, until the median event comes late
//   load churn PORT KEY CLIENTS SECONDS       a connection for each request: streams, some cut in the middle, and small ones
//
// Prints "begin" when all have begun and it starts to count. Times in the answer are in microseconds;
// a delay is from the making of an event (@nanoseconds@ in its text) to its reading here, a ttft from the
// request to its first event.

#include <algorithm>
#include <random>
#include <vector>

#include "net.hpp"

namespace {

constexpr int64_t SECOND = 1'000'000'000;
constexpr int STREAM_TOKENS = 100, CHURN_TOKENS = 20, TOKENS_PER_S = 100;

// The body of one answer, taken out of its framing; finds the times in it.
struct Answer {
    enum Part { HEAD, BODY, SIZE, DATA, DATA_END, TRAILER, WHOLE, BROKEN } part = HEAD;
    std::string head;
    size_t left = 0;
    int line = 0;          // length of the trailer's line so far
    bool in_time = false;  // between two @
    int64_t time = 0;

    template <typename Seen>
    void feed(const char* at, const char* end, Seen&& seen) {
        while (at < end && part != BROKEN && part != WHOLE) {
            switch (part) {
                case HEAD: at = read_head(at, end); break;
                case BODY:
                case DATA: {
                    const char* stop = at + std::min(left, static_cast<size_t>(end - at));
                    left -= static_cast<size_t>(stop - at);
                    find_times(at, stop, seen);
                    at = stop;
                    if (left == 0) part = part == BODY ? WHOLE : DATA_END;
                    break;
                }
                case SIZE:
                    if (*at == '\n') part = left ? DATA : TRAILER, line = 0;
                    else if (*at != '\r') left = left * 16 + digit(*at);
                    at++;
                    break;
                case DATA_END:
                    if (*at++ == '\n') part = SIZE, left = 0;
                    break;
                case TRAILER:
                    if (*at == '\n' && line == 0) part = WHOLE;
                    else if (*at == '\n') line = 0;
                    else if (*at != '\r') line++;
                    at++;
                    break;
                default: break;
            }
        }
    }

    static size_t digit(char letter) {
        return static_cast<size_t>(letter <= '9' ? letter - '0' : (letter | 32) - 'a' + 10);
    }

    const char* read_head(const char* at, const char* end) {
        size_t had = head.size();
        head.append(at, end);
        size_t found = head.find("\r\n\r\n", had < 3 ? 0 : had - 3);
        if (found == std::string::npos) return end;
        const char* rest = at + (found + 4 - had);
        head.resize(found + 2);
        std::transform(head.begin(), head.end(), head.begin(), [](char l) { return l >= 'A' && l <= 'Z' ? l | 32 : l; });
        size_t length = head.find("\r\ncontent-length:");
        if (head.compare(8, 5, " 200 ") != 0) part = BROKEN;
        else if (length == std::string::npos) part = SIZE, left = 0;
        else left = std::strtoul(head.c_str() + length + 17, nullptr, 10), part = left ? BODY : WHOLE;
        return rest;
    }

    template <typename Seen>
    void find_times(const char* at, const char* end, Seen&& seen) {
        for (; at < end; at++) {
            if (!in_time) {
                at = static_cast<const char*>(std::memchr(at, '@', static_cast<size_t>(end - at)));
                if (!at) return;
                in_time = true, time = 0;
            } else if (*at == '@') {
                in_time = false;
                seen(time);
            } else {
                time = time * 10 + (*at - '0');
            }
        }
    }
};

struct Samples {
    std::vector<float> us;

    void add(int64_t ns) { us.push_back(static_cast<float>(ns) / 1000.0F); }

    double at(double part) {
        if (us.empty()) return 0;
        auto place = us.begin() + static_cast<long>(part * static_cast<double>(us.size() - 1));
        std::nth_element(us.begin(), place, us.end());
        return *place;
    }
};

struct Client {
    int fd = -1;
    bool streams = false;
    int cut_after = 0;  // leave after so many events; 0: never
    int events = 0;
    int64_t asked = 0;
    Answer answer;
    Outbox outbox;
};

struct Load {
    int port;
    std::string key;
    bool counting = false, churning = false;
    Poll poll{};
    std::vector<Client> clients{};
    std::vector<std::pair<int64_t, uint32_t>> starts{};  // when each new client asks first
    std::minstd_rand random{1};
    uint64_t number = 0, requests = 0, chunks = 0, errors = 0, cuts = 0, connections = 0;
    Samples delays{}, ttfts{}, latencies{};

    std::string request(bool streams, int tokens) {
        std::string body =
            R"({"model":"mock","messages":[{"role":"system","content":"You answer in short sentences."},{"role":"user","content":")" +
            std::to_string(number++) + std::string(700, 'y') + R"("}],"temperature":0.7,"max_tokens":)" +
            std::to_string(tokens) + (streams ? R"(,"stream":true})" : "}");
        return "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer " + key +
               "\r\ncontent-type: application/json\r\ncontent-length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
    }

    void ask(uint32_t place) {
        Client& c = clients[place];
        if (churning) {
            c.streams = random() % 10 < 7;
            c.cut_after = c.streams && random() % 5 == 0 ? CHURN_TOKENS / 2 : 0;
        }
        if (c.fd < 0) {
            c.fd = connect_to(port);
            connections++;
            poll.add(c.fd, place);
        }
        c.events = 0;
        c.answer = Answer{};
        c.asked = now_ns();
        if (!c.outbox.send(c.fd, request(c.streams, !c.streams ? 1 : churning ? CHURN_TOKENS : STREAM_TOKENS))) again(place, true);
    }

    // Close, and ask anew on another connection; a little later, so that a proxy which refuses is not flooded.
    void again(uint32_t place, bool failed) {
        Client& c = clients[place];
        close(c.fd);
        c.fd = -1;
        c.outbox.waiting.clear();
        errors += failed;
        starts.push_back({now_ns() + (failed ? SECOND / 20 : 0), place});
    }

    void serve(uint32_t place, uint32_t events) {
        Client& c = clients[place];
        if (c.fd < 0) return;
        if ((events & EPOLLOUT) && !c.outbox.flush(c.fd)) return again(place, true);
        if (!(events & (EPOLLIN | EPOLLHUP | EPOLLRDHUP | EPOLLERR))) return;
        char bytes[65536];
        for (;;) {
            ssize_t got = recv(c.fd, bytes, sizeof bytes, 0);
            if (got < 0 && errno == EAGAIN) return;
            if (got <= 0) return again(place, true);
            int64_t now = now_ns();
            c.answer.feed(bytes, bytes + got, [&](int64_t made) {
                c.events++;
                if (!counting) return;
                chunks++;
                delays.add(now - made);
                if (c.events == 1) ttfts.add(now - c.asked);
            });
            if (c.answer.part == Answer::BROKEN) return again(place, true);
            if (c.cut_after && c.events >= c.cut_after) {
                cuts += counting;
                return again(place, false);
            }
            if (c.answer.part != Answer::WHOLE) continue;
            if (counting) {
                requests++;
                latencies.add(now - c.asked);
            }
            if (churning) return again(place, false);
            ask(place);
            if (c.fd < 0) return;
        }
    }

    void more(size_t count, bool streams, int64_t over_ns) {
        int64_t now = now_ns();
        for (size_t i = 0; i < count; i++) {
            starts.push_back({now + static_cast<int64_t>(i) * over_ns / static_cast<int64_t>(count),
                              static_cast<uint32_t>(clients.size())});
            clients.emplace_back().streams = streams;
        }
    }

    void run_until(int64_t end) {
        for (int64_t now; (now = now_ns()) < end;) {
            int64_t wake = end;
            std::vector<uint32_t> ready;
            std::erase_if(starts, [&](auto& start) {
                if (start.first <= now) ready.push_back(start.second);
                else wake = std::min(wake, start.first);
                return start.first <= now;
            });
            for (uint32_t place : ready) ask(place);
            int count = poll.wait(ready.empty() ? wake : 0);
            for (int i = 0; i < count; i++) serve(static_cast<uint32_t>(poll.events[i].data.u64), poll.events[i].events);
        }
    }

    void begin() {
        counting = true;
        errors = 0;
        std::puts("begin");
        std::fflush(stdout);
    }

    void tell(double seconds, double rate) {
        std::printf("{\"seconds\": %.3f, \"requests\": %lu, \"chunks\": %lu, \"errors\": %lu, \"cuts\": %lu, \"connections\": %lu, "
                    "\"rate\": %.3f, ", seconds, requests, chunks, errors, cuts, connections, rate);
        std::printf("\"latency_p50\": %.1f, \"latency_p99\": %.1f, \"ttft_p50\": %.1f, \"ttft_p99\": %.1f, "
                    "\"delay_p50\": %.1f, \"delay_p99\": %.1f, \"streams\": %zu}\n", latencies.at(0.5), latencies.at(0.99),
                    ttfts.at(0.5), ttfts.at(0.99), delays.at(0.5), delays.at(0.99), clients.size());
    }

    // `count` clients for so many seconds.
    void steady(size_t count, bool streams, double seconds) {
        more(count, streams, SECOND);
        run_until(now_ns() + 2 * SECOND);
        begin();
        int64_t from = now_ns();
        run_until(from + static_cast<int64_t>(seconds * SECOND));
        double took = static_cast<double>(now_ns() - from) / SECOND;
        tell(took, static_cast<double>(chunks) / took / static_cast<double>(count));
    }

    // A tenth more streams each half second; `streams` is what there were when the median event last came in time,
    // and nine tenths of the events came at all.
    void climb(double late_us, size_t most) {
        more(64, true, SECOND);
        run_until(now_ns() + SECOND);
        begin();
        size_t held = 0;
        double rate = 0;
        for (int late = 0; late < 2 && held < most;) {
            size_t running = clients.size();
            delays.us.clear();
            chunks = 0;
            run_until(now_ns() + SECOND / 2);
            double came = static_cast<double>(chunks) * 2 / static_cast<double>(running);
            bool in_time = came >= 0.9 * TOKENS_PER_S && delays.at(0.5) <= late_us;
            late = in_time ? 0 : late + 1;
            if (!in_time) continue;
            held = running;
            rate = came;
            more(running / 10, true, SECOND / 4);
        }
        clients.resize(held);
        tell(0, rate);
    }
};

}  // namespace

int main(int count, char** given) {
    if (count != 6) return std::fputs("usage: load json|streams|most|churn PORT KEY COUNT SECONDS\n", stderr), 2;
    std::string mode = given[1];
    Load load{.port = std::atoi(given[2]), .key = given[3], .churning = mode == "churn"};
    if (mode == "most") load.climb(std::atof(given[4]) * 1000, static_cast<size_t>(std::atoi(given[5])));
    else load.steady(static_cast<size_t>(std::atoi(given[4])), mode == "streams", std::atof(given[5]));
}
