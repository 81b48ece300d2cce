// The engine behind the proxies: an OpenAI-compatible server that only answers, one thread, any number of streams.
//
//   upstream RATE        tokens per second of each stream; prints its port, then serves until it is killed
//
// A POST with `"stream": true` gets `max_tokens` events of about 200 bytes at RATE, the first at once, each with the time
// it was made at (@nanoseconds@ in its text); every other POST a JSON answer of 0.7 kB, and a stream of one token has as much
// text. Whoever asks with `x-argosy-resume-metadata` gets the blocks with token ids that Argosy's own engine writes. A GET gets what
// probes look for.

#include <algorithm>
#include <deque>
#include <queue>
#include <vector>

#include "net.hpp"

namespace {

constexpr int DEFAULT_TOKENS = 100;
constexpr size_t WORDS = 420;  // bytes of the text of an answer in one piece
constexpr std::string_view HEAD =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
constexpr std::string_view PROBED =
    R"({"object":"list","status":"ready","state":"ready","data":[{"id":"mock","object":"model","created":1700000000,)"
    R"("owned_by":"mock"}],"model_path":"mock","served_model_name":"mock","is_generation":true,"max_model_len":131072,)"
    R"("max_total_num_tokens":100000000,"tp_size":1,"dp_size":1,"server_load":0,"models":["mock"],"running":0,"waiting":0,)"
    R"("queued_tokens":0,"max_seqs":100000,"block_size":16,"kv_blocks_total":100000,"kv_blocks_used":0,)"
    R"("kv_blocks_cached":0,"step":0,"step_s":0.01})";

struct Connection {
    int fd = -1;
    uint32_t life = 0;  // raised when the place is used anew: what is due for an earlier one is void
    std::string inbox;
    Outbox outbox;
    bool streaming = false, journaled = false;
    int told = 0, tokens = 0;
};

struct Due {
    int64_t at;
    uint32_t place, life;
    bool operator>(const Due& other) const { return at > other.at; }
};

struct Server {
    int64_t gap_ns;
    int listener = -1;
    Poll poll{};
    std::deque<Connection> connections{};
    std::vector<uint32_t> free{};
    std::priority_queue<Due, std::vector<Due>, std::greater<>> due{};

    void run() {
        for (;;) {
            int count = poll.wait(due.empty() ? -1 : due.top().at);
            for (int i = 0; i < count; i++) {
                if (poll.events[i].data.u64 == UINT64_MAX) accept_all();
                else serve(static_cast<uint32_t>(poll.events[i].data.u64), poll.events[i].events);
            }
            for (int64_t now = now_ns(); !due.empty() && due.top().at <= now;) {
                Due next = due.top();
                due.pop();
                tell(next);
            }
        }
    }

    void accept_all() {
        for (int fd; (fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK)) >= 0;) {
            no_delay(fd);
            if (free.empty()) {
                free.push_back(static_cast<uint32_t>(connections.size()));
                connections.emplace_back();
            }
            uint32_t place = free.back();
            free.pop_back();
            connections[place].fd = fd;
            poll.add(fd, place);
        }
    }

    void drop(uint32_t place) {
        Connection& c = connections[place];
        close(c.fd);
        uint32_t life = c.life + 1;
        c = Connection{};
        c.life = life;
        free.push_back(place);
    }

    void serve(uint32_t place, uint32_t events) {
        Connection& c = connections[place];
        if (c.fd < 0) return;
        if ((events & EPOLLOUT) && !c.outbox.flush(c.fd)) return drop(place);
        if (!(events & (EPOLLIN | EPOLLHUP | EPOLLRDHUP | EPOLLERR))) return;
        char bytes[65536];
        ssize_t got;
        while ((got = recv(c.fd, bytes, sizeof bytes, 0)) > 0) c.inbox.append(bytes, static_cast<size_t>(got));
        if (got == 0 || errno != EAGAIN) return drop(place);
        while (!c.streaming && answer(place, c)) {}
    }

