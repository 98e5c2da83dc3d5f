"""Builds the JSON of the dashboards in data/ with grafana-foundation-sdk, which only this module needs.

    python -m kvrelay.cluster.dashboards.build

Queries have the names of /metrics; files.py puts Ray's prefix before them where Ray exports. The variables
`datasource`, `SessionName` and `Cluster` are named as those of Ray's own dashboards, because Ray's pages set them.
"""

import json
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from kvrelay.cluster.dashboards.files import DATA, SERVE_PANELS
from kvrelay.cluster.dashboards.panels import CLUSTER, DASHBOARDS, SERVE_PAGE, Dashboard, Panel

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
VARIABLES = {  # name -> (label, the series that have it, the series' label)
    "SessionName": ("Session", "kvrelay_workers", "SessionName"),
    "Cluster": ("Cluster", "kvrelay_workers", "ray_io_cluster"),
    "role": ("Role", f"kvrelay_worker_sequences{{{CLUSTER}}}", "role"),
    "worker": ("Worker", f'kvrelay_worker_sequences{{{CLUSTER},role=~"$role"}}', "worker"),
    "tenant": ("Tenant", f"kvrelay_worker_tenant_tokens_total{{{CLUSTER}}}", "tenant"),
}
LEAST_STEP = "1m"  # so that a rate covers two of Ray's reports: `kvrelay serve` has one in 30 s
COLUMNS, HEIGHT = 2, 8


def built_panel(panel: Panel, number: int) -> timeseries.Panel:
    """The builder of one panel with its id."""
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    built = (
        timeseries.Panel()
        .id(number)
        .title(panel.title)
        .description(panel.description)
        .unit(panel.unit)
        .datasource(SOURCE)
        .interval(LEAST_STEP)
        .span(24 // COLUMNS)
        .height(HEIGHT)
        .axis_soft_min(0)
        .fill_opacity(10)
        .legend(legend.show_legend(True))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if panel.unit == "percentunit":
        built = built.axis_soft_max(1)
    for index, (name, query) in enumerate(panel.queries.items()):
        target = prometheus.Dataquery().datasource(SOURCE).expr(query).legend_format(name).ref_id(chr(65 + index))
        built = built.with_target(target)
    return built


def built(spec: Dashboard) -> dict[str, Any]:
    """One dashboard as Grafana's JSON."""
    page = (
        dashboard.Dashboard(spec.title)
        .uid(spec.uid)
        .tags(["kvrelay"])
        .time("now-30m", "now")
        .refresh("30s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name, (label, series, of) in VARIABLES.items():
        every = VariableOption(text="All", value="$__all", selected=True)
        variable = dashboard.QueryVariable(name).label(label).datasource(SOURCE).query(f"label_values({series}, {of})")
        variable = variable.include_all(True).multi(True).all_value(".*").current(every)
        page = page.with_variable(
            variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)
        )
    number = 0
    for title, panels in spec.rows.items():
        number += 1
        page = page.with_row(dashboard.Row(title).id(number))
        for panel in panels:
            number += 1
            page = page.with_panel(built_panel(panel, number))
    made: dict[str, Any] = plain(page.build())
    return made


def plain(model: object) -> Any:
    return json.loads(json.dumps(model, cls=JSONEncoder))


def texts() -> dict[str, str]:
    """File name -> JSON: every dashboard, and the panels that take the place of some in Ray's Serve dashboard."""
    pages: dict[str, Any] = {f"{spec.uid}.json": built(spec) for spec in DASHBOARDS}
    pages[SERVE_PANELS] = [plain(built_panel(panel, number).build()) for number, panel in SERVE_PAGE.items()]
    return {name: json.dumps(page, indent=1, ensure_ascii=False, sort_keys=True) + "\n" for name, page in pages.items()}


def main() -> None:
    """Write the files."""
    for name, text in texts().items():
        (DATA / name).write_text(text)


if __name__ == "__main__":
    main()
