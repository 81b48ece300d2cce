// Overview: what needs attention, six numbers, the time to first token, the load, and the replicas that differ.
import { html, useEffect } from "../vendor.js";
import { may, query, useResource } from "../core/api.js";
import { count, duration, money, percent, plural, significant, visible } from "../core/format.js";
import { replicaChanges, samples, tick } from "../core/live.js";
import { link } from "../core/router.js";
import { startOfDay } from "../core/time-zone.js";
import { Chart, Sparkline } from "../ui/chart.js";
import { attentionItem, findFleetItems } from "../ui/fleet-attention.js";
import { Card, Pill, Resource } from "../ui/parts.js";
import { ReplicaTable } from "../ui/replica-table.js";
import { RunningRollouts } from "../ui/rollout-card.js";
import { currentRange, useSeries } from "../ui/series.js";
import { TimeRange } from "../ui/time-range.js";

const METRICS = ["requests_per_s", "output_tokens_per_s", "ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "failed_per_s", "refused_per_s", "limited_per_s", "kv_usage_ratio", "running", "queued"];

export default function Overview() {
  const changes = replicaChanges.value;
  const replicas = useResource("admin/replicas", 5000);
  const pools = useResource("admin/pools", 5000);
  const fleet = useResource("admin/fleet", 5000);
  useEffect(() => { if (changes) { replicas.reload(); fleet.reload(); } }, [changes]);
  const alerts = useResource(may("viewer", "gateway") ? "admin/alerts" : null, 5000);
  const cost = useResource(query("admin/usage", { since: startOfDay() }), 10000);
  const minute = useResource("minute", 5000, () => query("admin/usage", { since: Math.floor(Date.now() / 1000) - 60 }));
  const recent = useResource("admin/requests?limit=200", 10000);
  const series = useSeries("fleet", METRICS);
  return html`
    <${Attention} replicas=${replicas} pools=${pools} fleet=${fleet} alerts=${alerts} />
    <${RunningRollouts} fleet=${fleet.data} />
    <${TimeRange} />
    <${Numbers} series=${series} replicas=${replicas} cost=${cost} minute=${minute} recent=${recent} />
    <div class="columns"><${FirstToken} series=${series} /><${Load} series=${series} /><${Errors} series=${series} /></div>
    <${Card} title="Replicas that differ from their pool" actions=${html`<a href=${link("models")}>All replicas</a>`}>
      <${Resource} of=${replicas}>${({ data }) => {
        const different = findDifferent(data);
        return different.length ? html`<${ReplicaTable} replicas=${different} height=${280} />`
          : html`<p class="empty">${data.length === 1 ? "The only replica is ready." : `All ${data.length} replicas are ready, and loaded like the others of their pool.`}</p>`;
      }}<//><//>`;
}

// Replicas that are not ready, or whose load is far from the middle of their pool, with the reason.
function findDifferent(replicas) {
  const load = (replica) => replica.running / Math.max(replica.slots, 1);
  return replicas.flatMap((replica) => {
    const others = replicas.filter(({ model, status }) => model === replica.model && status === "ready").map(load).sort((a, b) => a - b);
    const middle = others[Math.floor(others.length / 2)] ?? 0;
    if (replica.status !== "ready") return [replica];
    if (replica.kv_usage_ratio > 0.9) return [{ ...replica, reason: "its KV cache is nearly full" }];
    if (Math.abs(load(replica) - middle) <= 0.3) return [];
    return [{ ...replica, reason: `${percent(load(replica))} of its slots are busy; in the middle of the pool ${percent(middle)}` }];
  });
}

function Attention({ replicas, pools, fleet, alerts }) {
  const items = findFleetItems(fleet.data);
  const add = (...item) => items.push(attentionItem(...item));
  const known = new Set((fleet.data?.problems ?? []).map(({ replica }) => replica));
  if (tick.value?.store_up === false && items[0]?.action !== "Open the doctor") {
    add("page", html`The store does not answer. Accounts are as of the last reading, and usage waits on disk.`, link("settings"), "Open the doctor");
  }
  for (const replica of replicas.data?.data ?? []) {
    const { severity, status, reason } = replica;
    if (!severity || known.has(replica.replica)) continue;
    add(severity, html`Replica <b>${visible(replica.replica)}</b> of <b>${visible(replica.model)}</b> is ${status}${reason ? `: ${visible(reason)}` : ""}.`,
      link("models", [replica.model], { replica: replica.replica }), "Open the replica");
  }
  for (const pool of pools.data?.data ?? []) {
    if (pool.is_mixed) {
      add("ticket", html`The replicas of <b>${visible(pool.model)}</b> compute different bytes (${pool.arithmetics.length} arithmetics), so not every stream can be resumed.`, link("models", [pool.model]), "Compare them");
    }
  }
  for (const replica of replicas.data?.data ?? []) {
    if (replica.kv_usage_ratio > 0.95) {
      add("ticket", html`The KV cache of <b>${visible(replica.replica)}</b> is ${percent(replica.kv_usage_ratio)} full, so requests may be preempted.`, link("models", [replica.model], { replica: replica.replica }), "Open the replica");
    }
    if (replica.waiting > replica.slots) {
      add("ticket", html`<b>${visible(replica.replica)}</b> has ${replica.waiting} waiting requests for ${replica.slots} slots.`, link("requests", [], { model: replica.model }), "See the requests");
    }
  }
  for (const { name, severity, state, labels, summary } of alerts.data?.alerts ?? []) {
    const isShown = labels.pool || labels.replica || name === "StoreUnreachable"; // above, with its cause
    if (state === "firing" && !isShown) add(severity, html`${visible(summary)}.`, link("alerts"), "Open the alerts");
  }
  items.sort((first, second) => first.rank - second.rank); // stable, so causes stay before symptoms
  return html`<${Card} title="Needs attention" note=${items.length ? plural(items.length, "item") : ""}>
    <${Resource} of=${replicas} height=${28}>${() => (items.length ? html`<ul class="att">${items.slice(0, 6).map((item) => html`
      <li><${Pill} kind=${item.kind}>${item.word}<//><span>${item.text}</span><a href=${item.href}>${item.action}</a></li>`)}</ul>`
      : html`<p class="empty"><${Pill} kind="ok">Nothing<//> All replicas answer, the store is up to date, and no alert fires.</p>`)}<//><//>`;
}

const rate = (value) => (value > 0 && value < 1 ? significant(value, 2) : count(value));

function Number({ label, value, unit, note, values }) {
  return html`<div class="card"><div class="s">${label}</div><div><b>${value}</b> <span class="u">${unit}</span></div>
    <div class="s">${note}</div>${values ? html`<${Sparkline} values=${values} />` : null}</div>`;
}

function Numbers({ series, replicas, cost, minute, recent }) {
  const columns = series.data?.metrics ?? {};
  const last = (name) => columns[name]?.findLast((value) => value !== null);
  const totals = minute.data?.data[0];
  const statuses = recent.data?.columns.status ?? [];
  const failed = statuses.filter((status) => status === "failed" || status === "interrupted").length;
  const ready = (replicas.data?.data ?? []).filter(({ status }) => status === "ready");
  const kv = ready.length ? ready.reduce((sum, replica) => sum + replica.kv_usage_ratio, 0) / ready.length : undefined;
  const perSecond = (value) => (value === undefined ? undefined : value / 60);
  return html`<div class="kpi">
    <${Number} label="Requests" value=${rate(perSecond(totals?.requests))} unit="per s" note="ended, last minute" values=${columns.requests_per_s} />
    <${Number} label="Output tokens" value=${rate(perSecond(totals?.output_tokens))} unit="per s" note="last minute" values=${columns.output_tokens_per_s} />
    <${Number} label="TTFT p95" value=${duration(last("ttft_p95_s"))} note="latest, of all models" values=${columns.ttft_p95_s} />
    <${Number} label="Errors" value=${percent(statuses.length ? failed / statuses.length : undefined)} note=${`${failed} of the last ${statuses.length}`} values=${columns.failed_per_s} />
    <${Number} label="KV cache in use" value=${percent(kv)} note=${`mean of ${ready.length} ready`} values=${columns.kv_usage_ratio} />
    <${Number} label="Cost today" value=${money(cost.data?.data[0]?.nano_dollars)} note=${plural(cost.data?.data[0]?.requests, "request")} /></div>`;
}

function FirstToken({ series }) {
  const empty = "There are no points yet. They appear with the first streams; the playground sends one.";
  const names = ["ttft_p50_s", "ttft_p95_s", "ttft_p99_s"];
  return html`<${Card} title="Time to first token" note=${series.data?.partial?.length ? `without the gateways ${series.data.partial.join(", ")}` : "all models"}><${Resource} of=${series} height=${220} empty=${html`${empty} <a href=${link("playground")}>Open the playground</a>`}
    isEmpty=${(data) => !names.some((name) => data.metrics[name]?.some((value) => value !== null))}>
    ${(data) => html`<${Chart} title="Time to first token" format=${duration} data=${[data.times, ...names.map((name) => data.metrics[name] ?? [])]}
      series=${[{ label: "p50", color: "s3" }, { label: "p95", color: "s1" }, { label: "p99", color: "s2" }]} />`}<//><//>`;
}

const ERRORS = [["failed", "bad"], ["refused", "s4"], ["limited", "s5"]];

function Errors({ series }) {
  const metrics = ERRORS.map(([name]) => series.data?.metrics[`${name}_per_s`] ?? []);
  return html`<${Card} title="Errors per second" note="all models"><${Resource} of=${series} height=${220} empty="There are no readings yet." isEmpty=${() => !metrics.some((values) => values.some((value) => value !== null))}>
    ${({ times }) => html`<${Chart} title="Errors per second" format=${count} least=${1} data=${[times, ...metrics]} series=${ERRORS.map(([label, color]) => ({ label, color }))} />`}<//><//>`;
}

// Running and waiting requests: from the series, or from the event stream where a gateway keeps no series.
function Load({ series }) {
  const version = tick.value?.at;
  const { metrics = {}, times = [] } = series.data ?? {};
  const hasSeries = Boolean(metrics.running?.some((value) => value !== null));
  const data = hasSeries || currentRange().start ? [times, metrics.running ?? [], metrics.queued ?? []] : [samples.at, samples.running, samples.queued];
  return html`<${Card} title="Running and waiting requests" note=${data[0] === times ? "all models" : "since this page was opened"}>
    <${Chart} title="Running and waiting requests" format=${count} least=${4} version=${version} data=${data}
      series=${[{ label: "running", color: "s1" }, { label: "waiting", color: "s2" }]} /><//>`;
}
