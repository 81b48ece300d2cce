// One replica: its state and facts, its load over time, and its log, also after it is gone.
import { html } from "../vendor.js";
import { age, bytes, count, duration, percent, plural, time, visible } from "../core/format.js";
import { link } from "../core/router.js";
import { Chart } from "../ui/chart.js";
import { Card, Name, Resource, Status } from "../ui/parts.js";
import { ReplicaActions } from "../ui/replica-table.js";
import { ReplicaLog } from "../ui/replica-log.js";
import { useSeries } from "../ui/series.js";
import { TimeRange } from "../ui/time-range.js";

export function Replica({ name, replicas, reload }) {
  const replica = replicas.data?.data.find((each) => each.replica === name);
  return html`<div class="stack"><${Resource} of=${replicas}>${() => (replica ? html`<div class="stack"><${Facts} replica=${replica} reload=${reload} /><${ReplicaCharts} name=${name} blocks=${replica.kv_blocks_total} /></div>`
    : html`<${Card} title=${visible(name)}><p class="empty">This gateway sends it no requests. Its log and history are below.</p><//>`)}<//>
    <${ReplicaLog} name=${name} /></div>`;
}

function Facts({ replica, reload }) {
  const { usage } = replica;
  const facts = [
    ["State", html`<${Status} value=${replica.status} /> ${replica.reason}`], ["Since", replica.since ? `${time(replica.since, { date: true })} (${age(replica.since)})` : "before this gateway started"],
    ["Decision", `${replica.state}${replica.changed_by ? `, by ${replica.changed_by} at ${time(replica.changed_at, { date: true })}` : ""}`], ["Weight", replica.weight],
    ["Requests", `${replica.in_flight} of this gateway; ${replica.running} running and ${replica.waiting} waiting in all, ${replica.slots} slots`],
    ["KV cache", `${percent(replica.kv_usage_ratio)}${replica.kv_blocks_total ? ` of ${count(replica.kv_blocks_total)} blocks` : ""}`], ["Report", replica.report_age_s === null ? "none yet" : `${replica.report_age_s.toFixed(1)} s old`],
    ["Engine core", usage ? `${bytes(usage.memory_bytes)} of private memory${usage.host_cpus ? `, ${usage.cpus.toFixed(1)} CPUs` : ""}` : null],
    ["Its machine", usage ? `${bytes(usage.host_free_bytes)} of ${bytes(usage.host_memory_bytes)} of memory free${usage.host_cpus ? `, ${usage.host_free_cpus.toFixed(1)} of ${plural(usage.host_cpus, "CPU")} idle` : ""}` : null],
    ["Server", `${replica.kind} ${replica.build}`], ["Accelerator", replica.accelerator], ["Zone", replica.zone], ["Drafts", replica.no_drafts_reason && `none: ${replica.no_drafts_reason}`], ["Context", replica.max_model_len ? `${replica.max_model_len} tokens` : null],
    ["Revision", replica.model_revision], ["Digest", replica.model_digest], ["Arithmetic", html`<${Name} value=${replica.arithmetic_id} />`],
    ["Start-up", replica.startup ? `${replica.phase}` : null], ["Labels", Object.entries(replica.labels).map(([key, value]) => `${key}=${value}`).join(", ")],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  return html`<${Card} title=${visible(replica.replica)} note=${visible(replica.model)} actions=${html`<${ReplicaActions} replica=${replica} reload=${reload} /> <a href=${link("requests", [], { model: replica.model })}>Its requests</a>`}>
    <dl class="facts">${facts.map(([name, value]) => [html`<dt key=${`${name}-term`}>${name}</dt>`, html`<dd key=${name}>${value}</dd>`])}</dl><//>`;
}

const LOAD = [["running", "s1"], ["batch_size", "s3"], ["waiting", "s2"]];
const BLOCKS = [["kv_blocks_used", "s1", "used"], ["kv_blocks_cached", "s3", "cached"]];
const PHASES = [["step_plan_s", "s2", "plan"], ["step_launch_s", "s4", "launch"], ["step_compute_s", "s1", "compute"], ["step_sample_s", "s3", "sample"], ["step_commit_s", "s5", "commit"]];
const DRAFTS = [["draft_acceptance_ratio", "s3", "accepted drafts"]];
const SAVED = [["draft_saved_s_per_s", "s1", "seconds saved"]];
const OTHERS = ["kv_usage_ratio", "output_tokens_per_s", "cache_hit_ratio", "preemptions_per_s", "tokens_per_step"];
const METRICS = [...[...LOAD, ...BLOCKS, ...PHASES, ...DRAFTS, ...SAVED].map(([metric]) => metric), ...OTHERS];
const NO_DRAFTS = "No drafts were verified in this time.";
const NATIVE = "Only native replicas report it.";

// Load, KV cache and speed of a replica over the chosen time.
function ReplicaCharts({ name, blocks }) {
  const series = useSeries(`replica:${name}`, METRICS);
  const chart = (title, format, least, lines, empty = "There are no readings of this replica yet.") => html`<${Card} title=${title}><${Resource} of=${series} height=${220} empty=${empty}
    isEmpty=${({ metrics }) => !lines.some(([metric]) => metrics[metric]?.some((value) => value !== null))}>${({ times, metrics }) => html`
    <${Chart} title=${title} format=${format} least=${least} data=${[times, ...lines.map(([metric]) => metrics[metric])]} series=${lines.map(([metric, color, label]) => ({ label: label ?? metric.replaceAll("_", " "), color }))} />`}<//><//>`;
  return html`<${TimeRange} />
    <div class="columns">${chart("Batch and requests", count, 4, LOAD)}${chart("Output tokens per second", count, 1, [["output_tokens_per_s", "s1"]])}</div>
    <div class="columns">${blocks ? chart(`KV blocks of ${count(blocks)}`, count, 1, BLOCKS) : chart("KV cache in use", percent, 1, [["kv_usage_ratio", "s1"]])}${chart("Share of cached input tokens", percent, 1, [["cache_hit_ratio", "s3"]])}</div>
    <div class="columns">${chart("Phases of a step", duration, 1e-3, PHASES, `No step ran in this time. ${NATIVE}`)}${chart("Preemptions per second", count, 1, [["preemptions_per_s", "s2"]], `There are no readings yet. ${NATIVE}`)}</div>
    <div class="columns">${chart("Tokens per step of a sequence", (value) => value.toFixed(2), 1, [["tokens_per_step", "s1"]], `No step ran in this time. ${NATIVE}`)}${chart("Share of accepted drafts", percent, 1, DRAFTS, NO_DRAFTS)}</div>
    <div class="columns">${chart("Seconds saved by drafts, per second", (value) => value.toFixed(2), 1, SAVED, NO_DRAFTS)}</div>`;
}
