"""Fixtures that several tests share."""

import atexit
import gc
import io
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

# A hub's cache of the tests' own, before anything that reads it is imported: no test sees what a user has downloaded.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="artel-tests-hub-")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
# Triton's interpreter runs kernels on a CPU, if asked before Triton is imported. With a GPU test_gpu.py runs them.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from support.runs import DEEPSPEED  # noqa: E402

# A shell starts what runs in the background (`make test &`) with Ctrl-C ignored, and so would be all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported for all tests stays: without it a collection of garbage takes 0.03 s instead of 0.3."""
    gc.collect()
    gc.freeze()


# By default an example that takes over 0.2 s fails, or ten whose making takes over 1 s: on a busy machine any does.
# The same examples in every run: chance must not fail a change that it has nothing to do with. To search on:
# HYPOTHESIS_PROFILE=search.
quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("artel", derandomize=True, **quiet)
settings.register_profile("search", **quiet)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "artel"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real inputs beside the project; they are never copied in."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no ../shared/data with real inputs beside the project")
    return folder


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    """The working folder of every test is tmp_path: runs are written and named by relative paths, as users do."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _nothing_is_logged():
    """The handlers of `support.messages` end with their test."""
    yield
    logging.getLogger("artel").handlers.clear()
    logging.getLogger("artel").setLevel(logging.NOTSET)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """On cores that other tests share, two threads wait for one another longer than such small sums take.

    22 s instead of 3 were seen on a quiet machine, 40 instead of 1 on a busy one.
    """
    import torch  # which the process that only hands out tests need not import

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _plugins_forgotten():
    """A file of tests leaves no plugin registered: the next file in the same process may list what is registered."""
    from artel import registry

    tables = [table for table in vars(registry).values() if isinstance(table, registry.Registry)]
    before = [(dict(table._entries), dict(table._modules)) for table in tables]
    yield
    for table, (entries, modules) in zip(tables, before, strict=True):
        for name in table._modules.keys() - modules.keys():
            sys.modules.pop(table._modules[name], None)
        table._entries, table._modules = entries, modules


@pytest.fixture(scope="module")
def deepspeed_beside():
    """deepspeed can be imported.

    In a module that asks for it alone: trl takes accelerate for one that has deepspeed, wherever that can be imported.
    """
    if not DEEPSPEED.is_dir():
        pytest.skip("deepspeed is not beside the environment: see the Makefile")
    sys.path.append(str(DEEPSPEED))
    yield
    sys.path.remove(str(DEEPSPEED))
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


@pytest.fixture
def command(monkeypatch, capfd):
    """The command in this process: (exit status, standard output, standard error)."""
    from artel.cli.main import main

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["artel", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capfd.readouterr()

    return run


@pytest.fixture(scope="session")
def with_marks(tmp_path_factory) -> Path:
    """A model whose tokenizer has ChatML's marks as tokens, but no template of its own: chatml it is."""
    from support.chat_models import MARKS, learned_by_heart  # which take seconds to import

    return learned_by_heart(tmp_path_factory.mktemp("chat") / "marks", MARKS, None)


@pytest.fixture(scope="session")
def endless(tmp_path_factory) -> Path:
    """A chat model that never ends a text."""
    from support.chat_models import never_ending

    return never_ending(tmp_path_factory.mktemp("chat") / "endless")


@pytest.fixture(scope="session")
def talker(tmp_path_factory) -> Path:
    """A model that knows the conversations of support/chat_page.py by heart."""
    from support.chat_page import trained_talker

    return trained_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium, for the tests of one file."""
    from support.browser import chromium

    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def address(talker):
    """Where the chat page of `talker` is served."""
    from support.serving import server_of

    with server_of(talker) as server:
        yield server.url


@pytest.fixture
def page(browser, address):
    """The chat page as a new user sees it; at the end it has complained of nothing."""
    from support.browser import errors
    from support.chat_page import fresh

    yield fresh(browser, address)
    assert errors(browser) == []


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The folder of the site, which is built once for all its tests."""
    pytest.importorskip("zensical", reason="zensical is not installed: pip install 'artel-lm[docs]'")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
    from make_docs import make_site

    root = tmp_path_factory.mktemp("site")
    make_site(root)
    return root / "site"


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    """A user's home with nothing in it, which the commands of one process of tests share."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def served_folder(tmp_path_factory) -> Path:
    """A tiny model that writes and knows no conversations."""
    from support.serving import tiny_model

    return tiny_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def served(served_folder):
    """That model, as the server has it."""
    from support.serving import served_model

    with served_model(served_folder) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    """A client of its server."""
    from support.serving import client_of

    with client_of(served) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer():
    """A small tokenizer of bytes and a few words."""
    from artel.config import TokenizerTraining
    from artel.tokens import train_tokenizer

    return train_tokenizer(iter(["words and words, again and again. " * 50]), TokenizerTraining(vocab=270))


@pytest.fixture(scope="module")
def roberta(shared_data):
    """The tokenizer of roberta-base."""
    from artel.tokens import load_tokenizer

    return load_tokenizer(str(shared_data / "tokenizers" / "roberta-base"))


@pytest.fixture
def artel_here(monkeypatch, capfd):
    """The command in this process, which has torch already; `typed` is its standard input, which is no terminal."""
    from artel.cli.main import main

    def run(*arguments: object, typed: bytes = b"") -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
        monkeypatch.setattr(sys, "argv", ["artel", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), *capfd.readouterr())

    return run
