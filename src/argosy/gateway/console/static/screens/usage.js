// Usage and cost: sums of the ledger by tenant, key, user, model, replica, route and day.
import { html, useMemo } from "../vendor.js";
import { may, query, useResource } from "../core/api.js";
import { count, exact, money, percent, time, visible } from "../core/format.js";
import { PAGE_ROWS, usePages } from "../core/pages.js";
import { link, route, setQuery } from "../core/router.js";
import { useNames } from "../ui/names.js";
import { Card, Field, Pill, Resource } from "../ui/parts.js";
import { PrefixDoctor } from "../ui/prefix-doctor.js";
import { Table, currentSort, timeColumn } from "../ui/table.js";

const GROUPS = ["organisation", "project", "key", "user", "model", "replica", "route"];
const MOST_EXPENSIVE = { key: "nano_dollars", isDescending: true };
const DAY_S = 86400;
const RANGES = [["1d", "Today", 0], ["7d", "7 days", 6], ["30d", "30 days", 29], ["90d", "90 days", 89]];

export default function Usage() {
  const { query: { by = may("viewer") ? "project" : "model", range = "7d", model } } = route.value;
  const since = useMemo(() => {
    const today = Math.floor(Date.now() / 1000 / DAY_S) * DAY_S;
    return today - (RANGES.find(([id]) => id === range)?.[2] ?? 6) * DAY_S;
  }, [range]);
  const path = may("viewer") ? "admin/usage" : "admin/me/usage";
  const label = `Usage by ${by}`;
  const { key: sort, isDescending } = currentSort(label, MOST_EXPENSIVE);
  const paged = may("viewer") ? { sort, order: isDescending ? "desc" : "asc", limit: PAGE_ROWS } : {};
  const { rows, pages, ...report } = usePages(query(path, { since, model, group_by: by, ...paged }), (row) => row[by] ?? "", { every: 30000, cursor: "after" });
  const days = useResource(query(path, { since, model, group_by: "day" }), 30000);
  const names = useNames();
  return html`
    <div class="row"><${Segments} label="Time range, in UTC days" value=${range} options=${RANGES} set=${(id) => setQuery({ range: id })} />
      <${Segments} label="Summed by" value=${by} options=${GROUPS.map((name) => [name, name])} set=${(id) => setQuery({ by: id })} />
      <${Field} label="Model"><input value=${model ?? ""} placeholder="all" onChange=${(event) => setQuery({ model: event.target.value.trim() })} /><//></div>
    <${Card} title="Cost by day" note="UTC days"><${Resource} of=${days} empty="No request ended in this time.">${({ data }) => html`<${Days} rows=${data} />`}<//><//>
    <${Card} title=${label}><${Resource} of=${report} empty="No request ended in this time. Widen the range, or remove the filter.">
      ${() => html`<${Table} label=${label} columns=${columnsFor(by, names)} rows=${rows} rowKey=${(row) => row[by] ?? ""} csv=${`usage-by-${by}.csv`} initialSort=${MOST_EXPENSIVE} pages=${may("viewer") ? pages : null} />`}<//><//>
    ${may("viewer", "gateway") ? html`<${Costs} since=${since} names=${names} /><${Advice} />` : null}
    ${may("viewer") ? html`<${Budgets} names=${names} /><${Outliers} names=${names} /><${PrefixDoctor} model=${model} />` : null}`;
}

function Segments({ label, value, options, set }) {
  return html`<div class="field"><span>${label}</span><div class="seg" role="group" aria-label=${label}>${options.map(([id, text]) => html`
    <button key=${id} aria-pressed=${id === value} onClick=${() => set(id)}>${text}</button>`)}</div></div>`;
}

function Days({ rows }) {
  return html`<${Table} label="Cost by day" columns=${[{ key: "day", label: "Day", value: (row) => row.day }, ...TOTALS]} rows=${rows} rowKey=${(row) => row.day} height=${220} csv="usage-by-day.csv" initialSort=${{ key: "day", isDescending: true }} />`;
}

