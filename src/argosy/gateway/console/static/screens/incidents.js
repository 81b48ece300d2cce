// Incidents: what is wrong, since when, where, after what, and the step that ends it; and drift of the traffic.
import { html, useState } from "../vendor.js";
import { get, may, post, useResource } from "../core/api.js";
import { duration, exact, money, percent, plural, time, visible } from "../core/format.js";
import { link, route } from "../core/router.js";
import { FormDialog } from "../ui/form-dialog.js";
import { Action, Card, Name, Pill, Resource, copyText, notify } from "../ui/parts.js";
import { Table, timeColumn } from "../ui/table.js";

const mayDecide = () => may("operator", "gateway");
const scopeOf = (scope) => Object.entries(scope).map(([name, value]) => `${name} ${visible(value)}`).join(", ") || "the whole fleet";
const stateOf = (closedAt, isFiring) => (closedAt !== null ? ["none", "closed"] : isFiring ? ["bad", "firing"] : ["warn", "open"]);
const lasted = ({ onset, closed_at: closedAt }) => duration(Math.max(0, (closedAt ?? Date.now() / 1000) - onset));

export default function Incidents() {
  const number = route.value.parts[0];
  return number ? html`<${Incident} key=${number} number=${number} />` : html`<${List} />`;
}

function List() {
  const incidents = useResource("admin/incidents", 5000);
  const [isOpening, setOpening] = useState(false);
  const open = async (values) => {
    const { number } = await post("admin/incidents", values);
    location.hash = link("incidents", [number]);
  };
  return html`<${Card} title="Incidents" note="pages open them" actions=${mayDecide() ? html`<button class="btn" onClick=${() => setOpening(true)}>Open one</button>` : null}>
      <${Resource} of=${incidents} empty="There was no incident yet. One opens when a page fires.">
        ${({ data }) => html`<${Table} label="Incidents" columns=${INCIDENTS} rows=${data} rowKey=${(row) => row.number} csv="incidents.csv" />`}<//><//>
    <${Drift} />
    ${isOpening ? html`<${FormDialog} title="Open an incident" submit="Open" save=${open} close=${() => setOpening(false)} fields=${[
      { name: "title", label: "What is wrong", isRequired: true },
      ...["model", "pool", "replica", "tenant"].map((name) => ({ name, label: `${name[0].toUpperCase()}${name.slice(1)}`, hint: name === "model" ? "Alerts of the same model, pool, replica or tenant join." : "" })),
    ]} />` : null}`;
}

const INCIDENTS = [
  { key: "name", label: "Incident", value: (row) => row.number, cell: (row) => html`<a href=${link("incidents", [row.number])}>${row.name}</a>` },
  { key: "state", label: "State", value: (row) => stateOf(row.closed_at, row.is_firing)[1], cell: (row) => { const [kind, word] = stateOf(row.closed_at, row.is_firing); return html`<${Pill} kind=${kind}>${word}<//>`; } },
  { key: "title", label: "Title", value: (row) => visible(row.title), cell: (row) => html`<span title=${row.title}>${visible(row.title)}</span>` },
  { key: "scope", label: "Scope", value: (row) => scopeOf(row.scope) },
  timeColumn("onset", "Since"),
  { key: "lasted", label: "Lasted", value: lasted },
  { key: "cause", label: "Cause", value: (row) => visible(row.cause) },
];

function Drift() {
  const drift = useResource("admin/drift", 30000);
  return html`<${Card} title="Drift" note="the last day beside the weeks before"><${Resource} of=${drift} isEmpty=${(data) => data.streams.length === 0}
    empty=${drift.data?.learning.length ? `Learning ${drift.data.learning.map(visible).join(", ")}. A model has a baseline after seven days.` : "No request was watched yet."}>
    ${(data) => html`<${Table} label="Drift" columns=${DRIFT} rows=${data.streams} rowKey=${(row) => `${row.model}/${row.tenant}/${row.event}`} height=${320} csv="drift.csv" />
      ${data.accepted.map((each) => html`<p class="s" key=${each.model + each.version}>${acceptedText(each)}</p>`)}`}<//><//>`;
}

// What is expected since the gate of a rollout has passed.
const acceptedText = ({ model, version, at, ratios }) => {
  const changes = Object.entries(ratios).map(([name, ratio]) => `${name.replaceAll("_", " ")} ×${ratio.toFixed(1)}`).join(", ");
  return `${visible(model)}: version ${visible(version.slice(0, 12))} passed its gate at ${time(at, { date: true })}. Expected since: ${changes || "no change"}.`;
};

