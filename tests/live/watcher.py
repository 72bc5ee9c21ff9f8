"""A process that asks `/health` again and again until its input ends, then prints the longest time without an answer.

`python watcher.py HOST PORT`. A script of its own, so that neither the load nor the attack of the test delays it.
"""

import json
import socket
import sys
import threading
import time

EVERY_S = 0.005
TIMEOUT_S = 60.0


def main() -> None:
    address = sys.argv[1], int(sys.argv[2])
    asked = f"GET /health HTTP/1.1\r\nhost: {address[0]}:{address[1]}\r\n\r\n".encode()
    stopped = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        stopped.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    worst_s, answers = 0.0, 0
    connection: socket.socket | None = None
    while not stopped.is_set():
        began = time.monotonic()
        while time.monotonic() < began + TIMEOUT_S:
            try:
                connection = connection or socket.create_connection(address, TIMEOUT_S)
                connection.sendall(asked)
                if connection.recv(65_536).startswith(b"HTTP/1.1 200 "):
                    answers += 1
                    if answers == 1:
                        print("watching", flush=True)
                    break
            except OSError:
                pass
            connection = None  # it was closed: ask again; the time without an answer goes on
            time.sleep(EVERY_S)
        worst_s = max(worst_s, time.monotonic() - began)
        time.sleep(EVERY_S)
    print(json.dumps({"worst_s": worst_s, "answers": answers}))


if __name__ == "__main__":
    main()
