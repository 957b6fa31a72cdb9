"""An OpenAI-compatible server in this process, for tests of the evaluations.

It counts what it was asked and answers what it is told to; ``hold_after`` requests it
answers no more until it closes, and sets ``held`` when ``hold`` more wait, so that a client
can be killed at a known moment.
"""

from __future__ import annotations

import email
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeOpenAI:
    """``answer(asked)`` gives the text, where ``asked`` is the question's text or the file's
    name; an int is an HTTP error, a pair a content type and a body to send as they are. Use
    it in a ``with``."""

    def __init__(
        self,
        answer: Callable[[str], str | int | tuple[str, str]],
        models: tuple[str, ...] = ("fake",),
        version: str | None = None,
        hold_after: int | None = None,
        hold: int = 1,
    ) -> None:
        self.answer, self.version, self.hold_after = answer, version, hold_after
        self.hold = hold
        self.body: object = {"data": [{"id": name} for name in models]}  # of /v1/models
        self.asked: list[str] = []
        self.forms: list[dict[str, str]] = []
        self.most_at_once = self.at_once = 0
        self.lock = threading.Lock()
        self.held = threading.Event()
        self.closing = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    self.reply(fake.body)
                elif self.path == "/server_info" and fake.version:
                    self.reply({"version": fake.version})
                else:
                    self.reply({"error": "no such page"}, 404)

            def do_POST(self) -> None:
                fake.serve(self)

            def reply(self, body: object, code: int = 200) -> None:
                self.send(code, "application/json", json.dumps(body).encode())

            def send(self, code: int, kind: str, data: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> FakeOpenAI:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()

    def serve(self, handler) -> None:
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        if handler.path == "/v1/chat/completions":
            form = json.loads(body)
            asked = form["messages"][0]["content"][1]["text"]
        else:
            form = parse_form(handler.headers["Content-Type"], body)
            asked = form["file"]
        with self.lock:
            self.asked.append(asked)
            self.forms.append(form)
            number = len(self.asked)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        if self.hold_after is not None and number > self.hold_after:
            if number == self.hold_after + self.hold:
                self.held.set()
            self.closing.wait(60)
            return
        answer = self.answer(asked)
        with self.lock:
            self.at_once -= 1
        if isinstance(answer, int):
            handler.reply({"error": {"message": f"refused: {asked[:40]}"}}, answer)
        elif isinstance(answer, tuple):
            handler.send(200, answer[0], answer[1].encode())
        elif handler.path == "/v1/chat/completions":
            usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
            choice = {"index": 0, "message": {"role": "assistant", "content": answer}}
            handler.reply({"choices": [choice], "usage": usage, "model": "fake"})
        else:
            handler.reply({"text": f" {answer}", "usage": {"type": "duration", "seconds": 1}})


def parse_form(kind: str, body: bytes) -> dict[str, str]:
    """The fields of a multipart form; a file's is its name."""
    message = email.message_from_bytes(f"Content-Type: {kind}\r\n\r\n".encode() + body)
    out = {}
    for part in message.get_payload():
        name = part.get_param("name", header="content-disposition")
        out[name] = part.get_filename() or part.get_payload()
    return out
