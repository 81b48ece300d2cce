// Models and replicas: each pool with its replicas, the declared fleet behind it, what changed, and the decisions of operators.
import { html, useEffect } from "../vendor.js";
import { query, useResource } from "../core/api.js";
import { age, count, MISSING, percent, time, visible } from "../core/format.js";
import { replicaChanges } from "../core/live.js";
import { link, route } from "../core/router.js";
import { Chart } from "../ui/chart.js";
import { Fleet } from "../ui/fleet-pools.js";
import { Card, Name, Pill, Resource, Status } from "../ui/parts.js";
import { ReplicaActions, ReplicaTable } from "../ui/replica-table.js";
import { useSeries } from "../ui/series.js";
import { Table } from "../ui/table.js";

export default function Models() {
  const { parts: [model], query: { replica } } = route.value;
  const pools = useResource("admin/pools", 5000);
  const replicas = useResource(query("admin/replicas", { model }), 5000);
  const events = useResource(query("admin/replicas/events", { model, replica, limit: 200 }), 10000);
  const fleet = useResource("admin/fleet", 3000);
  const changes = replicaChanges.value;
  const reload = () => { pools.reload(); replicas.reload(); events.reload(); };
  useEffect(() => { if (changes) reload(); }, [changes]);
  const chosen = replica && replicas.data?.data.find((each) => each.replica === replica);
  return html`
    ${replica ? html`<${Resource} of=${replicas}>${() => (chosen ? html`<${Replica} replica=${chosen} reload=${reload} /><${ReplicaCharts} key=${replica} name=${replica} />`
      : html`<${Card} title=${visible(replica)}><p class="empty">This gateway has no such replica now. Its history is below.</p><//>`)}<//>` : null}
    <${Card} title="Pools" actions=${model ? html`<a href=${link("models")}>All models</a>` : null}><${Resource} of=${pools} empty="No model is configured. Add one to the gateway's settings, or apply a fleet.">
      ${({ data }) => html`<${Table} label="Pools" columns=${POOL_COLUMNS} rows=${data} rowKey=${(row) => `${row.model} ${row.version}`} height=${240} />`}<//><//>
    <${Card} title=${model ? `Replicas of ${visible(model)}` : "Replicas"}><${Resource} of=${replicas} empty="The pool has no replica.">
      ${({ data }) => html`<${ReplicaTable} replicas=${data} height=${420} reload=${reload} csv="replicas.csv" />`}<//><//>
    ${replica ? null : html`<${Fleet} fleet=${fleet} model=${model} />`}
    <${Card} title="What changed" note="status changes that this gateway saw, and decisions"><${Resource} of=${events} empty="Nothing changed since this gateway started.">
      ${({ data }) => html`<${Table} label="Changes" columns=${EVENT_COLUMNS} rows=${data.map((event, index) => ({ ...event, index }))} rowKey=${(row) => `${row.at} ${row.index}`} height=${280} csv="replica-events.csv" />`}<//><//>
    <${FleetEvents} replica=${replica} />`;
}

function Replica({ replica, reload }) {
  const facts = [
    ["State", html`<${Status} value=${replica.status} /> ${replica.reason}`], ["Since", replica.since ? `${time(replica.since, { date: true })} (${age(replica.since)})` : "before this gateway started"],
    ["Decision", `${replica.state}${replica.changed_by ? `, by ${replica.changed_by} at ${time(replica.changed_at, { date: true })}` : ""}`], ["Weight", replica.weight],
    ["Requests", `${replica.in_flight} of this gateway; ${replica.running} running and ${replica.waiting} waiting in all, ${replica.slots} slots`],
    ["KV cache", percent(replica.kv_usage_ratio)], ["Report", replica.report_age_s === null ? "none yet" : `${replica.report_age_s.toFixed(1)} s old`],
    ["Server", `${replica.kind} ${replica.build}`], ["Accelerator", replica.accelerator], ["Zone", replica.zone], ["Context", replica.max_model_len ? `${replica.max_model_len} tokens` : null],
    ["Revision", replica.model_revision], ["Digest", replica.model_digest], ["Arithmetic", html`<${Name} value=${replica.arithmetic_id} />`],
    ["Start-up", replica.startup ? `${replica.phase}` : null], ["Labels", Object.entries(replica.labels).map(([key, value]) => `${key}=${value}`).join(", ")],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  return html`<${Card} title=${visible(replica.replica)} note=${visible(replica.model)} actions=${html`<${ReplicaActions} replica=${replica} reload=${reload} /> <a href=${link("requests", [], { model: replica.model })}>Its requests</a>`}>
    <dl class="facts">${facts.map(([name, value]) => [html`<dt key=${`${name}-term`}>${name}</dt>`, html`<dd key=${name}>${value}</dd>`])}</dl><//>`;
}

