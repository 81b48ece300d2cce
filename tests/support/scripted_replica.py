"""Replica process for tests of launchers, quick to start: answers each HTTP request with its pid.

Arguments: a socket path, port or HOST:PORT, then what it does. With `complete` it answers POST requests with a
completion, and with `chat` chats, whole or as a stream, until it is drained. With `errors=PATH` completions are
answered with status 500 while a file of that path exists. It imports little and needs no package.

Never compared with a real replica.
"""

import fcntl
import os
import signal
import socket
import sys
import threading
import time

RESPONSE = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
COMPLETION = b"""{"id": "c", "object": "text_completion", "created": 1, "model": "chat", "choices": [
{"index": 0, "text": "yes", "finish_reason": "stop"}],
"usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}}"""

WORDS = ("one ", "two ", "three")
CHUNK = b"""data: {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "chat", "choices": [
{"index": 0, "delta": {"content": "%s"}, "finish_reason": %s}]}\n\n""".replace(b"[\n", b"[")
CHAT = b"""{"id": "c", "object": "chat.completion", "created": 1, "model": "chat", "choices": [
{"index": 0, "message": {"role": "assistant", "content": "%s"}, "finish_reason": "stop"}],
"usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}}"""
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n"


def main(address: str, *behaviours: str) -> None:
    for behaviour in behaviours:
        match behaviour.partition("="):
            case ("crash", _, status):
                print("starting", flush=True)  # noqa: T201 - output for the log
                print("cannot open the model", file=sys.stderr, flush=True)  # noqa: T201 - as above
                sys.exit(int(status))
            case ("exclusive", _, path):
                lock = os.open(path, os.O_RDWR | os.O_CREAT)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(os.open(f"{path}.doubled", os.O_CREAT))
            case ("ignore-sigterm", _, _):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            case ("allocate", _, count):
                globals()["memory"] = b"x" * int(count)
            case ("print", _, count):
                for number in range(int(count)):
                    print(f"line {number}", flush=True)  # noqa: T201 - as above
            case ("fork", _, _):
                if os.fork() == 0:
                    os.setsid()
                    while True:
                        time.sleep(60)
            case ("report", _, line):
                os.write(int(os.environ["ARGOSY_REPORT_FD"]), line.encode() + b"\n")
            case ("printenv", _, name):
                print(f"{name}={os.environ.get(name)}", flush=True)  # noqa: T201 - as above
    serve(address, behaviours)


def serve(address: str, behaviours: tuple[str, ...]) -> None:
    if address.isdigit():
        server = socket.create_server(("127.0.0.1", int(address)))
    elif address.rpartition(":")[2].isdigit():
        host, _, port = address.rpartition(":")
        server = socket.create_server((host, int(port)))
    else:
        server = socket.socket(socket.AF_UNIX)
        server.bind(address)
        server.listen()
    print("listening", flush=True)  # noqa: T201 - as above
    body = str(os.getpid()).encode()
    answer = RESPONSE % (len(body), body)
    completion = RESPONSE % (len(COMPLETION), COMPLETION) if "complete" in behaviours else answer
    if "chat" in behaviours:
        serve_chats(server, answer)
    errors = [each.partition("=")[2] for each in behaviours if each.startswith("errors=")]
    failure = answer.replace(b"200 OK", b"500 Internal Server Error", 1)
    while True:
        client, _ = server.accept()
        with client:
            try:
                request = client.recv(65536)
                is_post = request.startswith(b"POST")
                fails = is_post and any(os.path.exists(path) for path in errors)  # noqa: PTH110 - imports little
                client.sendall(failure if fails else completion if is_post else answer)
                client.shutdown(socket.SHUT_WR)
                while client.recv(65536):
                    pass  # with a rest unread, the answer might be lost
            except OSError:
                pass  # the client has left


def serve_chats(server: socket.socket, answer: bytes) -> None:
    """Serve each connection in a thread. SIGTERM ends this process after the running responses."""

    def drain(*_: object) -> None:
        server.close()
        raise SystemExit

    signal.signal(signal.SIGTERM, drain)
    while True:
        client, _ = server.accept()
        threading.Thread(target=serve_chat, args=(client, answer)).start()


def serve_chat(client: socket.socket, answer: bytes) -> None:
    with client:
        try:
            request = client.recv(65536)
            body = request.partition(b"\r\n\r\n")[2]
            if request.startswith(b"POST") and not body:
                body = client.recv(65536)
            if not request.startswith(b"POST"):
                client.sendall(answer)
            elif b'"stream":true' in body.replace(b" ", b""):
                client.sendall(STREAM_HEAD)
                for word in WORDS:
                    end = b'"stop"' if word == WORDS[-1] else b"null"
                    client.sendall(CHUNK % (word.encode(), end))
                    time.sleep(0.2)  # a stream that lasts while processes are replaced
                client.sendall(b"data: [DONE]\n\n")
            else:
                chat = CHAT % "".join(WORDS).encode()
                client.sendall(RESPONSE % (len(chat), chat))
            client.shutdown(socket.SHUT_WR)
            while client.recv(65536):
                pass
        except OSError:
            pass


main(*sys.argv[1:])