const TOTALS = [
  { key: "requests", isSorted: true, label: "Requests", isNumber: true, value: (row) => row.requests, cell: (row) => exact(row.requests) },
  { key: "input_tokens", isSorted: true, label: "Input tokens", isNumber: true, value: (row) => row.input_tokens, cell: (row) => exact(row.input_tokens) },
  { key: "cached", label: "Cached", isNumber: true, value: (row) => row.cached_tokens / Math.max(row.input_tokens, 1), cell: (row) => percent(row.input_tokens ? row.cached_tokens / row.input_tokens : undefined) },
  { key: "output_tokens", isSorted: true, label: "Output tokens", isNumber: true, value: (row) => row.output_tokens, cell: (row) => exact(row.output_tokens) },
  { key: "nano_dollars", isSorted: true, label: "Cost", isNumber: true, value: (row) => row.nano_dollars, cell: (row) => html`<span title=${`${exact(row.nano_dollars)} nano-dollars`}>${money(row.nano_dollars)}</span>` },
];
const columnsFor = (by, names) => [{ key: by, label: by, value: (row) => names(row[by]) || "(none)", cell: (row) => visible(names(row[by]) || "(none)") }, ...TOTALS];

// What projects were billed beside the hardware that they used. Idle time is never spread over them.
function Costs({ since, names }) {
  const costs = useResource(query("admin/costs", { since }), 60000);
  return html`<${Card} title="Billed and caused" note="the cost of busy replicas, divided by tokens; pools need dollars_per_hour in the fleet file"><${Resource} of=${costs} empty="No usage and no cost of hardware in this time.">
    ${({ data }) => html`<${Table} label="Billed and caused" columns=${costColumns(names)} rows=${data} rowKey=${(row) => `${row.model} ${row.organisation} ${row.project} ${row.is_idle}`} height=${220} csv="costs.csv" initialSort=${{ key: "caused", isDescending: true }} />
      <p class="s">Billed ${money(total(data, "billed"))}. The hardware cost ${money(total(data, "caused"))}, of it ${money(total(data.filter((row) => row.is_idle), "caused"))} without a request.</p>`}<//><//>`;
}

const total = (rows, name) => rows.reduce((sum, row) => sum + row[name], 0);
const owner = (row, names) => (row.is_idle ? "(idle)" : names(row.project) || "(none)");
const costColumns = (names) => [
  { key: "project", label: "Project", value: (row) => owner(row, names), cell: (row) => visible(owner(row, names)) },
  { key: "model", label: "Model", value: (row) => row.model, cell: (row) => visible(row.model) },
  { key: "billed", label: "Billed", isNumber: true, value: (row) => row.billed, cell: (row) => (row.is_idle ? "" : money(row.billed)) },
  { key: "caused", label: "Caused", isNumber: true, value: (row) => row.caused, cell: (row) => money(row.caused) },
];

// Models with idle, too many or too few replicas.
function Advice() {
  const advice = useResource("admin/costs/advice", 300000);
  return html`<${Card} title="Replicas and their use" note="requests that ran or waited in the last 14 days, as a share of the slots"><${Resource} of=${advice} empty="No replica serves a model.">
    ${({ data }) => html`<${Table} label="Replicas and their use" columns=${ADVICE} rows=${data} rowKey=${(row) => row.model} height=${220} csv="replica-advice.csv" />`}<//><//>`;
}

const ADVICE_KINDS = { idle: "warn", oversized: "warn", undersized: "bad", fits: "ok", unknown: "none" };
const ADVICE = [
  { key: "model", label: "Model", value: (row) => row.model, cell: (row) => visible(row.model) },
  { key: "owner", label: "Owner", value: (row) => row.owners.join(", "), cell: (row) => visible(row.owners.join(", ")) },
  { key: "verdict", label: "Size", value: (row) => row.verdict, cell: (row) => html`<span title=${row.reason}><${Pill} kind=${ADVICE_KINDS[row.verdict]}>${row.verdict}<//></span>` },
  { key: "replicas", label: "Replicas", isNumber: true, value: (row) => row.replicas },
  { key: "advised", label: "Advised", isNumber: true, value: (row) => row.advised_replicas },
  { key: "mean", label: "Mean use", isNumber: true, value: (row) => row.mean_ratio ?? 0, cell: (row) => percent(row.mean_ratio ?? undefined) },
  { key: "peak", label: "Busiest", isNumber: true, value: (row) => row.peak_ratio ?? 0, cell: (row) => percent(row.peak_ratio ?? undefined) },
  { key: "saved", label: "Saves a month", isNumber: true, value: (row) => row.saved_nano_dollars, cell: (row) => money(row.saved_nano_dollars) },
  { key: "month", label: "This month", isNumber: true, value: (row) => row.month_nano_dollars, cell: (row) => money(row.month_nano_dollars) },
  { key: "expected", label: "At its end", isNumber: true, value: (row) => row.expected_nano_dollars, cell: (row) => money(row.expected_nano_dollars) },
];

