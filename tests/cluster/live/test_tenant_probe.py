"""A tenant that guesses another's prompts, over real engines: no guess hits, and what is computed for a guess does not
depend on what others have cached. With a shared namespace the same guesses hit.
"""

import contextlib

import httpx
import pytest

from kvrelay.cluster.launch.local import local_cluster
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.serve.api.app import ModelCard, create_app
from kvrelay.serve.tenants.access import Access
from kvrelay.serve.text.tokenizer import Tokenizer
from tests.fakes import OwnSessions
from tests.serve.tenants.test_access import OPERATOR, written

pytestmark = pytest.mark.alone

NUM_GUESSES = 1000
SECRETS = [
    f"{number:02d} is the vault, and its code is {7919 * number % 10007:05d}; never say it. " for number in range(20)
]
SALT = "salt of a"
SESSION = "/v1/kv/sessions/notes"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


class Tenants:
    """A cluster of one worker, and clients with the keys of a and b."""

    def __init__(self, client, worker):
        self._client, self._worker = client, worker

    async def ask(self, name, prompt, **body):
        """Cached tokens of a completion."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, **body}
        answer = await self._client.post("/v1/completions", json=body, headers=self._key(name))
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def prefetch(self, name, prompt, **body):
        """Tokens that a prefetch finds anywhere."""
        answer = await self._client.post("/v1/kv/prefetch", json={"prompt": prompt, **body}, headers=self._key(name))
        found = answer.json()
        return found["prompt_tokens"] - found["missing_tokens"]

    async def session(self, name, method="GET", **headers):
        """The status."""
        body = {"json": {"pin_s": 60}} if method == "PUT" else {}
        return (await self._client.request(method, SESSION, headers=self._key(name) | headers, **body)).status_code

    async def computed(self, name, prompt, **body):
        """Prompt tokens that the engine computes for this request: what its time to first token follows from."""
        before = await self._queried()
        await self.ask(name, prompt, **body)
        queried, hit = (now - then for now, then in zip(await self._queried(), before, strict=True))
        return queried - hit

    async def _queried(self):
        load = await self._worker.thread.call(lambda engine: engine.reports.load())
        return load.prefix_query_tokens, load.prefix_hit_tokens

    @staticmethod
    def _key(name):
        return {"authorization": f"Bearer key of {name}"}


@contextlib.asynccontextmanager
async def tenants(folder, tmp_path, **shared):
    """Tenants a and b; `shared`: of both."""
    settings = settings_from(
        {
            "model": {"dtype": "float32", "max_model_len": 512},
            "engine": {"kv_memory": "32MiB", "num_threads": 1, "backend": "reference", "block_size": 16},
            "cache": {"host_memory": "8MiB", "disk_path": str(tmp_path / "kv"), "disk_size": "64MiB"},
            "serve": {"api_key": OPERATOR, "api_keys_file": written(tmp_path / "keys.yaml", a=shared, b=shared)},
        }
    )
    async with local_cluster(settings, folder, num_prefill=0, num_inside=1) as cluster:
        access = Access(settings.serve.api_key, settings.serve.api_keys_file, cluster.secret)
        sessions, card = OwnSessions(cluster.dispatcher.clock), ModelCard("tiny", 512, 0)
        app = create_app(cluster.dispatcher, Tokenizer(folder), settings, card, sessions, access)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            yield Tenants(client, cluster.inside[0])


async def filled(one):
    """Tenant a has asked all its secrets, with and without a salt."""
    for prompt in SECRETS:
        for salt in (None, SALT):
            await one.ask("a", prompt, cache_salt=salt)
            assert await one.ask("a", prompt, cache_salt=salt) > 0


def guess(number):
    """(prompt, salt): every tenth is one of a's own prompts, half of these with its salt."""
    prompt = SECRETS[number // 10 % len(SECRETS)] if number % 10 == 0 else SECRETS[0][:-20] + f"{number:020d}"
    return prompt, SALT if number % 20 == 0 else None


async def found_by(ask):
    """What tenant b finds with each of its guesses, asked one after the other."""
    found = []
    for prompt, salt in map(guess, range(NUM_GUESSES)):
        found.append(await ask("b", prompt, cache_salt=salt))
    return found


@pytest.mark.slow
async def test_a_thousand_guesses_find_what_they_find_where_the_other_has_cached_nothing(folder, tmp_path):
    """A prefetch finds nothing; completions find what b itself has asked before, and no token more."""
    async with tenants(folder, tmp_path) as one:
        await filled(one)
        assert await found_by(one.prefetch) == [0] * NUM_GUESSES
        found = await found_by(one.ask)
    async with tenants(folder, tmp_path) as alone:
        assert await found_by(alone.ask) == found
    assert found[0] == 0 and guess(0)[0] in SECRETS  # the first one is exact


async def test_sessions_of_another_are_not_there(folder, tmp_path):
    async with tenants(folder, tmp_path) as one:
        assert await one.session("a", "PUT", **{"x-kvrelay-cache-salt": SALT}) == 200
        for method in ("GET", "DELETE"):
            for headers in ({}, {"x-kvrelay-cache-salt": SALT}):
                assert await one.session("b", method, **headers) == 404
        assert await one.session("a", **{"x-kvrelay-cache-salt": SALT}) == 200


async def test_the_engine_computes_as_much_for_a_right_guess_as_for_a_wrong_one(folder, tmp_path):
    """What a time to first token follows from."""
    async with tenants(folder, tmp_path) as one:
        await filled(one)
        for number, prompt in enumerate(SECRETS):
            wrong = f"{number + 20:02d}" + prompt[2:]  # of the same length; it is cached nowhere
            right = await one.computed("b", prompt, cache_salt=SALT)
            assert right == await one.computed("b", wrong, cache_salt=SALT)
            assert await one.computed("a", prompt, cache_salt=SALT) < right  # control: its owner saves that


async def test_in_the_shared_namespace_the_same_guesses_hit(folder, tmp_path):
    async with tenants(folder, tmp_path, shared=True) as one:
        await filled(one)
        for salt in (None, SALT):
            assert await one.prefetch("b", SECRETS[0], cache_salt=salt) > 0
            assert await one.ask("b", SECRETS[0], cache_salt=salt) > 0
        assert await one.computed("b", SECRETS[1]) < await one.computed("b", "99" + SECRETS[1][2:])
        assert await one.session("a", "PUT") == await one.session("b") == 200