const LOAD = [["running", "s1"], ["batch_size", "s3"], ["waiting", "s2"]];

// Load, KV cache and speed of a replica over the last quarter of an hour.
function ReplicaCharts({ name }) {
  const series = useSeries(`replica:${name}`, [...LOAD.map(([metric]) => metric), "kv_usage_ratio", "output_tokens_per_s", "cache_hit_ratio"], "15m");
  const chart = (title, format, least, lines) => html`<${Card} title=${title} note="15 min"><${Resource} of=${series} height=${220} empty="There are no readings of this replica yet."
    isEmpty=${({ metrics }) => !lines.some(([metric]) => metrics[metric]?.some((value) => value !== null))}>${({ times, metrics }) => html`
    <${Chart} title=${title} format=${format} least=${least} hasPoints=${format === percent} data=${[times, ...lines.map(([metric]) => metrics[metric])]} series=${lines.map(([metric, color]) => ({ label: metric.replaceAll("_", " "), color }))} />`}<//><//>`;
  return html`<div class="two">${chart("Requests", count, 4, LOAD)}${chart("Output tokens per second", count, 1, [["output_tokens_per_s", "s1"]])}</div>
    <div class="two">${chart("KV cache in use", percent, 1, [["kv_usage_ratio", "s1"]])}${chart("Share of cached input tokens", percent, 1, [["cache_hit_ratio", "s3"]])}</div>`;
}

// The log of the fleet's controllers, if the gateway belongs to a declared fleet.
function FleetEvents({ replica }) {
  const events = useResource(query("admin/events", { replica, limit: 200 }), 5000);
  if (events.error?.status === 404) return null;
  return html`<${Card} title="What the controllers did"><${Resource} of=${events} empty="The controllers of the fleet have done nothing yet.">
    ${({ data }) => html`<${Table} label="Events of the fleet" columns=${FLEET_COLUMNS} rows=${[...data].reverse()} rowKey=${(row) => row.number} height=${280} csv="fleet-events.csv" />`}<//><//>`;
}

const POOL_COLUMNS = [
  { key: "model", label: "Model", value: (row) => row.model, cell: (row) => html`<a href=${link("models", [row.model])}>${visible(row.model)}</a>` },
  { key: "version", label: "Version", value: (row) => row.version, cell: (row) => (row.version ? html`<${Name} value=${row.version.slice(0, 12)} />` : MISSING) },
  { key: "ready", label: "Ready", isNumber: true, value: (row) => row.statuses.ready ?? 0, cell: (row) => `${row.statuses.ready ?? 0} of ${row.replicas}` },
  { key: "other", label: "Others", value: (row) => Object.entries(row.statuses).filter(([name]) => name !== "ready").map(([name, number]) => `${number} ${name}`).join(", ") },
  { key: "active_requests", label: "Requests here", isNumber: true, value: (row) => row.active_requests },
  { key: "routing", label: "Routing", value: (row) => row.routing },
  { key: "is_mixed", label: "Streams resume", value: (row) => !row.is_mixed, cell: (row) => (row.is_mixed ? html`<${Pill} kind="warn">not on all replicas<//>` : html`<${Pill} kind="ok">on all replicas<//>`) },
];
const EVENT_COLUMNS = [
  { key: "at", label: "Time", value: (row) => row.at, cell: (row) => time(row.at, { date: true }) },
  { key: "model", label: "Model", value: (row) => visible(row.model) }, { key: "replica", label: "Replica", value: (row) => visible(row.replica) },
  { key: "change", label: "Change", value: (row) => (row.action ? `${row.action}${row.weight === null ? "" : ` ${row.weight}`}` : `${row.previous} → ${row.status}`) },
  { key: "actor", label: "By", value: (row) => row.actor ?? "" }, { key: "reason", label: "Reason", value: (row) => row.reason },
];
const FLEET_COLUMNS = [
  { key: "at", label: "Time", value: (row) => row.at, cell: (row) => time(row.at, { date: true }) },
  { key: "kind", label: "Event", value: (row) => row.kind }, { key: "pool", label: "Pool", value: (row) => visible(row.pool) },
  { key: "replica", label: "Replica", value: (row) => visible(row.replica) }, { key: "outcome", label: "Outcome", value: (row) => row.outcome }, { key: "reason", label: "Reason", value: (row) => row.reason },
];
