// What load.cpp and upstream.cpp share: a clock, sockets that do not block, an epoll loop, a buffer to write from.
#pragma once

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <string_view>

inline int64_t now_ns() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1'000'000'000LL + at.tv_nsec;
}

[[noreturn]] inline void die(const char* what) {
    std::perror(what);
    std::exit(1);
}

inline sockaddr_in loopback(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

inline void no_delay(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// A socket that connects to a port of this machine, or is about to.
inline int connect_to(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (fd < 0) die("socket");
    no_delay(fd);
    sockaddr_in address = loopback(port);
    if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) && errno != EINPROGRESS) die("connect");
    return fd;
}

// A socket that listens on a free port of this machine.
inline int listen_anywhere(int& port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    sockaddr_in address = loopback(0);
    socklen_t size = sizeof address;
    if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(&address), size) || listen(fd, 4096)) die("listen");
    getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
    port = ntohs(address.sin_port);
    return fd;
}

struct Poll {
    static constexpr int MOST = 512;
    int fd = epoll_create1(0);
    epoll_event events[MOST];

    void add(int socket, uint64_t tag) {
        epoll_event event{EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, {.u64 = tag}};
        if (epoll_ctl(fd, EPOLL_CTL_ADD, socket, &event)) die("epoll_ctl");
    }

    // Events until `until`, at least those that are there; -1 waits for ever.
    int wait(int64_t until) {
        int64_t left = until < 0 ? 0 : until - now_ns();
        if (left < 0) left = 0;
        timespec most{left / 1'000'000'000, left % 1'000'000'000};
        int count = epoll_pwait2(fd, events, MOST, until < 0 ? nullptr : &most, nullptr);
        if (count < 0 && errno != EINTR) die("epoll_pwait2");
        return count < 0 ? 0 : count;
    }
};

// What waits to be sent.
struct Outbox {
    std::string waiting;

    // Send, or keep what the socket does not take; false when the peer is gone.
    bool send(int fd, std::string_view data) {
        if (waiting.empty()) {
            ssize_t sent = ::send(fd, data.data(), data.size(), MSG_NOSIGNAL);
            if (sent < 0 && errno != EAGAIN && errno != ENOTCONN) return false;
            data.remove_prefix(sent < 0 ? 0 : static_cast<size_t>(sent));
        }
        waiting.append(data);
        return true;
    }

    // The socket takes more.
    bool flush(int fd) {
        if (waiting.empty()) return true;
        std::string data = std::move(waiting);
        waiting.clear();
        return send(fd, data);
    }
};
