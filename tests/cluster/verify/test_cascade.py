"""The rows about cascade attention hold on a tiny model, over the hop, and each can fail."""

from types import SimpleNamespace

import pytest

from kvrelay.cluster.verify.cascade import CascadeRows, shared_prompts, unlike_prompts
from kvrelay.cluster.verify.oracle import Verifier
from kvrelay.cluster.verify.rows import Row
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.kernels.cpu.backend import CpuBackend
from kvrelay.plane.messages import LoadReport

CASES = [SimpleNamespace(name="long", token_ids=[7 * i % 97 + 3 for i in range(200)])]


@pytest.mark.slow
async def test_requests_that_share_a_prefix_get_hugging_faces_tokens(tmp_path):
    verifier = Verifier(tiny_checkpoint("llama", tmp_path / "llama"), max_model_len=160, num_output=12, progress=print)
    await verifier.run_cascade("shm")
    assert [(row.name, row.note) for row in verifier.report.rows if not row.ok] == []
    assert len(verifier.report.rows) == (3 if CpuBackend(1).native is not None else 2)


def test_prompts_share_whole_blocks_and_no_more_or_nothing():
    first, *others = shared_prompts(CASES, 150)
    length = len(first.token_ids) - 1
    assert length % 16 == 0 and all(prompt.token_ids[:length] == first.token_ids[:length] for prompt in others)
    assert len({tuple(prompt.token_ids[length:]) for prompt in others}) == len(others)
    assert max(len(prompt.token_ids) for prompt in others) <= 150
    unlike = unlike_prompts(CASES, 150)
    assert len({tuple(prompt.token_ids[:16]) for prompt in unlike}) == len(unlike)


class Served:
    """A verifier and a decode worker: every answer is the expected one, of which each spares `spared` tokens."""

    def __init__(self, *, shared, unlike, believed, answer=(5, 6)):
        self.cases, self.rows, self.spared, self.answer = CASES, [], 0, list(answer)
        self._costs = {"shared": shared, "unlike": unlike, "believed": believed}
        native = SimpleNamespace(share=self.share)
        backend = SimpleNamespace(name="cpu", native=native, shares_prefixes=lambda shape: True)
        self.thread = SimpleNamespace(
            engine=SimpleNamespace(backend=backend, model=SimpleNamespace(attention_shape=None)), call=self.call
        )
        self._native = native

    def share(self, schedule, batch, shape):
        """Never called."""

    async def call(self, action):
        return action(SimpleNamespace(load=lambda: LoadReport(seq=1, cascade_saved_tokens=self.spared)))

    def add_row(self, name):
        self.rows.append(Row(name))
        return self.rows[-1]

    async def tokens_of(self, cluster, case, force):
        believed = self._native.share != self.share
        self.spared += self._costs["believed" if believed else case.name.split()[0].replace("the", "shared")]
        return (self.answer if believed else [5, 6]), 0


@pytest.mark.parametrize(
    "served, holds",
    [(Served(shared=9, unlike=0, believed=9, answer=[8, 9]), [True, True, True]),
     (Served(shared=0, unlike=0, believed=9, answer=[8, 9]), [False, True, True]),
     (Served(shared=9, unlike=1, believed=9, answer=[8, 9]), [True, False, True]),
     (Served(shared=9, unlike=0, believed=9), [True, True, False]),
     (Served(shared=9, unlike=0, believed=0, answer=[8, 9]), [True, True, False])],
)  # fmt: skip
async def test_a_row_fails_where_nothing_was_spared_or_the_control_goes_unnoticed(served, holds, tmp_path):
    rows = CascadeRows(served, tmp_path, "shm", 150, 2)
    await rows.check(None, served, [[5, 6]] * 11)
    assert [row.ok for row in served.rows] == holds


async def test_a_wrong_answer_fails_its_row(tmp_path):
    served = Served(shared=9, unlike=0, believed=9, answer=[8, 9])
    await CascadeRows(served, tmp_path, "shm", 150, 2).check(None, served, [[5, 6]] * 6 + [[5, 7]] + [[5, 6]] * 4)
    assert [row.ok for row in served.rows] == [False, True, True]
