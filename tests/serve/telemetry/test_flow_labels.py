"""The figures that /ui writes on KV flows, drawn by Chromium: each on its own curve alone, none on another figure."""

from pathlib import Path

import pytest

from tests.browser import page

pytestmark = [pytest.mark.slow, pytest.mark.processes]

PAGE = Path(__file__).parents[3] / "serve/api/ui.html"
DRAWN = """(numPrefill => {
  show($("view"), true);
  const load = { total_blocks: 100, used_blocks: 30, running: 1, waiting: 0, receiving: 0 };
  const made = (role, count) => [...Array(count).keys()].map(n => ({ worker_id: `${role}-${n}c52f9a`, role, host: "", health: "up", load }));
  const prefill = made("prefill", numPrefill), decode = made("decode", 3), transports = ["shm", "tcp", "loopback"];
  past = { flows: prefill.flatMap((a, i) => decode.map((b, j) =>
    ({ source: a.worker_id, target: b.worker_id, transport: transports[(i + j) % 3], bytes_per_s: 1e5 * (1 + i * 3 + j) }))) };
  renderFlows({ workers: [...prefill, ...decode], pairs: [] });
  const boxes = [...document.querySelectorAll("#flows text.rate")].map(one => one.getBBox());
  const curves = [...document.querySelectorAll("#flows path")].map(one => [...Array(200).keys()].map(n => one.getPointAtLength(one.getTotalLength() * n / 200)));
  const has = (box, point) => point.x > box.x && point.x < box.x + box.width && point.y > box.y && point.y < box.y + box.height;
  const meet = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
  return { curves: curves.length,
    labels: boxes.map(box => curves.filter(curve => curve.some(point => has(box, point))).length),
    meetings: boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b => meet(a, b))).length };
})"""  # noqa: E501


@pytest.mark.parametrize(("num_prefill", "num_labels"), [(1, 3), (2, 6), (3, 8)])
async def test_figures_of_crossing_flows_stand_where_nothing_crosses_them(tmp_path, num_prefill, num_labels):
    async with page(tmp_path / "profile") as shown:
        await shown.open(PAGE.as_uri(), 1440, 1000)
        await shown.until("typeof renderFlows === 'function' && document.readyState === 'complete'")
        drawn = await shown.value(f"{DRAWN}({num_prefill})")
    assert drawn["curves"] == 3 * num_prefill and len(drawn["labels"]) >= num_labels
    assert set(drawn["labels"]) == {1} and drawn["meetings"] == 0
