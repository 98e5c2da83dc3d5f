"""The rows about speculation hold on a tiny model, over the hop, and the control can fail."""

from types import SimpleNamespace

import pytest

from kvrelay.cluster.verify.oracle import Verifier
from kvrelay.cluster.verify.rows import Row
from kvrelay.cluster.verify.speculation import SpeculationRows, repeating_prompts
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.plane.messages import LoadReport

CASES = [SimpleNamespace(name="long", token_ids=[7 * i % 97 + 3 for i in range(200)])]


@pytest.mark.slow
async def test_text_that_repeats_gets_hugging_faces_tokens(tmp_path):
    verifier = Verifier(tiny_checkpoint("llama", tmp_path / "llama"), max_model_len=160, num_output=24, progress=print)
    await verifier.run_speculation("shm")
    assert [(row.name, row.note) for row in verifier.report.rows if not row.ok] == []
    assert [row.name for row in verifier.report.rows] == [
        f"{kind}{what}" for kind in ("speculation", "draft model")
        for what in (" over the hop", " on one worker", ": drafts that are believed change the answers")
    ]  # fmt: skip


def test_prompts_repeat_themselves_and_are_no_longer_than_may_be():
    for prompt, period in zip(repeating_prompts(CASES, 50), (1, 3, 7, 20), strict=True):
        assert len(prompt.token_ids) == 50 and prompt.token_ids[period:] == prompt.token_ids[:-period]


class Served:
    """A verifier and a decode worker, whose every draft comes to these counts; believed ones give `answer`."""

    def __init__(self, *, drafted=9, accepted=4, answer=(8, 9)):
        self.cases, self.rows, self.sums, self.answer = CASES, [], [0, 0], list(answer)
        self._counts = drafted, accepted
        speculation = SimpleNamespace(begins=self.plainly, lengths=self.plainly, most=3)
        self.engine = SimpleNamespace(
            drafts=SimpleNamespace(speculation=speculation, by_model=None, model=None), take_drafted=self.plainly
        )
        self.thread = SimpleNamespace(engine=self.engine, call=self.call)

    def plainly(self, *_):
        """Never called."""

    async def call(self, action):
        report = LoadReport(seq=1, drafted_tokens=self.sums[0], accepted_tokens=self.sums[1])
        return action(SimpleNamespace(load=lambda: report))

    def add_row(self, name):
        self.rows.append(Row(name))
        return self.rows[-1]

    async def tokens_of(self, cluster, case, force):
        speculation = self.engine.drafts.speculation
        assert speculation.begins(4) and speculation.lengths(4, [None] * 2) == [3, 3]
        self.sums = [old + new for old, new in zip(self.sums, self._counts, strict=True)]
        return ([5, 6] if self.engine.take_drafted == self.plainly else self.answer), 0


@pytest.mark.parametrize(
    ("served", "holds"),
    [
        (Served(), [True, True, True]),
        (Served(accepted=0), [False, False, True]),
        (Served(drafted=0, accepted=0), [False, False, True]),
        (Served(answer=[5, 6]), [True, True, False]),
    ],
    ids=["all is well", "none was right", "none drafted", "the control goes unnoticed"],
)
async def test_a_row_fails_where_nothing_was_drafted_or_the_control_goes_unnoticed(served, holds, tmp_path):
    await SpeculationRows(served, tmp_path, "shm", 150, 2).check(None, served, [[5, 6]] * 4)
    assert [row.ok for row in served.rows] == holds
    speculation = served.engine.drafts.speculation
    assert served.engine.take_drafted == served.plainly == speculation.lengths == speculation.begins


async def test_a_wrong_answer_fails_its_row(tmp_path):
    served = Served()
    await SpeculationRows(served, tmp_path, "shm", 150, 2).check(None, served, [[5, 6]] * 3 + [[5, 7]])
    assert [row.ok for row in served.rows] == [False, False, True]