    // Answer the request at the front of the inbox; false when it is not whole, or the client is gone.
    bool answer(uint32_t place, Connection& c) {
        size_t end = c.inbox.find("\r\n\r\n");
        if (end == std::string::npos) return false;
        std::string head = c.inbox.substr(0, end + 2);
        std::transform(head.begin() + 4, head.end(), head.begin() + 4, [](char l) { return l >= 'A' && l <= 'Z' ? l | 32 : l; });
        size_t length = 0, at = head.find("\r\ncontent-length:");
        if (at != std::string::npos) length = std::strtoul(head.c_str() + at + 17, nullptr, 10);
        if (c.inbox.size() < end + 4 + length) return false;
        std::string body = c.inbox.substr(end + 4, length);
        c.inbox.erase(0, end + 4 + length);
        bool sent = true;
        if (!head.starts_with("POST")) sent = c.outbox.send(c.fd, whole(PROBED));
        else if (!asks_for_stream(body)) sent = c.outbox.send(c.fd, whole(answer_body()));
        else {
            c.streaming = true;
            c.journaled = head.find("\r\nx-argosy-resume-metadata:") != std::string::npos;
            c.told = 0;
            c.tokens = number(body, "\"max_tokens\":", DEFAULT_TOKENS);
            due.push({now_ns(), place, c.life});
        }
        if (!sent) drop(place);
        return sent;
    }

    static bool asks_for_stream(const std::string& body) {
        size_t at = body.find("\"stream\":");
        return at != std::string::npos && body.substr(at + 9, 5).find("true") != std::string::npos;
    }

    static int number(const std::string& body, std::string_view name, int missing) {
        size_t at = body.find(name);
        return at == std::string::npos ? missing : std::atoi(body.c_str() + at + name.size());
    }

    static std::string whole(std::string_view body) {
        return "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: " + std::to_string(body.size()) +
               "\r\n\r\n" + std::string(body);
    }

    static std::string answer_body() {
        return R"({"id":"chatcmpl-0123456789abcdef","object":"chat.completion","created":1700000000,"model":"mock",)"
               R"("choices":[{"index":0,"message":{"role":"assistant","content":")" + std::string(WORDS, 'x') +
               R"("},"logprobs":null,"finish_reason":"stop"}],)"
               R"("usage":{"prompt_tokens":200,"completion_tokens":100,"total_tokens":300}})";
    }

    // The next event of a stream; the last brings the end with it.
    void tell(const Due& due_now) {
        Connection& c = connections[due_now.place];
        if (c.life != due_now.life) return;
        bool first = c.told == 0, last = ++c.told >= c.tokens;
        std::string events;
        if (first && c.journaled) events += ": argosy prompt 200 0\n\n";
        events += R"(data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"mock",)"
                  R"("choices":[{"index":0,"delta":{"content":"@)" + std::to_string(now_ns()) + "@" +
                  std::string(c.tokens == 1 ? WORDS : 0, 'x') + R"("},"logprobs":null,"finish_reason":)" +
                  (last ? "\"length\"" : "null") + ",\"stop_reason\":null}]}\n\n";
        if (c.journaled) events += ": argosy 0 " + std::to_string(1000 + c.told) + (last ? " length\n\n" : "\n\n");
        if (last) events += "data: [DONE]\n\n";
        char size[24];
        std::snprintf(size, sizeof size, "%zx\r\n", events.size());
        std::string data = (first ? std::string(HEAD) : std::string()) + size + events + (last ? "\r\n0\r\n\r\n" : "\r\n");
        if (!c.outbox.send(c.fd, data)) return drop(due_now.place);
        if (!last) return due.push({due_now.at + gap_ns, due_now.place, due_now.life});
        c.streaming = false;
        while (!c.streaming && answer(due_now.place, c)) {}
    }
};

}  // namespace

int main(int count, char** given) {
    if (count != 2) return std::fputs("usage: upstream RATE\n", stderr), 2;
    Server server{.gap_ns = static_cast<int64_t>(1e9 / std::atof(given[1]))};
    int port = 0;
    server.listener = listen_anywhere(port);
    server.poll.add(server.listener, UINT64_MAX);
    std::printf("%d\n", port);
    std::fflush(stdout);
    server.run();
}
