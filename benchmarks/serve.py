"""`artel serve` beside `transformers serve`, on one machine and one model.

    python benchmarks/serve.py FOLDER --out benchmarks/serve.md

Each client asks again as soon as it is answered, by OpenAI's client, streaming; servers take turns. For each server and
number of clients: tokens a second of all clients, tokens for each second of the processor that the server had (which
other work on the machine changes less), the median and the 5th percentile of the rate of an answer (its tokens after
the first over the seconds from the first to the last), the median and the 95th percentile of the time to the first
token, what was answered and what was not, and the most memory that the server had.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import openai
import psutil

TOPICS = "the sea, bread, a river, winter, Paris, a clock, horses, iron, music, the moon, a garden, tea".split(", ")
TOKENS = 48
COLUMNS = (
    *("server", "clients", "tokens/s", "tokens/s of the processor", "tokens/s of an answer, median", "5 %"),
    *("first token, median, s", "95 %", "requests", "memory, GiB"),
)


@dataclass
class Figures:
    """What the clients of one server saw."""

    seconds: float = 0.0
    tokens: int = 0
    processor: float = 0.0
    """Seconds that the server had of it."""
    first: list[float] = field(default_factory=list)
    """Seconds to the first token of each answer."""
    rates: list[float] = field(default_factory=list)
    """Tokens a second of each answer, by those that came in the time that is measured."""
    statuses: Counter[str] = field(default_factory=Counter)

    def row(self, server: str, clients: int, memory: float) -> str:
        statuses = ", ".join(f"{count} {status}" for status, count in sorted(self.statuses.items()))
        total, per_second = self.tokens / self.seconds, self.tokens / self.processor
        answer = f"{median(self.rates):,.1f} | {percentile(self.rates, 0.05):,.1f}"
        first = f"{median(self.first):.2f} | {percentile(self.first, 0.95):.2f}"
        figures = f"{total:,.1f} | {per_second:,.1f} | {answer} | {first} | {statuses} | {memory:.2f}"
        return f"| {server} | {clients} | {figures} |"


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


async def client(api: openai.AsyncOpenAI, model: str, number: int, end: float, figures: Figures) -> None:
    turn = 0
    while time.perf_counter() < end:
        topic = TOPICS[(number + turn) % len(TOPICS)]
        turn += 1
        messages = [{"role": "user", "content": f"Write a few lines about {topic}. {'Be exact. ' * (number % 5)}"}]
        began = time.perf_counter()
        seen: list[float] = []  # when each token came
        try:
            stream = await api.chat.completions.create(
                model=model, messages=messages, max_tokens=TOKENS, temperature=0, stream=True
            )
            async for part in stream:
                if part.choices and part.choices[0].delta.content:
                    seen.append(time.perf_counter())
                    if len(seen) == 1:
                        figures.first.append(seen[0] - began)
                    figures.tokens += seen[-1] < end
            figures.rates += rate_of([moment for moment in seen if moment < end])
            figures.statuses["answered" if seen else "empty"] += 1
        except openai.APIStatusError as error:
            figures.statuses[str(error.status_code)] += 1
        except openai.APIError as error:
            figures.statuses[type(error).__name__] += 1


def rate_of(moments: list[float]) -> list[float]:
    """The rate of an answer whose tokens came at these moments; none of one that was too short."""
    if len(moments) < 2 or moments[-1] == moments[0]:
        return []
    return [(len(moments) - 1) / (moments[-1] - moments[0])]


async def load(url: str, model: str, clients: int, seconds: float, process: subprocess.Popen) -> Figures:
    """What so many clients see in so many seconds; what is being answered then is waited for, and not counted."""
    figures, server = Figures(seconds), psutil.Process(process.pid)

    async def count_processor() -> None:
        before = server.cpu_times()
        await asyncio.sleep(seconds)
        after = server.cpu_times()
        figures.processor = after.user + after.system - before.user - before.system

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=600) as api:
        end = time.perf_counter() + seconds
        asking = (client(api, model, number, end, figures) for number in range(clients))
        await asyncio.gather(count_processor(), *asking)
    return figures


@contextmanager
def server(command: list[str], port: int) -> Iterator[subprocess.Popen]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                break
            except OSError:
                time.sleep(0.2)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def peak_gib(process: subprocess.Popen) -> float:
    """The most that the server had resident so far."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 50])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--servers", nargs="+", default=["artel", "transformers", "transformers, batching"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of transformers; artel takes a GPU")
    parser.add_argument("--llama-cpp", nargs=2, metavar=("LLAMA_SERVER", "GGUF"), help="the server 'llama.cpp'")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    folder = str(Path(options.folder).resolve())
    scripts = Path(sys.executable).parent
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    hf = [str(scripts / "transformers"), "serve", folder, "--host", "127.0.0.1"]
    hf += ["--device", options.device, "--dtype", dtype]
    sized = ["--continuous-batching", "--cb-num-blocks", "256", "--cb-block-size", "32", "--cb-max-batch-tokens", "512"]
    commands = {
        "artel": ([sys.executable, "-m", "artel", "serve", folder], Path(folder).name),
        "transformers": (hf, folder),
        "transformers, batching": ([*hf, *sized], folder),
    }
    if options.llama_cpp:
        program, gguf = options.llama_cpp
        slots = str(max(options.clients))
        context = str(max(options.clients) * 512)  # of all slots; a conversation here has some 100 tokens
        commands["llama.cpp"] = ([program, "--model", gguf, "--parallel", slots, "--ctx-size", context], "model")
    rows = []
    for _ in range(options.rounds):
        for name in options.servers:
            command, model = commands[name]
            port = free_port()
            with server([*command, "--port", str(port)], port) as process:
                url = f"http://127.0.0.1:{port}"
                asyncio.run(load(url, model, 1, 5, process))  # what is made at the first request is not measured
                for clients in options.clients:
                    figures = asyncio.run(load(url, model, clients, options.seconds, process))
                    rows.append(figures.row(name, clients, peak_gib(process)))
                    print(rows[-1], flush=True)
    if options.out:
        head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        options.out.write_text("\n".join([*head, *rows]) + "\n")


if __name__ == "__main__":
    main()