// Requests that cost far more than others of their project and model.
function Outliers({ names }) {
  const outliers = useResource("admin/usage/outliers", 60000);
  return html`<${Card} title="Expensive requests" note="10 times the 99th percentile of their project and model in 7 days, or more"><${Resource} of=${outliers} empty="No request of the last 7 days stands out.">
    ${({ data }) => html`<${Table} label="Expensive requests" columns=${outlierColumns(names)} rows=${data} rowKey=${(row) => row.request} height=${220} csv="expensive-requests.csv" />`}<//><//>`;
}

const outlierColumns = (names) => [
  timeColumn("ended_at", "Ended"),
  { key: "request", label: "Request", value: (row) => row.request, cell: (row) => html`<a href=${link("requests", [row.request])}>${visible(row.request)}</a>` },
  { key: "project", label: "Project", value: (row) => names(row.project) || "(none)", cell: (row) => visible(names(row.project) || "(none)") },
  { key: "model", label: "Model", value: (row) => row.model, cell: (row) => visible(row.model) },
  { key: "nano_dollars", label: "Cost", isNumber: true, value: (row) => row.nano_dollars, cell: (row) => money(row.nano_dollars) },
  { key: "p99", label: "p99", isNumber: true, value: (row) => row.p99_nano_dollars, cell: (row) => money(row.p99_nano_dollars) },
  { key: "reason", label: "Reason", value: (row) => row.reason },
];

// Limits for a calendar period, with their use in the present one.
function Budgets({ names }) {
  const budgets = useResource("admin/budgets", 60000);
  return html`<${Card} title="Budgets" note="limits for a day or a month, in UTC"><${Resource} of=${budgets} empty="No limit for a day or a month is set. Set one under Tenants and keys.">
    ${({ data }) => html`<${Table} label="Budgets" columns=${budgetColumns(names)} rows=${data} rowKey=${(row) => row.id} height=${220} csv="budgets.csv" initialSort=${{ key: "share", isDescending: true }} />`}<//><//>`;
}

const amount = (unit, value) => (unit === "nano_dollars" ? money(value) : count(value));
const budgetColumns = (names) => [
  { key: "owner", label: "Owner", value: (row) => names(row.owner), cell: (row) => `${row.owner_kind} ${visible(names(row.owner))}` },
  { key: "model", label: "Model", value: (row) => row.model ?? "all", cell: (row) => visible(row.model ?? "all") },
  { key: "unit", label: "Limit of", value: (row) => `${row.unit === "nano_dollars" ? "cost" : row.unit} each ${row.window}` },
  { key: "used", label: "Used", isNumber: true, value: (row) => row.used, cell: (row) => amount(row.unit, row.used) },
  { key: "amount", label: "Limit", isNumber: true, value: (row) => row.amount, cell: (row) => amount(row.unit, row.amount) },
  { key: "left", label: "Left", isNumber: true, value: (row) => Math.max(0, row.amount - row.used), cell: (row) => amount(row.unit, Math.max(0, row.amount - row.used)) },
  { key: "share", label: "Used of it", isNumber: true, value: (row) => row.used / Math.max(row.amount, 1), cell: (row) => html`<${Pill} kind=${row.step_percent === 100 ? "bad" : row.step_percent === 80 ? "warn" : "ok"}>${percent(row.used / Math.max(row.amount, 1))}<//>` },
  { ...timeColumn("exhausted_at", "Used up"), cell: (row) => (row.exhausted_at ? time(row.exhausted_at, { date: true }) : "not in this period") },
];
