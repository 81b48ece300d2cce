"""Handle on one engine core process: start, messages, signals and exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable

import msgspec
import zmq

from argosy.engine.serving.core_messages import FromCore, ToCore
from argosy.engine.serving.engine_core.core_process import CoreLaunchSpec
from argosy.engine.serving.engine_core.core_start import start_core_process
from argosy.process import create_socket_folder

FINAL_MESSAGE_WAIT_S = 0.1
"""Wait after the process exits for its last messages to arrive."""

MessageCallback = Callable[[FromCore], None]


class CoreHandle:
    """A running core process.

    Not thread-safe: use it from the event loop that created it. The sockets live in a private directory, which is
    removed once both sockets are connected.
    """

    def __init__(
        self,
        spec: CoreLaunchSpec,
        *,
        on_message: MessageCallback,
        on_exit: Callable[[int], None],
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """Start the process and send it its launch spec with the addresses of this handle's sockets.

        Calls `on_message` with each message. Calls `on_exit` once after the last message with the exit status (negative
        if a signal ended the process). If `process` is given, it must already run the same core factory.

        Raises:
            OSError: The process cannot be started.
        """
        self._message_callback = on_message
        self._exit_callback = on_exit
        self._loop = asyncio.get_running_loop()
        self._decode = msgspec.msgpack.Decoder(FromCore).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._directory = create_socket_folder("argosy-", len("beats"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._message_socket = self._bind(zmq.DEALER, "core")
        self._heartbeat_socket = self._bind(zmq.PULL, "beats")
        self._unconnected_sockets = {self._message_socket, self._heartbeat_socket}
        self._process = process or start_core_process(spec.core_factory)
        spec = msgspec.structs.replace(
            spec,
            message_address=self._address("core"),
            heartbeat_address=self._address("beats"),
        )
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        with self._process.stdin as stdin:
            stdin.write(msgspec.json.encode(spec))
        for socket in (self._message_socket, self._heartbeat_socket):
            self._loop.add_reader(socket.fileno(), self._receive_from, socket)
        threading.Thread(target=self._wait_for_exit, name=f"core-{self.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._process.pid

    def send(self, message: ToCore) -> None:
        """Queue a message without blocking. The message is dropped if the process has exited."""
        if self._message_socket.closed:
            return
        with contextlib.suppress(zmq.Again):  # no process at the other end; `on_exit` will follow
            self._message_socket.send(self._encode(message), zmq.NOBLOCK)
        # Sending may consume the file descriptor's edge trigger for messages that arrived meanwhile.
        self._loop.call_soon(self._receive_from, self._message_socket)

    def receive_pending(self) -> None:
        """Deliver the messages that have already arrived."""
        for socket in (self._message_socket, self._heartbeat_socket):
            self._receive_from(socket)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group if the process still runs."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:
                os.killpg(self.pid, number)

    def _address(self, name: str) -> str:
        return f"ipc://{self._directory / name}"

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)  # bounded by the number of running requests
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(self._address(name))
        return socket

    def _receive_from(self, socket: zmq.Socket[bytes]) -> None:
        while not socket.closed and socket.poll(0, zmq.POLLIN):
            message = self._decode(socket.recv(zmq.NOBLOCK))
            self._on_connected(socket)
            self._message_callback(message)

    def _on_connected(self, socket: zmq.Socket[bytes]) -> None:
        if socket in self._unconnected_sockets:
            self._unconnected_sockets.discard(socket)
            if not self._unconnected_sockets:
                self._remove_directory()

    def _wait_for_exit(self) -> None:
        self._process.wait()
        try:
            self._loop.call_soon_threadsafe(
                self._loop.call_later, FINAL_MESSAGE_WAIT_S, self._on_exited
            )
        except RuntimeError:  # the event loop is closed, so no callback can run
            self._remove_directory()

    def _on_exited(self) -> None:
        self.receive_pending()
        for socket in (self._message_socket, self._heartbeat_socket):
            self._loop.remove_reader(socket.fileno())
            socket.close()
        self._context.term()
        self._remove_directory()
        self._exit_callback(self._process.returncode)

    def _remove_directory(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
