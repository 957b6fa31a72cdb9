"""A stand-in for ``python -m sglang.launch_server``, for tests of the harness itself.

``fake_server.py MODE [--host H --port P ...]``: ``ok`` serves; ``dies`` prints what a dying
scheduler prints and exits; ``dies-later`` does so at the first request; ``stubborn``
serves and ignores SIGTERM; ``hangs`` is ready and answers no request; ``mute`` runs and
never answers; ``taken`` does so after it found its port taken. All but ``dies`` start a child
first and write its id to ``$FAKE_CHILD``. ``$FAKE_ANSWERS`` is a JSON object: ``tokens``,
``logprobs`` and ``text`` per audio file (by its bytes' SHA-256), ``free`` (of the pool),
``seconds`` that an answer to an audio file takes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DEATH = """\
[2026-01-01 00:00:00] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/sglang/srt/managers/scheduler.py", line 6368, in run_scheduler_process
    scheduler.run_event_loop()
sgl_kernel._errors.StrictnessError: Unsupported page size for prefill attention: 1

[2026-01-01 00:00:00] SIGQUIT received. signum=None, frame=None.
"""


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


class Handler(BaseHTTPRequestHandler):
    answers = json.loads(os.environ.get("FAKE_ANSWERS", "{}"))

    def log_message(self, *args: object) -> None:
        pass

    def reply(self, body: object, code: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        pool = int(option("--max-total-tokens"))
        load = {
            "timestamp": time.time(),
            "num_running_reqs": 0,
            "num_waiting_reqs": 0,
            "max_total_num_tokens": pool,
            "num_used_tokens": pool - self.answers.get("free", pool),
        }
        self.reply({"loads": [load]} if self.path.startswith("/v1/loads") else {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if sys.argv[1] == "dies-later":
            print(DEATH, flush=True)
            os._exit(1)
        if sys.argv[1] == "hangs":
            print("a request", flush=True)
            time.sleep(600)
        if self.path == "/v1/audio/transcriptions":
            start = body.index(b"RIFF")
            size = 8 + int.from_bytes(body[start + 4 : start + 8], "little")
            self.reply({"text": " " + self.known(body[start : start + size])["text"]})
            return
        asked = json.loads(body)
        audio = asked.get("audio_data")
        if audio is None:
            answer = {"tokens": [5, 6], "logprobs": [-1.0, -2.0], "text": "ok"}
        else:
            answer = self.known(base64.b64decode(audio.split(",")[1]))
            time.sleep(self.answers.get("seconds", 0))
        logprobs = [[p, t, None] for p, t in zip(answer["logprobs"], answer["tokens"])]  # noqa: B905
        meta = {"prompt_tokens": 4, "output_token_logprobs": logprobs}
        self.reply({"output_ids": answer["tokens"], "text": answer["text"], "meta_info": meta})

    def known(self, audio: bytes) -> dict:
        return self.answers[hashlib.sha256(audio).hexdigest()]


def main() -> None:
    mode = sys.argv[1]
    if mode == "dies":
        print(DEATH, flush=True)
        sys.exit(1)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if path := os.environ.get("FAKE_CHILD"):
        with open(path, "w") as f:
            f.write(str(child.pid))
    if mode == "taken":
        print("ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 1)")
        sys.stdout.flush()
    if mode in ("mute", "taken"):
        time.sleep(600)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ThreadingHTTPServer((option("--host"), int(option("--port"))), Handler).serve_forever()


if __name__ == "__main__":
    main()
