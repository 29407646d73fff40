"""How many answers the engine should compute at once: rate and wait for the first token, by seconds of the processor.

    python benchmarks/answers_at_once.py FOLDER --clients 16 50 --at-once 64 16 64 16

The engine alone, on one thread: each client asks again as soon as it is answered. After a round of all clients, one
more is measured. Seconds are the processor's, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import time
from dataclasses import dataclass, field

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from artel.inference import OpenedModel, open_model
from artel.inference.engine.base import Generation
from artel.inference.engine.make import make_engine
from artel.models.sampler import Sampler, SamplingOptions, Token

TOPICS = "the sea, bread, a river, winter, Paris, a clock, horses, iron, music, the moon, a garden, tea".split(", ")
TOKENS = 32
CONTEXT = 2048


@dataclass
class Client:
    """Asks, and notes when it was answered."""

    number: int
    turn: int = 0
    began: float = 0.0
    first: float | None = None
    tokens: int = 0
    waits: list[float] = field(default_factory=list)

    def prompt(self, opened: OpenedModel) -> list[int]:
        topic = TOPICS[(self.number + self.turn) % len(TOPICS)]
        text = f"Write a few lines about {topic}. {'Be exact. ' * (self.number % 5)}"
        messages = [{"role": "user", "content": text}]
        written = opened.tokenizer.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return next(opened.tokenizer.encode_with_offsets([written], control=True)).ids


def measure(opened: OpenedModel, clients: int, at_once: int) -> str:
    """A row: the second round of all clients."""
    engine = make_engine(opened.model, opened.tokenizer, at_once, CONTEXT)
    done: queue.Queue[Client] = queue.Queue()

    def ask(client: Client) -> None:
        ids = client.prompt(opened)
        client.turn, client.first, client.began = client.turn + 1, None, time.process_time()

        def deliver(item: Token | Exception | None) -> None:
            if isinstance(item, Exception):
                raise SystemExit(str(item))
            if item is None:
                done.put(client)
                return
            client.tokens += 1
            if client.first is None:
                client.first = time.process_time()
                client.waits.append(client.first - client.began)

        sampler = Sampler(SamplingOptions(temperature=0), ids, opened.tokenizer.vocabulary)
        engine.submit(ids, Generation(sampler, TOKENS, frozenset(), deliver))

    asking = [Client(number) for number in range(clients)]
    for client in asking:
        ask(client)
    for _ in asking:
        ask(done.get())
    began, written = time.process_time(), sum(client.tokens for client in asking)
    for _ in asking:
        done.get()
    rate = (sum(client.tokens for client in asking) - written) / (time.process_time() - began)
    waits = sorted(client.waits[1] for client in asking)
    engine.close()
    late = waits[int(0.95 * len(waits))]
    return f"| {clients} | {at_once} | {rate:.1f} | {statistics.median(waits):.2f} | {late:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 50])
    parser.add_argument("--at-once", type=int, nargs="+", default=[64, 16, 64, 16])
    options = parser.parse_args()
    torch.set_num_threads(1)
    opened = open_model(options.folder)
    print("| clients | at once | tokens/s of the processor | first token, median, s | 95 % |\n|---|---|---|---|---|")
    for clients in options.clients:
        for at_once in options.at_once:
            print(measure(opened, clients, at_once), flush=True)


if __name__ == "__main__":
    main()