const DRIFT = [
  { key: "model", label: "Model", value: (row) => visible(row.model) },
  { key: "tenant", label: "Tenant", value: (row) => visible(row.tenant) || "all" },
  { key: "event", label: "Requests that", value: (row) => row.description },
  { key: "share", label: "Last day", isNumber: true, value: (row) => row.share, cell: (row) => percent(row.share) },
  { key: "interval", label: "Interval", value: (row) => `${percent(row.low)} to ${percent(row.high)}` },
  { key: "expected", label: "Expected", isNumber: true, value: (row) => row.expected, cell: (row) => percent(row.expected) },
  { key: "requests", label: "Requests", isNumber: true, value: (row) => row.requests, cell: (row) => exact(row.requests) },
];

function Incident({ number }) {
  const incident = useResource(`admin/incidents/${encodeURIComponent(number)}`, 5000);
  return html`<p><a href=${link("incidents")}>All incidents</a></p>
    <${Resource} of=${incident}>${(data) => html`<${Details} incident=${data} reload=${incident.reload} />`}<//>`;
}

function Details({ incident, reload }) {
  const [dialog, setDialog] = useState("");
  const [kind, word] = stateOf(incident.closed_at, incident.firing);
  const copyDraft = async () => copyText((await get(`admin/incidents/${incident.number}/postmortem`)).markdown, "The draft");
  const send = (path, body) => async (values) => { await post(`admin/incidents/${path}`, { incident: incident.number, ...body, ...values }); reload(); };
  const dialogs = {
    comment: { title: "Comment", submit: "Add", save: send("comment", {}), fields: [{ name: "text", label: "Text", isRequired: true }] },
    cause: { title: "Confirm the cause", submit: "Confirm", save: send("comment", { is_cause: true }), fields: [{ name: "text", label: "What caused it", isRequired: true }] },
    close: { title: `Close ${incident.display_name}?`, submit: "Close", save: send("close", {}), fields: [{ name: "reason", label: "Why, for the timeline" }] },
  };
  const button = (name, label) => (mayDecide() ? html`<button class="btn" onClick=${() => setDialog(name)}>${label}</button>` : null);
  const alerts = Object.values(incident.alerts);
  return html`<${Card} title=${`${incident.display_name}: ${visible(incident.title)}`} actions=${html`<${Pill} kind=${kind}>${word}<//>`}>
      <p>${scopeOf(incident.scope)}, since ${time(incident.onset, { date: true })}, ${incident.closed_at === null ? "for" : "it lasted"} ${lasted(incident)}. ${" "}
        ${incident.requests ? `${exact(incident.failed)} of ${exact(incident.requests)} requests failed.` : ""}
        ${incident.request_nano_dollars && incident.failed ? ` They would have cost ${money(incident.request_nano_dollars * incident.failed)}.` : ""}</p>
      ${incident.budgets.map((each) => html`<p key=${each.objective}>Objective ${visible(each.objective)}: ${each.misses === 1 ? "1 miss" : `${exact(each.misses)} misses`}${each.spent === null ? "" : `, ${percent(each.spent)} of the error budget`}${each.remaining === null ? "" : `; ${percent(each.remaining)} are left`}.</p>`)}
      <${Advice} advice=${incident.rollback} reload=${reload} />
      <div class="row commands">${button("comment", "Comment")}${incident.closed_at === null ? button("close", "Close") : null}<${Action} run=${copyDraft}>Copy the postmortem<//></div><//>
    <${Card} title="1 Detect" note=${plural(alerts.length, "alert")}>${alerts.length ? html`<ul class="alerts">${alerts.map((alert) => html`<li key=${`${alert.name}${alert.started_at}`}>
        <div class="row"><${Pill} kind=${alert.ended_at !== null ? "none" : alert.severity === "page" ? "bad" : "warn"}>${alert.ended_at === null ? alert.severity : "ended"}<//><b>${visible(alert.summary)}</b></div>
        <p>${visible(alert.description)}</p><p class="s">Since ${time(alert.started_at, { date: true })}, ${duration(Math.max(0, alert.started_at - incident.onset))} after the onset.</p></li>`)}</ul>` : html`<p class="empty">It was opened by hand, without an alert.</p>`}<//>
    <${Card} title="2 Correlate" note="what changed before, which does not mean because">${incident.changes.length ? html`<${Table} label="Changes" columns=${CHANGES} rows=${incident.changes.map((each, index) => ({ ...each.change, score: each.score, index }))} rowKey=${(row) => row.index} height=${240} />`
      : html`<p class="empty">No recorded change of the two hours before explains this.</p>`}${incident.missing.length ? html`<p class="failure">Not read: ${incident.missing.join(", ")}.</p>` : null}<//>
    <${Card} title="3 Isolate" note=${incident.slices.length ? `where requests are that ${incident.sliced_event}` : ""}>${incident.slices.length ? html`<${Table} label="Slices" columns=${SLICES} rows=${incident.slices} rowKey=${(row) => `${row.dimension} ${row.value}`} height=${240} />`
      : html`<p class="empty">No part of the traffic carries an excess.</p>`}${incident.healthy.length ? html`<p>Healthy: ${incident.healthy.map(visible).join(", ")}.</p>` : null}<//>
    <${Card} title="4 Root cause" actions=${button("cause", "Confirm the cause")}><p>${incident.cause ? `${visible(incident.cause)} (${visible(incident.cause_by)})` : "Not confirmed. Compare what changed with where the excess is."}</p><//>
    <${Card} title="5 Fix and prevent"><ul class="notes">${[...new Set(alerts.map(({ runbook }) => runbook))].map((runbook) => html`<li key=${runbook}>Runbook: <${Name} value=${`docs/how-to/runbooks.md#${runbook}`} /></li>`)}
        <li><a href=${link("models")}>Drain or restart a replica, or steer a rollout</a></li><li><a href=${link("alerts")}>Silence an alert</a></li></ul><//>
    <${Card} title="Timeline"><${Table} label="Timeline" columns=${TIMELINE} rows=${incident.entries.map((each, index) => ({ ...each, index })).sort((a, b) => b.at - a.at)} rowKey=${(row) => row.index} height=${360} csv=${`${incident.display_name}.csv`} /><//>
    ${dialog ? html`<${FormDialog} ...${dialogs[dialog]} close=${() => setDialog("")} />` : null}`;
}

// The rollback of the version that preceded the incident: done, or what speaks against it, with a button.
function Advice({ advice, reload }) {
  if (!advice) return null;
  const pool = visible(advice.pool);
  if (advice.is_done) return html`<p><${Pill} kind="ok">rolled back<//> ${pool} has its old version again. ${advice.reasons.join(" ")}</p>`;
  const abort = async () => {
    await post("admin/fleet/rollout/abort", { pool: advice.pool, rollout: advice.rollout, reason: "incident" });
    notify("All users are sent back to the old version.");
    reload();
  };
  return html`<p><${Pill} kind="warn">new version<//> ${advice.reasons.join(" ")} Not rolled back without a person: ${advice.obstacles.map(visible).join(" ")}</p>
    ${mayDecide() ? html`<${Action} kind="danger" run=${abort} confirm=${`Send all users of ${pool} back to the old version?`}>Roll ${pool} back<//>` : null}`;
}

const CHANGES = [
  timeColumn("at", "Time"),
  { key: "text", label: "Change", value: (row) => visible(row.text), cell: (row) => html`<span title=${row.text}>${visible(row.text)}</span>` },
  { key: "actor", label: "By", value: (row) => visible(row.actor ?? "") },
  { key: "score", label: "Fit", isNumber: true, value: (row) => row.score, cell: (row) => percent(row.score) },
];

const SLICES = [
  { key: "slice", label: "Part", value: (row) => `${row.dimension} ${visible(row.value) || "none"}` },
  { key: "excess", label: "Of the excess", isNumber: true, value: (row) => row.excess_share, cell: (row) => percent(row.excess_share) },
  { key: "requests", label: "Of the requests", isNumber: true, value: (row) => row.request_share, cell: (row) => percent(row.request_share) },
  { key: "share", label: "Share now", isNumber: true, value: (row) => row.share, cell: (row) => percent(row.share) },
  { key: "before", label: "Before", isNumber: true, value: (row) => row.share_before, cell: (row) => percent(row.share_before) },
  { key: "elsewhere", label: "Elsewhere", isNumber: true, value: (row) => row.share_elsewhere, cell: (row) => percent(row.share_elsewhere) },
];

const TIMELINE = [
  timeColumn("at", "Time"),
  { key: "source", label: "Source", value: (row) => row.source },
  { key: "actor", label: "By", value: (row) => visible(row.actor ?? "") },
  { key: "text", label: "What", value: (row) => visible(row.text), cell: (row) => html`<span title=${row.text}>${visible(row.text)}</span>` },
];
